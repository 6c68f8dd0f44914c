//! What is logged, from a list of directives; every fault of the list is named.

use std::fmt;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{Directive, LevelFilter};

/// Keeps the line of each request out.
const NO_REQUESTS: &str = "kvbaton::access=off";

/// A directive that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotADirective(pub String);

/// A list with directives that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAFilter(pub Vec<NotADirective>);

impl fmt::Display for NotAFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.0.iter().map(|word| format!("{:?}", word.0)).collect();
        let verb = if words.len() == 1 { "is" } else { "are" };
        write!(f, "{} {verb} neither a level nor target=level", words.join(", "))
    }
}

impl std::error::Error for NotAFilter {}

/// Reads a list of directives. A word that is no level is refused: the library takes it for the name
/// of a target, and nothing would be logged.
pub(crate) fn filter(level: &str, requests: bool) -> Result<EnvFilter, NotAFilter> {
    let mut filter = EnvFilter::default();
    let mut faults = Vec::new();
    for text in directives(level) {
        match read(text.trim()) {
            Some(directive) => filter = filter.add_directive(directive),
            None => faults.push(NotADirective(text.trim().to_owned())),
        }
    }
    if !faults.is_empty() {
        return Err(NotAFilter(faults));
    }
    if !requests && let Ok(directive) = NO_REQUESTS.parse() {
        filter = filter.add_directive(directive);
    }
    Ok(filter)
}

fn read(text: &str) -> Option<Directive> {
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    // Fields of a span may have values of their own: `[span{field=value}]=level`.
    let sound = match (text.rsplit_once('='), text.ends_with(']')) {
        (_, true) => true,
        (Some((_, level)), false) => is_level(level),
        (None, false) => is_level(text),
    };
    text.parse().ok().filter(|_| sound)
}

/// Split at commas that are not inside of a span's braces.
fn directives(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0_usize, 0, Vec::new());
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                found.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&list[start..]);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_no_level_is_refused() {
        for good in [
            "info",
            "WARN",
            "off",
            "kvbaton=debug,warn",
            "info,hyper=off",
            " info , kvbaton=debug ",
            "[request{request_id=a,path=b}]=debug,info",
            "kvbaton[request]=trace",
        ] {
            assert!(filter(good, true).is_ok(), "{good}");
        }
        for bad in ["warning", "verbose", "loud", "", "info,", "kvbaton=loud", "[request=info"] {
            assert!(filter(bad, true).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_fault_is_named() {
        let faults = filter("warn,verbose,kvbaton=loud", true).unwrap_err();
        assert_eq!(faults.to_string(), r#""verbose", "kvbaton=loud" are neither a level nor target=level"#);
        let fault = filter("loud", true).unwrap_err();
        assert_eq!(fault.to_string(), r#""loud" is neither a level nor target=level"#);
    }

    #[test]
    fn requests_can_be_left_out() {
        assert!(filter("info", false).unwrap().to_string().contains(NO_REQUESTS));
        assert!(!filter("info", true).unwrap().to_string().contains("access"));
    }
}

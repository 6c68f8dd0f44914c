//! `kvbaton --from-vllm-router-args …`: the settings that do what a command line of vllm-router 0.1.17 does, and
//! what of it has no counterpart. Reads the command line as vllm-router's own parser would; starts nothing.

mod draft;
mod flags;

use std::io::Write as _;
use std::process::ExitCode;

use super::fault::{BAD, USAGE};
use super::say;
use crate::config;
use draft::Draft;
use flags::{FLAGS, Fate, Flag, Takes};

/// Why a command line cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("vllm-router has no flag {flag}{}", near.as_ref().map(|near| format!("; did you mean --{near}?")).unwrap_or_default())]
    Unknown { flag: String, near: Option<&'static str> },
    #[error("--{flag} can be short for each of: {}", all.join(", "))]
    Ambiguous { flag: String, all: Vec<&'static str> },
    #[error("--{flag} {takes}")]
    Values { flag: &'static str, takes: &'static str },
    #[error("--{flag} {value}: {wanted}")]
    Value { flag: &'static str, value: String, wanted: &'static str },
    #[error("{word:?} belongs to no flag")]
    Stray { word: String },
}

/// Prints the settings. The exit code says whether anything that was asked for is missing.
pub(super) fn run(words: &[String]) -> anyhow::Result<ExitCode> {
    let mut draft = match translated(words) {
        Ok(draft) => draft,
        Err(error) => {
            writeln!(std::io::stderr(), "kvbaton: {error}")?;
            return Ok(ExitCode::from(USAGE));
        }
    };
    let text = draft.text();
    say(&text)?;
    if let Err(faults) = config::read(&text) {
        writeln!(std::io::stderr(), "kvbaton: these settings cannot be used as they are: {faults}")?;
        return Ok(ExitCode::from(USAGE));
    }
    if draft.missing.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let count = draft.missing.len();
    writeln!(std::io::stderr(), "kvbaton: without a counterpart: {count}; see \"Missing\" above")?;
    Ok(ExitCode::from(BAD))
}

/// What a command line asks for.
fn translated(words: &[String]) -> Result<Draft, Unreadable> {
    let mut draft = Draft::default();
    for (flag, values) in given(words)? {
        match &flag.fate {
            Fate::Set(put) => put(&mut draft, flag.name, &values)?,
            Fate::Needless(why) => draft.needless.push((said(flag, &values), (*why).to_owned())),
            Fate::Missing(why) => draft.missing.push((said(flag, &values), (*why).to_owned())),
        }
    }
    draft.finish();
    Ok(draft)
}

/// A flag as it was given.
fn said(flag: &Flag, values: &[String]) -> String {
    let mut text = format!("--{}", flag.name);
    for value in values {
        // It goes into a comment, which ends with the line.
        let visible: String = value.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        text.push(' ');
        text.push_str(&visible);
    }
    text
}

/// Takes a command line apart: `--flag value`, `--flag=value`, unique beginnings of flags. The program's own
/// name may stand before it.
fn given(words: &[String]) -> Result<Vec<(&'static Flag, Vec<String>)>, Unreadable> {
    let mut words = words.iter().map(String::as_str).peekable();
    if words.peek().is_some_and(|word| word.rsplit('/').next() == Some("vllm-router")) {
        words.next();
    }
    let mut all = Vec::new();
    while let Some(word) = words.next() {
        let name = match word {
            "-h" => "help",
            _ => match word.strip_prefix("--") {
                Some(name) if !name.is_empty() => name,
                _ if is_flag(word) => return Err(Unreadable::Unknown { flag: word.to_owned(), near: None }),
                _ => return Err(Unreadable::Stray { word: word.to_owned() }),
            },
        };
        let (name, glued) = match name.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (name, None),
        };
        let flag = known(name)?;
        let mut values: Vec<String> = glued.into_iter().collect();
        let most = match flag.takes {
            Takes::Nothing => 0,
            _ if !values.is_empty() => values.len(),
            Takes::One => 1,
            Takes::Any | Takes::Some => usize::MAX,
        };
        while values.len() < most
            && let Some(value) = words.next_if(|word| !is_flag(word))
        {
            values.push(value.to_owned());
        }
        let takes = match (flag.takes, values.len()) {
            (Takes::Nothing, 1..) => "takes no value",
            (Takes::One, 0) => "takes a value",
            (Takes::Some, 0) => "takes at least one value",
            _ => {
                all.push((flag, values));
                continue;
            }
        };
        return Err(Unreadable::Values { flag: flag.name, takes });
    }
    Ok(all)
}

/// Whether a word is a flag, and not a value: negative numbers are values.
fn is_flag(word: &str) -> bool {
    word.len() > 1 && word.starts_with('-') && word.parse::<f64>().is_err()
}

fn known(name: &str) -> Result<&'static Flag, Unreadable> {
    if let Some(flag) = FLAGS.iter().find(|flag| flag.name == name) {
        return Ok(flag);
    }
    let begun: Vec<&Flag> = FLAGS.iter().filter(|flag| flag.name.starts_with(name)).collect();
    match begun[..] {
        [flag] => Ok(flag),
        [] => {
            let near = FLAGS
                .iter()
                .map(|flag| (strsim::jaro_winkler(name, flag.name), flag.name))
                .filter(|(likeness, _)| *likeness > 0.8)
                .max_by(|(one, _), (other, _)| one.total_cmp(other));
            Err(Unreadable::Unknown { flag: format!("--{name}"), near: near.map(|(_, name)| name) })
        }
        _ => Err(Unreadable::Ambiguous {
            flag: name.to_owned(),
            all: begun.iter().map(|flag| flag.name).collect(),
        }),
    }
}

#[cfg(test)]
mod tests;

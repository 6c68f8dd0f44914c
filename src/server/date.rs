//! The `date` of answers that are not hyper's, made once a second on each thread.

use std::cell::RefCell;
use std::io::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use httpdate::HttpDate;

thread_local! {
    /// A second since the epoch, and its header line.
    static LAST: RefCell<(u64, Vec<u8>)> = const { RefCell::new((0, Vec::new())) };
}

/// Adds the header line of this moment.
pub(super) fn write(out: &mut Vec<u8>) {
    let second = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    LAST.with_borrow_mut(|(of, line)| {
        if *of != second || line.is_empty() {
            line.clear();
            let date = HttpDate::from(UNIX_EPOCH + Duration::from_secs(second));
            // A vector takes all that is written to it.
            let _ = write!(line, "date: {date}\r\n");
            *of = second;
        }
        out.extend_from_slice(line);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_header_line_of_now() {
        let mut out = Vec::new();
        write(&mut out);
        let said = std::str::from_utf8(&out).unwrap().strip_prefix("date: ").unwrap();
        let said = httpdate::parse_http_date(said.strip_suffix("\r\n").unwrap()).unwrap();
        let apart = said.elapsed().unwrap_or_default();
        assert!(apart < Duration::from_secs(60), "{apart:?}");
    }
}

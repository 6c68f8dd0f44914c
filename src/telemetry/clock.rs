//! The time of a log line: UTC with milliseconds.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

/// As RFC 3339 writes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct UtcMillis;

impl FormatTime for UtcMillis {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        write(writer, since)
    }
}

fn write(writer: &mut impl fmt::Write, since: Duration) -> fmt::Result {
    let seconds = since.as_secs();
    let (year, month, day) = date(seconds / 86400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let millis = since.subsec_millis();
    write!(writer, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// The date that so many days after 1970-01-01 is, in years that begin in March, so that the day that only some
/// have is their last.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, millis, expected) in [
            (0, 0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, 999, "2000-02-28T23:59:59.999Z"),
            (951_782_400, 1, "2000-02-29T00:00:00.001Z"),
            (1_709_251_199, 0, "2024-02-29T23:59:59.000Z"),
            (4_107_542_400, 0, "2100-03-01T00:00:00.000Z"),
            (1_796_083_199, 5, "2026-11-30T23:59:59.005Z"),
        ] {
            let mut text = String::new();
            write(&mut text, Duration::from_secs(seconds) + Duration::from_millis(millis)).unwrap();
            assert_eq!(text, expected);
        }
    }
}

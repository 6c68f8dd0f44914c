//! Tables and figures for people, and the choice between them and JSON.

use clap::ValueEnum;
use serde_json::Value;

use super::say;

/// How a subcommand tells what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// Lines with aligned columns.
pub(super) fn table<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = heads.map(|head| head.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let heads = heads.map(str::to_owned);
    for row in std::iter::once(&heads).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            line.push_str(&format!("{cell:width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

pub(super) fn say_json(value: &Value) -> std::io::Result<()> {
    say(&format!("{value:#}\n"))
}

/// A duration with about three digits.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        _ if seconds < 0.0995 => format!("{:.1} ms", seconds * 1000.0),
        _ if seconds < 0.9995 => format!("{:.0} ms", seconds * 1000.0),
        _ if seconds < 99.95 => format!("{seconds:.1} s"),
        _ => format!("{seconds:.0} s"),
    }
}

/// What may be absent.
pub(super) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// A part of one, as percent.
pub(super) fn percent(part: Option<f64>) -> String {
    or_dash(part.map(|part| format!("{:.0} %", part * 100.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_end_where_their_text_does() {
        let rows = [["é".to_owned(), "b".to_owned()], ["long one".to_owned(), String::new()]];
        assert_eq!(table(["A", "B"], &rows), "A         B\né         b\nlong one\n");
    }

    #[test]
    fn durations_have_three_digits() {
        for (seconds, text) in
            [(0.0, "0.0 ms"), (0.0124, "12.4 ms"), (0.402, "402 ms"), (2.5, "2.5 s"), (300.0, "300 s")]
        {
            assert_eq!(duration(seconds), text);
        }
    }
}

//! The behaviour that vLLM's own connector tests demand, under the numbers of its test functions
//! (T1 to T65, see docs/test-rows.md), and whole hand-offs between engines.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a failed step is a failed test"
)]

mod aggregation;
mod contexts;
mod failures;
mod foreseen;
mod handshakes;
mod mixed;
mod model;
mod peers;
mod pull;
mod push;
mod received;
mod scheduler;
mod support;
mod table;
mod vectors;
mod widths;
mod worker;

/// One test per row of a table.
macro_rules! rows {
    ($($name:ident => $call:expr;)*) => {
        $(#[test]
        fn $name() {
            $call;
        })*
    };
}
pub(crate) use rows;

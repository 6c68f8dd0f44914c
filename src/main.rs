//! kvbaton's entry: parse, run the subcommand, turn its result into an exit code.

use std::process::ExitCode;

use clap::Parser as _;
use kvbaton::cli::Cli;

fn main() -> ExitCode {
    kvbaton::cli::run(Cli::parse())
}

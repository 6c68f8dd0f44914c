//! kvbaton's entry: parse, run the subcommand, turn its result into an exit code.

use std::process::ExitCode;

use clap::Parser as _;
use kvbaton::cli::Cli;
use mimalloc::MiMalloc;

/// A request makes some two hundred small allocations, and frees most of them on the same thread.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    kvbaton::cli::run(Cli::parse())
}

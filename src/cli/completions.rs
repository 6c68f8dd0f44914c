//! `kvbaton completions`: what a shell needs to complete the command line.

use std::process::ExitCode;

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use super::{Cli, say};

#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    /// Which shell.
    shell: Shell,
}

pub(super) fn run(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "kvbaton", &mut script);
    say(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}

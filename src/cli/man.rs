//! `kvbaton man`: manual pages, made of the same words as `--help`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory as _};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use super::fault::{CODES, CliError};
use super::{Cli, say};

#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// Write a page for each subcommand into this folder, instead of the first one to standard output.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn run(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command();
    command.build();
    let Some(dir) = &args.dir else {
        say(&page(command)?)?;
        return Ok(ExitCode::SUCCESS);
    };
    let mut left = vec![("kvbaton".to_owned(), command)];
    while let Some((name, command)) = left.pop() {
        let below =
            command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
        left.extend(below.map(|below| (format!("{name}-{}", below.get_name()), below.clone())));
        let path = dir.join(format!("{name}.1"));
        let text = page(command)?;
        std::fs::write(&path, text).map_err(|source| CliError::File { path, source })?;
    }
    Ok(ExitCode::SUCCESS)
}

fn page(command: clap::Command) -> anyhow::Result<String> {
    let mut text = Vec::new();
    Man::new(command).render(&mut text)?;
    let mut codes = Roff::default();
    codes.control("SH", ["EXIT STATUS"]);
    for (code, what) in CODES {
        codes.control("TP", []);
        codes.text([roman(code.to_string())]);
        codes.text([roman(what)]);
    }
    codes.to_writer(&mut text)?;
    Ok(String::from_utf8(text)?)
}

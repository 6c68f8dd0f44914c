//! The command line: one file per subcommand; `serve` is the default.

mod docs;
mod engine;
mod key;
mod serve;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::config::Flags;

/// Routes OpenAI requests over pairs of prefill and decode engines.
#[derive(Debug, Parser)]
#[command(name = "kvbaton", version, about, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: ServeArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the router (the default). Without engines it starts a simulated fleet of its own.
    Serve(ServeArgs),
    /// Run one simulated engine.
    Engine(Box<engine::EngineArgs>),
    /// Make API keys and tokens.
    Key(key::KeyArgs),
    /// Print a page of the documentation that is made from the code.
    #[command(hide = true)]
    Docs(docs::DocsArgs),
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// Settings file (TOML); also KVBATON_CONFIG.
    #[arg(long, value_name = "FILE")]
    config: Option<std::path::PathBuf>,
    /// Address of the HTTP listener [default: 127.0.0.1:8000].
    #[arg(long, value_name = "ADDR")]
    listen: Option<std::net::SocketAddr>,
    /// Base URL of a prefill engine; repeatable.
    #[arg(long, value_name = "URL")]
    prefill: Vec<String>,
    /// Base URL of a decode engine; repeatable.
    #[arg(long, value_name = "URL")]
    decode: Vec<String>,
    /// Any other setting, such as timeouts.prefill=60s; repeatable.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
}

/// A `--set` that is no assignment.
#[derive(Debug, thiserror::Error)]
#[error("expected KEY=VALUE")]
struct NotAnAssignment;

fn key_value(text: &str) -> Result<(String, String), NotAnAssignment> {
    let (key, value) = text.split_once('=').ok_or(NotAnAssignment)?;
    Ok((key.trim().to_owned(), value.to_owned()))
}

impl From<ServeArgs> for Flags {
    fn from(args: ServeArgs) -> Self {
        Self {
            config: args.config,
            listen: args.listen,
            prefill: args.prefill,
            decode: args.decode,
            set: args.set,
        }
    }
}

/// Runs the parsed command. Exit codes: 0 done, 1 failed, 2 wrong usage or settings.
#[must_use]
pub fn run(cli: Cli) -> ExitCode {
    let result = match cli.command {
        None => serve::run(cli.serve.into()),
        Some(Command::Serve(args)) => serve::run(args.into()),
        Some(Command::Engine(args)) => engine::run(*args),
        Some(Command::Key(args)) => key::run(&args),
        Some(Command::Docs(args)) => docs::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            say_error(&error);
            let usage = error.downcast_ref::<crate::StartError>().is_some_and(is_usage)
                || error.is::<crate::config::ConfigFaults>();
            ExitCode::from(if usage { 2 } else { 1 })
        }
    }
}

fn is_usage(error: &crate::StartError) -> bool {
    matches!(error, crate::StartError::Config(_) | crate::StartError::Peer(_) | crate::StartError::Secrets(_))
}

fn say_error(error: &anyhow::Error) {
    // Nothing can be done when standard error is gone.
    let _ = writeln!(std::io::stderr(), "kvbaton: {error:#}");
}

/// Prints lines for the person who started the program.
fn say(lines: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(lines.as_bytes())?;
    out.flush()
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}

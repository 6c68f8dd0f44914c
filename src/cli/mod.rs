//! The command line: one file per subcommand; `serve` is the default.

mod check;
mod client;
mod completions;
mod docs;
mod engine;
mod fault;
mod key;
mod man;
mod peers;
mod reference;
mod serve;
mod simulate;
mod table;
mod top;
mod trace;
mod vllm_router;

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
    /// Print the settings for a command line of vllm-router, which is all that follows; starts nothing.
    #[arg(
        long,
        value_name = "ARGS",
        num_args = 0..,
        allow_hyphen_values = true,
        conflicts_with = "ServeArgs"
    )]
    from_vllm_router_args: Option<Vec<String>>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the router (the default). Without engines it starts a simulated fleet of its own.
    Serve(ServeArgs),
    /// Run one simulated engine.
    Engine(Box<engine::EngineArgs>),
    /// Make API keys and tokens.
    Key(key::KeyArgs),
    /// Show and change the fleet of a running router.
    Peers(Box<peers::PeersArgs>),
    /// Watch the fleet of a running router.
    Top(Box<top::TopArgs>),
    /// Show what happened to a request, step by step.
    Trace(Box<trace::TraceArgs>),
    /// Check settings, engines, handshakes, and one real hand-off of every pair.
    Check(Box<check::CheckArgs>),
    /// Run a trace of requests through the routing, over modelled engines in simulated time.
    Simulate(Box<simulate::SimulateArgs>),
    /// Print what a shell needs to complete the command line.
    Completions(completions::CompletionsArgs),
    /// Print the manual page.
    Man(man::ManArgs),
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

/// Runs the parsed command. Exit codes: 0 done, 1 failed or not good, 2 wrong usage or settings, 3 the router
/// cannot be reached, 4 it wants another credential, 5 it refuses.
#[must_use]
pub fn run(cli: Cli) -> ExitCode {
    let result = match cli.command {
        None => match cli.from_vllm_router_args {
            Some(words) => vllm_router::run(&words),
            None => serve::run(cli.serve.into()),
        },
        Some(Command::Serve(args)) => serve::run(args.into()),
        Some(Command::Engine(args)) => engine::run(*args),
        Some(Command::Key(args)) => key::run(&args),
        Some(Command::Peers(args)) => peers::run(*args),
        Some(Command::Top(args)) => top::run(*args),
        Some(Command::Trace(args)) => trace::run(*args),
        Some(Command::Check(args)) => check::run(*args),
        Some(Command::Simulate(args)) => simulate::run(&args),
        Some(Command::Completions(args)) => completions::run(&args),
        Some(Command::Man(args)) => man::run(&args),
        Some(Command::Docs(args)) => docs::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            say_error(&error);
            if let Some(fault) = error.downcast_ref::<fault::CliError>() {
                return ExitCode::from(fault.exit_code());
            }
            let usage = error.downcast_ref::<crate::StartError>().is_some_and(is_usage)
                || error.is::<crate::config::ConfigFaults>();
            ExitCode::from(if usage { fault::USAGE } else { fault::BAD })
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

//! `kvbaton serve`: the router, with an embedded fleet when no engine is given.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use kvbaton_proxy::{OnMissing, Role};
use kvbaton_routes::Logging;

use super::{runtime, say};
use crate::config::{Config, Flags, load};
use crate::shutdown::{Asked, Signals};
use crate::{Running, Workers, telemetry};

/// How long the announcement waits for a pair, so that its line names a model and works at once.
const FIRST_PROBES: Duration = Duration::from_secs(2);

/// How long after a signal another one counts as its echo.
const ECHO: Duration = Duration::from_millis(300);

pub(super) fn run(flags: Flags) -> anyhow::Result<ExitCode> {
    let config = load(&flags, std::env::vars())?;
    let logging = telemetry::start(&config.log)?;
    runtime()?.block_on(serve(config, flags, logging))
}

async fn serve(config: Config, flags: Flags, logging: Logging) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let workers = Workers::start(config.connections.threads)?;
    let app = config.build().await?.reload_from(move || load(&flags, std::env::vars()));
    let running = app.log_through(logging).answer_on(workers).spawn().await?;
    if !running.ready_within(FIRST_PROBES).await {
        tracing::warn!("no pair of engines is ready yet");
    }
    say(&announcement(&running))?;
    let signal = loop {
        match signals.next().await {
            Asked::Leave(signal) => break signal,
            // What came of it is in the log.
            Asked::Reload => drop(running.reload().await),
        }
    };
    tracing::info!(signal, "leaving");
    tokio::select! {
        in_time = running.drain() => {
            if !in_time {
                tracing::warn!("some requests were cut off");
            }
            Ok(if in_time { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        signal = second(&mut signals) => {
            tracing::warn!(signal, "leaving at once");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// The next signal that is meant as a second one: process managers send the first to the process and
/// to its group, so that it arrives twice.
async fn second(signals: &mut Signals) -> &'static str {
    let first = tokio::time::Instant::now();
    loop {
        let signal = signals.leave().await;
        if first.elapsed() > ECHO {
            return signal;
        }
    }
}

/// What is bound, and one line to try.
fn announcement(running: &Running) -> String {
    let addr = running.addr();
    let scheme = if running.is_secure() { "https" } else { "http" };
    let mut text = format!("kvbaton listens on {scheme}://{addr}\n");
    for embedded in running.engines() {
        let role = match embedded.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        let _ = writeln!(text, "  simulated {role} engine on {}", embedded.engine.url());
    }
    let (prefill, decode) = (running.fleet_size(Role::Prefill), running.fleet_size(Role::Decode));
    let alone = match running.on_no_prefill() {
        OnMissing::Fail => "refused",
        OnMissing::DecodeOnly => "computed by the decode engine alone",
    };
    let _ = writeln!(text, "  mode: prefill/decode over NIXL; without a prefill engine, prompts are {alone}");
    if running.engines().is_empty() {
        let _ = writeln!(text, "  {prefill} prefill and {decode} decode engine(s) configured");
    }
    if let Some(admin) = running.admin_addr().filter(|admin| *admin != addr) {
        let _ = writeln!(text, "  operators' endpoints on {admin}");
    }
    if running.registry_addr() != addr {
        let _ = writeln!(text, "  registry on {}", running.registry_addr());
    }
    let key = if running.needs_keys() { " -H 'Authorization: Bearer KEY'" } else { "" };
    let models = running.proxy().models();
    let model = models.ids().first().map_or("MODEL", String::as_str);
    let _ = writeln!(
        text,
        "Try:\n  curl {scheme}://{addr}/v1/completions{key} -H 'Content-Type: application/json' \
         -d '{{\"model\":\"{model}\",\"prompt\":\"Once upon a time\",\"max_tokens\":24}}'"
    );
    text
}

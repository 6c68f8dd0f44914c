//! `kvbaton engine`: one simulated engine, for trying the router without GPUs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use engine_sim::{ClientIdentity, EngineConfig, KvTransport, RegistryTls};
use kvbaton_proxy::Generation;
use tokio::net::TcpListener;
use url::Url;

use super::{runtime, say};
use crate::StartError;
use crate::config::Log;
use crate::shutdown::Signals;

#[derive(Debug, Args)]
pub(super) struct EngineArgs {
    /// What the engine does.
    #[arg(long)]
    role: EngineRole,
    /// Address of its HTTP listener; port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Base URL of the router whose registry carries the handshake.
    #[arg(long, value_name = "URL", env = "ENGINE_REGISTRY", default_value = "http://127.0.0.1:8000")]
    registry: Url,
    /// Address of a ZMQ side channel; the engine is then as an unmodified vLLM engine, which knows no
    /// registry.
    #[arg(long, value_name = "ADDR")]
    side_channel: Option<SocketAddr>,
    /// Address at which it publishes its KV cache events over ZMQ.
    #[arg(long, value_name = "ADDR")]
    kv_events: Option<SocketAddr>,
    /// Address at which it replays KV cache events that were missed.
    #[arg(long, value_name = "ADDR", requires = "kv_events")]
    kv_events_replay: Option<SocketAddr>,
    /// A token for the router's registry, if it asks for one.
    #[arg(long, value_name = "TOKEN", env = "ENGINE_REGISTRY_TOKEN", hide_env_values = true)]
    registry_token: Option<String>,
    /// The authorities (PEM) that are trusted with an https:// registry [default: the public ones].
    #[arg(long, value_name = "FILE", env = "ENGINE_REGISTRY_CA")]
    registry_ca: Option<PathBuf>,
    /// A certificate (PEM) for a registry that asks for one.
    #[arg(long, value_name = "FILE", env = "ENGINE_REGISTRY_CERT", requires = "registry_key")]
    registry_cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", env = "ENGINE_REGISTRY_KEY", requires = "registry_cert")]
    registry_key: Option<PathBuf>,
    /// Name of the model that it serves.
    #[arg(long, default_value = "sim")]
    model: String,
    /// Protocol generation: v14 as in vLLM 0.32, v2 as in vLLM 0.13.
    #[arg(long, default_value = "v14")]
    generation: EngineGeneration,
    /// Name of the engine [default: a random one].
    #[arg(long, value_name = "ID")]
    engine_id: Option<String>,
    /// KV blocks.
    #[arg(long, value_name = "N")]
    blocks: Option<usize>,
    /// Tokens per block.
    #[arg(long, value_name = "N")]
    block_size: Option<usize>,
    /// How long it takes for one prompt token, in microseconds.
    #[arg(long, value_name = "US")]
    prefill_us: Option<u64>,
    /// How long it takes for one generated token, in microseconds.
    #[arg(long, value_name = "US")]
    decode_us: Option<u64>,
    /// How long it keeps an unread hand-off, in seconds [default: 30, or 480 with v2].
    #[arg(long, value_name = "S")]
    lease: Option<u64>,
    /// What moves the KV blocks; nixl needs a build with the feature of that name.
    #[arg(long, value_name = "NAME", default_value = "loopback")]
    transport: EngineTransport,
    /// With nixl: the library, or the folder it was installed in (as scripts/nixl-setup prints it).
    #[arg(long, value_name = "PATH", env = "ENGINE_NIXL_LIBRARY")]
    nixl_library: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EngineTransport {
    Loopback,
    Nixl,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EngineRole {
    Prefill,
    Decode,
    Both,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EngineGeneration {
    V2,
    V14,
}

pub(super) fn run(args: EngineArgs) -> anyhow::Result<ExitCode> {
    crate::telemetry::start(&Log::default())?;
    runtime()?.block_on(serve(args))
}

async fn serve(args: EngineArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let addr = args.listen;
    let listener = TcpListener::bind(addr).await.map_err(|source| StartError::Listen { addr, source })?;
    let registry_tls = registry_tls(&args)?;
    let config = EngineConfig { registry_tls, ..EngineConfig::from(args) };
    let over_nixl = config.transport != KvTransport::Loopback;
    let engine = engine_sim::spawn(config, listener).await;
    let engine =
        if over_nixl { engine.context("--transport nixl with this --nixl-library")? } else { engine? };
    say(&format!("simulated engine {} on {}\n", engine.engine_id(), engine.url()))?;
    if let Some(side_channel) = engine.side_channel_addr() {
        say(&format!("side channel on {side_channel}\n"))?;
    }
    if let [Some(events), _] = engine.kv_events_addrs() {
        say(&format!("KV events on {events}\n"))?;
    }
    let signal = signals.leave().await;
    tracing::info!(signal, "leaving");
    engine.shutdown().await;
    Ok(ExitCode::SUCCESS)
}

/// Reads the files of TLS towards the registry.
fn registry_tls(args: &EngineArgs) -> anyhow::Result<RegistryTls> {
    let read =
        |path: &PathBuf| std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()));
    let ca = args.registry_ca.as_ref().map(read).transpose()?;
    let identity = match (&args.registry_cert, &args.registry_key) {
        (Some(cert), Some(key)) => Some(ClientIdentity { cert: read(cert)?, key: read(key)? }),
        _ => None,
    };
    Ok(RegistryTls { ca, identity })
}

impl From<EngineArgs> for EngineConfig {
    fn from(args: EngineArgs) -> Self {
        let generation = match args.generation {
            EngineGeneration::V2 => Generation::V2,
            EngineGeneration::V14 => Generation::V14,
        };
        let defaults = Self::for_generation(generation);
        Self {
            role: match args.role {
                EngineRole::Prefill => engine_sim::Role::Prefill,
                EngineRole::Decode => engine_sim::Role::Decode,
                EngineRole::Both => engine_sim::Role::Both,
            },
            transport: match args.transport {
                EngineTransport::Loopback => KvTransport::Loopback,
                EngineTransport::Nixl => KvTransport::Nixl { library: args.nixl_library },
            },
            registry: args.side_channel.is_none().then_some(args.registry),
            side_channel: args.side_channel,
            kv_events: args.kv_events,
            kv_events_replay: args.kv_events_replay,
            registry_token: args.registry_token,
            model: args.model,
            engine_id: args.engine_id,
            num_blocks: args.blocks.unwrap_or(defaults.num_blocks),
            block_size: args.block_size.unwrap_or(defaults.block_size),
            prefill_time_per_token: args
                .prefill_us
                .map_or(defaults.prefill_time_per_token, Duration::from_micros),
            decode_time_per_token: args
                .decode_us
                .map_or(defaults.decode_time_per_token, Duration::from_micros),
            lease: args.lease.map_or(defaults.lease, Duration::from_secs),
            ..defaults
        }
    }
}

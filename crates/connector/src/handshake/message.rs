//! What an engine and the registry say to each other besides one rank's payload.

use std::time::Duration;

use serde::Deserialize;

use crate::ClockTime;
use crate::fit::EngineTraits;
use crate::protocol::msgpack::Writer;

/// What an engine says that it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineRole {
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Pulls KV and generates.
    Decode,
    /// Either.
    Both,
}

impl EngineRole {
    fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// Where an engine is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineState {
    /// Peers cannot shake hands with it yet.
    Registering,
    /// It serves.
    #[default]
    Ready,
    /// It finishes what it has.
    Draining,
}

impl EngineState {
    fn label(self) -> &'static str {
        match self {
            Self::Registering => "registering",
            Self::Ready => "ready",
            Self::Draining => "draining",
        }
    }
}

/// One rank's payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPayload {
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// The encoded handshake payload.
    pub payload: Vec<u8>,
}

/// An engine as it registers itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Registration {
    /// Its id.
    pub engine_id: String,
    /// Where its HTTP API is.
    pub base_url: Option<String>,
    /// What it is for.
    pub role: Option<EngineRole>,
    /// The model that it serves.
    pub model: Option<String>,
    /// Which of the data-parallel engines behind the base URL it is.
    pub dp_rank: u32,
    /// The version of vLLM that it runs.
    pub vllm_version: Option<String>,
    /// What its payloads do not tell; only what is known is sent.
    pub traits: EngineTraits,
    /// Where it is in its life.
    pub state: EngineState,
    /// After how long a silence the registry lets it leave; `None` never.
    pub ttl: Option<Duration>,
    /// Its clock as this leaves; `None` keeps it untold.
    pub clock: Option<ClockTime>,
    /// All its ranks; `None` keeps those that the registry knows.
    pub ranks: Option<Vec<RankPayload>>,
}

impl Registration {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        let traits = known(&self.traits);
        writer.map(9 + traits.len());
        optional(&mut writer, "base_url", self.base_url.as_deref(), Writer::str);
        optional(&mut writer, "role", self.role.map(EngineRole::label), Writer::str);
        optional(&mut writer, "model", self.model.as_deref(), Writer::str);
        writer.str("dp_rank");
        writer.uint(u64::from(self.dp_rank));
        optional(&mut writer, "vllm_version", self.vllm_version.as_deref(), Writer::str);
        writer.str("state");
        writer.str(self.state.label());
        optional(&mut writer, "ttl_seconds", self.ttl.map(|ttl| ttl.as_secs_f64()), Writer::float);
        optional(&mut writer, "clock", self.clock.map(|clock| clock.as_secs_f64()), Writer::float);
        optional(&mut writer, "ranks", self.ranks.as_ref(), |writer, ranks| {
            writer.list(ranks, |writer, rank| {
                writer.map(3);
                writer.str("pp_rank");
                writer.uint(u64::from(rank.pp_rank));
                writer.str("tp_rank");
                writer.uint(u64::from(rank.tp_rank));
                writer.str("payload");
                writer.bin(&rank.payload);
            });
        });
        for (name, value) in traits {
            writer.str(name);
            match value {
                Trait::Number(number) => writer.uint(u64::from(number)),
                Trait::Flag(flag) => writer.bool(flag),
                Trait::Text(text) => writer.str(text),
            }
        }
        writer.bytes
    }
}

/// A sign of life.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Heartbeat {
    /// The state that the engine is in now; `None` as before.
    pub state: Option<EngineState>,
    /// The engine's clock as this leaves.
    pub clock: Option<ClockTime>,
    /// The last answer of the registry and when it arrived; from it and `clock` the registry
    /// learns the engine's clock with an error bound.
    pub echo: Option<Echo>,
}

/// An answer of the registry, as the next heartbeat repeats it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Echo {
    /// [`Receipt::router_clock`].
    pub router_clock: f64,
    /// The engine's clock when the answer arrived.
    pub received: ClockTime,
}

impl Heartbeat {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.map(3);
        optional(&mut writer, "state", self.state.map(EngineState::label), Writer::str);
        optional(&mut writer, "clock", self.clock.map(|clock| clock.as_secs_f64()), Writer::float);
        optional(&mut writer, "echo", self.echo, |writer, echo| {
            writer.map(2);
            writer.str("router_clock");
            writer.float(echo.router_clock);
            writer.str("received");
            writer.float(echo.received.as_secs_f64());
        });
        writer.bytes
    }
}

/// What the registry answers to a registration or a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Receipt {
    /// The revision of the engine's last change.
    pub revision: u64,
    /// The registry's clock as the answer left, for the [`Echo`].
    pub router_clock: f64,
}

/// One rank's payload, as the registry gave it.
#[derive(Debug, Clone, PartialEq)]
pub struct Fetched {
    /// The bytes as they were published.
    pub payload: Vec<u8>,
    /// The engine's clock as the answer left, where the registry knows it.
    pub clock: Option<ClockEstimate>,
}

/// An engine's clock at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClockEstimate {
    /// Seconds on the engine's clock.
    pub seconds: f64,
    /// How far away the truth may be, in seconds; `None` when `seconds` is only a lower bound.
    pub error: Option<f64>,
}

fn optional<T>(writer: &mut Writer, name: &str, value: Option<T>, write: impl FnOnce(&mut Writer, T)) {
    writer.str(name);
    match value {
        Some(value) => write(writer, value),
        None => writer.nil(),
    }
}

enum Trait<'a> {
    Number(u32),
    Flag(bool),
    Text(&'a str),
}

/// The traits that are known, by their names.
fn known(traits: &EngineTraits) -> Vec<(&'static str, Trait<'_>)> {
    let number = |number: Option<u32>| number.map(Trait::Number);
    let flag = |flag: Option<bool>| flag.map(Trait::Flag);
    let all = [
        ("tp_size", number(traits.tp_size)),
        ("pp_size", number(traits.pp_size)),
        ("dcp_size", number(traits.dcp_size)),
        ("transfer_mode", traits.transfer_mode.map(|mode| Trait::Text(mode.as_str()))),
        ("kv_heads", number(traits.kv_heads)),
        ("is_mla", flag(traits.is_mla)),
        ("permute_received", flag(traits.permute_received)),
        ("hma_required", flag(traits.hma_required)),
        ("host_buffer", flag(traits.host_buffer)),
        ("enforce_compat", flag(traits.enforce_compat)),
        ("nixl_version", traits.nixl_version.as_deref().map(Trait::Text)),
        ("side_channel_host", traits.side_channel_host.as_deref().map(Trait::Text)),
        ("side_channel_port", number(traits.side_channel_port.map(u32::from))),
    ];
    all.into_iter().filter_map(|(name, value)| value.map(|value| (name, value))).collect()
}

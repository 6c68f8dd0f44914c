//! Reads unmodified engines' side channels into the registry and keeps what it read fresh.
//!
//! A wrong request ends an engine's listener for good. So the dialect comes from the version that the
//! engine tells at that moment, rank (0, 0) is the only one asked of a stranger, and the other ranks only
//! where the same process, on the same connection, has just said that it is the engine whose sizes are
//! known.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_connector::fit::EngineTraits;
use kv_connector::protocol::handshake::{HandshakeRequest, NixlHandshakePayload};
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::protocol::params::Generation;
use kv_connector::side_channel::SideChannelClient;
use kv_connector::worker::HandshakeFailure;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::channels::{Due, NamedChannel, Outcome, SideChannelState, ranks};
use super::dialect::{Evidence, Unsure, dialect};
use crate::Core;
use crate::pool::peer::{Peer, Role};
use crate::pool::probe;
use crate::registry::{
    EngineRecord, EngineRole, EngineState, Heartbeat, Rank, RankPayload, Registration, RegistryError, Writer,
    canonical_base_url,
};

/// How soon a peer that has become ready is noticed.
const SOON: Duration = Duration::from_millis(500);

/// For one look, from connecting to the last rank's answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// How long an engine that was read stays registered while nobody hears of it.
const LINGER: Duration = Duration::from_secs(60);

/// Looks at the side channels of all ready peers, each in its turn.
pub(super) async fn watch(core: Arc<Core>) {
    let pause = core.settings().side_channel.interval;
    let mut ticks = interval(pause.min(SOON));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = core.stop.cancelled() => return,
            () = core.side_channels.wake.notified() => {}
            _ = ticks.tick() => {}
        }
        for peer in core.pool.all() {
            if !peer.is_ready() {
                peer.channels.look_again();
                continue;
            }
            for due in peer.channels.due(Instant::now()) {
                let looking = look(Arc::clone(&core), Arc::clone(&peer), due);
                let stop = core.stop.clone();
                core.tasks.spawn(async move {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = looking => {}
                    }
                });
            }
        }
    }
}

/// Why a look brought nothing.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("side channel: no answer in time")]
    Slow,
    #[error("side channel: {0}")]
    Exchange(#[from] HandshakeFailure),
    #[error("side channel: the engine's HTTP API does not tell its version")]
    Unreachable,
    #[error("side channel: {0}")]
    Unsure(#[from] Unsure),
    #[error("side channel: {0}")]
    Registry(#[from] RegistryError),
    #[error("side channel: the engine has another generation's metadata")]
    Generation,
    #[error("side channel: its ranks are not of one engine")]
    MixedEngines,
}

/// One look and what follows from it.
async fn look(core: Arc<Core>, peer: Arc<Peer>, due: Due) {
    let Ok(_permit) = core.side_channels.reading.clone().acquire_owned().await else { return };
    let looked = timeout(DEADLINE, read(&core, &peer, &due)).await.unwrap_or(Err(Trouble::Slow));
    let outcome = looked.unwrap_or_else(|trouble| {
        let reason = trouble.to_string();
        match trouble {
            Trouble::Unsure(_) => Outcome::NotAsked { reason },
            _ => Outcome::Failed { reason },
        }
    });
    // The engine is well by its probes: what was read of it holds, though its listener may have ended.
    if let (Outcome::Failed { .. }, Some(engine_id)) = (&outcome, &due.engine_id)
        && core.registry.engine(engine_id).is_some_and(|engine| core.side_channels.is_ours(&engine))
    {
        let _known = core.registry.heartbeat(engine_id, &Heartbeat::default());
    }
    let (state, now) = (outcome.state(), Instant::now());
    let next = now + core.settings().side_channel.interval;
    core.metrics.side_channel_looked(state);
    let told = format!("{outcome:?}");
    if peer.channels.looked(&due.address, outcome, now, next) {
        tracing::info!(peer = %peer.id, side_channel = %due.address, ?state, told, "a side channel was looked at");
    }
    if state == SideChannelState::Failed
        && let Some(moved) = peer.channels.forget_if_moved(&due.address)
    {
        core.side_channels.withdraw(&moved, &core.registry);
    }
}

async fn read(core: &Arc<Core>, peer: &Arc<Peer>, due: &Due) -> Result<Outcome, Trouble> {
    if core.side_channels.registers_itself(peer, &core.registry, &core.pool) {
        return Ok(Outcome::RegistersItself);
    }
    let dialect_of = |version: Option<&str>| {
        let hand_off = due.named.as_ref().map(|(_, named)| named.shape);
        dialect(Evidence { told: peer.spec.generation, version, hand_off })
    };
    let probed = peer.observed.now().version.clone();
    dialect_of(probed.as_deref())?;
    let mut client = SideChannelClient::connect(&due.address.host, due.address.port).await?;
    // Asked once more with the connection open: it would not outlive an engine of another version.
    let version = probe::version(peer, &core.upstream).await.map_err(|_| Trouble::Unreachable)?;
    let dialect = dialect_of(version.as_deref())?;
    let first = ask(core, &mut client, dialect, (0, 0)).await?;
    let metadata = metadata(&first.payload, dialect)?;
    let engine_id = metadata.engine_id().to_owned();
    let named = due.named.as_ref().filter(|(named, _)| *named == engine_id).map(|(_, named)| named);
    let wanted = wanted_ranks(peer, named);
    let known = core.registry.engine(&engine_id).filter(|engine| core.side_channels.is_ours(engine));
    if let Some(known) = known.filter(|known| is_current(known, &first.payload, &wanted)) {
        core.registry.heartbeat(&engine_id, &Heartbeat::default())?;
        sampled(core, &engine_id, &first);
        return Ok(Outcome::Read { engine_id, ranks: known.ranks.len(), dialect });
    }
    if peer.channels.is_elsewhere(&engine_id, &due.address) {
        return Ok(Outcome::Read { engine_id, ranks: 0, dialect });
    }
    let mut payloads = BTreeMap::from([((0, 0), first.payload.clone())]);
    for rank in wanted.into_iter().filter(|rank| *rank != (0, 0)) {
        let answer = ask(core, &mut client, dialect, rank).await?;
        if self::metadata(&answer.payload, dialect)?.engine_id() != engine_id {
            return Err(Trouble::MixedEngines);
        }
        payloads.insert(rank, answer.payload);
    }
    let ranks = payloads.len();
    register(core, peer, due, &engine_id, named, version, payloads)?;
    sampled(core, &engine_id, &first);
    Ok(Outcome::Read { engine_id, ranks, dialect })
}

/// One rank's answer, with the router's clock around it.
struct Answer {
    payload: Bytes,
    clock: Option<f64>,
    asked: f64,
    answered: f64,
}

async fn ask(
    core: &Core,
    client: &mut SideChannelClient,
    dialect: Generation,
    (pp_rank, tp_rank): Rank,
) -> Result<Answer, Trouble> {
    let asked = core.registry.moment();
    let (payload, clock) = client.ask(dialect, HandshakeRequest { pp_rank, tp_rank }).await?;
    Ok(Answer { payload: payload.into(), clock, asked, answered: core.registry.moment() })
}

fn metadata(payload: &[u8], dialect: Generation) -> Result<NixlAgentMetadata, Trouble> {
    let bad = |_| Trouble::Exchange(HandshakeFailure::BadReply);
    let outer = NixlHandshakePayload::decode(payload).map_err(bad)?;
    let metadata = NixlAgentMetadata::decode_any(&outer.agent_metadata_bytes).map_err(bad)?;
    if metadata.generation() == dialect { Ok(metadata) } else { Err(Trouble::Generation) }
}

/// The ranks that are known to exist: by the engine's own hand-off, else by the operator.
fn wanted_ranks(peer: &Peer, named: Option<&NamedChannel>) -> Vec<Rank> {
    match named {
        Some(named) => named.ranks(),
        None => ranks(peer.spec.pp_size.unwrap_or(1), peer.spec.tp_size.unwrap_or(1)),
    }
}

fn is_current(known: &EngineRecord, first: &[u8], wanted: &[Rank]) -> bool {
    known.ranks.get(&(0, 0)).is_some_and(|rank| rank.payload == first)
        && wanted.iter().all(|rank| known.ranks.contains_key(rank))
}

fn register(
    core: &Core,
    peer: &Peer,
    due: &Due,
    engine_id: &str,
    named: Option<&NamedChannel>,
    version: Option<String>,
    payloads: BTreeMap<Rank, Bytes>,
) -> Result<(), Trouble> {
    let ranks =
        payloads.into_iter().map(|((pp_rank, tp_rank), payload)| RankPayload { pp_rank, tp_rank, payload });
    let ttl = LINGER.max(core.settings().side_channel.interval.saturating_mul(4));
    let receipt = core.registry.register(Registration {
        engine_id: engine_id.to_owned(),
        base_url: Some(peer.spec.url.clone()),
        role: Some(role(core, peer)),
        model: None,
        dp_rank: due.place,
        vllm_version: version,
        traits: EngineTraits {
            tp_size: named.map(|named| named.tp_size).or(peer.spec.tp_size),
            pp_size: named.map(|named| named.pp_size).or(peer.spec.pp_size),
            dcp_size: named.map(|named| named.dcp_size),
            transfer_mode: named.and_then(|named| named.mode),
            side_channel_host: Some(due.address.host.clone()),
            side_channel_port: Some(due.address.port),
            ..EngineTraits::default()
        },
        state: EngineState::Ready,
        ttl_seconds: Some(ttl.min(core.registry.longest_ttl()).as_secs_f64()),
        clock: None,
        ranks: Some(ranks.collect()),
        // Whoever answers there can name any engine: one that has registered itself is not touched.
        writer: Writer::Observer,
    })?;
    core.side_channels.registered(engine_id, receipt.revision);
    // It may have been taken out of the fleet in the meantime.
    if !core.pool.get(&peer.id).is_some_and(|now| std::ptr::eq(Arc::as_ptr(&now), peer)) {
        core.side_channels.withdraw(engine_id, &core.registry);
    }
    Ok(())
}

fn sampled(core: &Core, engine_id: &str, answer: &Answer) {
    if let Some(told) = answer.clock {
        core.registry.clock_sampled(engine_id, told, answer.asked, answer.answered);
    }
}

/// What the engine is for; one URL may stand in both lists.
fn role(core: &Core, peer: &Peer) -> EngineRole {
    let url = canonical_base_url(&peer.spec.url);
    let twin = core
        .pool
        .all()
        .iter()
        .any(|other| other.spec.role != peer.spec.role && canonical_base_url(&other.spec.url) == url);
    match peer.spec.role {
        _ if twin => EngineRole::Both,
        Role::Prefill => EngineRole::Prefill,
        Role::Decode => EngineRole::Decode,
    }
}

//! One small hand-off of each new pair, so that the engines' handshake is not on the first client's way.
//! Opt-in. A peer is cold until its pairs have talked; what fails again and again opens it all the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use tokio::sync::Semaphore;

use crate::Core;
use crate::disagg::Order;
use crate::error::{HandOffRefusal, Stage, UpstreamFailure};
use crate::handoff::Refused;
use crate::lease::Lease;
use crate::pool::peer::{Peer, Role};
use crate::prefill::PrefillLeg;
use crate::request::{BadRequest, ClientRequest, Endpoint, InjectedHandOff};
use crate::request_id::RequestId;
use crate::trace::Trace;
use crate::upstream::{Leg, own_headers};

/// Longest wait for the decode engine; a first handshake has been seen to take half a minute.
const LONGEST: Duration = Duration::from_secs(60);

/// How often a peer's pairs are tried before it is opened without.
const TRIES: u32 = 3;

const WARM: u8 = 0;
const COLD: u8 = 1;
const WARMING: u8 = 2;

/// Whether a peer has made the hand-offs that it is to make before it gets requests.
#[derive(Debug, Default)]
pub(crate) struct Warmth {
    state: AtomicU8,
    failed: AtomicU32,
}

impl Warmth {
    pub(crate) fn is_warm(&self) -> bool {
        self.state.load(Ordering::SeqCst) == WARM
    }

    /// It is new, or has been away.
    pub(crate) fn cool(&self) {
        self.failed.store(0, Ordering::SeqCst);
        self.state.store(COLD, Ordering::SeqCst);
    }

    /// Whether the caller is the one to warm it up.
    fn begin(&self) -> bool {
        self.state.compare_exchange(COLD, WARMING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// How many tries have failed, this one included.
    fn failed(&self) -> u32 {
        self.failed.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn end(&self, state: u8) {
        // Not if it has gone away meanwhile.
        let _ = self.state.compare_exchange(WARMING, state, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// One holder at a time; it may wait for engines meanwhile.
#[derive(Debug)]
pub(crate) struct Turn(Semaphore);

impl Default for Turn {
    fn default() -> Self {
        Self(Semaphore::new(1))
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum NotWarm {
    #[error("the engines list no model in common")]
    NoCommonModel,
    #[error(transparent)]
    Broken(#[from] UpstreamFailure),
    #[error("the {} engine answered {status}", .stage.label())]
    Status { stage: Stage, status: StatusCode },
    #[error(transparent)]
    HandOff(#[from] HandOffRefusal),
    #[error(transparent)]
    Request(#[from] BadRequest),
}

/// Warms a peer up that has just answered a probe, if it is cold.
pub(crate) async fn after_probe(core: &Arc<Core>, peer: &Arc<Peer>) {
    if !core.settings().pairing.warm_up {
        return;
    }
    if !peer.is_ready() {
        peer.warmth.cool();
        return;
    }
    if !peer.warmth.begin() {
        return;
    }
    // One at a time: of two engines that start together, the second finds the first.
    let Ok(_turn) = core.pool.warming.0.acquire().await else { return };
    core.pool.learn(&core.registry);
    let mut failure = None;
    for (prefill, decode) in pairs(core, peer) {
        match exercise(core, &prefill, &decode).await {
            Ok(_) | Err(NotWarm::NoCommonModel) => {
                tracing::info!(prefill = %prefill.id, decode = %decode.id, "a pair is warm");
            }
            Err(error) => failure = Some((prefill, decode, error)),
        }
    }
    let Some((prefill, decode, error)) = failure else {
        return peer.warmth.end(WARM);
    };
    if peer.warmth.failed() < TRIES {
        tracing::info!(prefill = %prefill.id, decode = %decode.id, %error, "a pair is not warm yet");
        return peer.warmth.end(COLD);
    }
    tracing::warn!(prefill = %prefill.id, decode = %decode.id, %error, "a pair could not be warmed up, it is used all the same");
    peer.warmth.end(WARM);
}

/// The pairs of a peer with those that get requests already.
fn pairs(core: &Core, peer: &Arc<Peer>) -> Vec<(Arc<Peer>, Arc<Peer>)> {
    let all = core.pool.all();
    let open = all.iter().filter(|other| other.is_open() && other.spec.role != peer.spec.role);
    let pair = open.map(|other| match peer.spec.role {
        Role::Prefill => (Arc::clone(peer), Arc::clone(other)),
        Role::Decode => (Arc::clone(other), Arc::clone(peer)),
    });
    pair.filter(|(prefill, decode)| core.pool.fits(prefill, decode)).collect()
}

/// A prompt of some blocks under a salt of its own: a decode engine that has it cached reads nothing.
fn request(model: &str) -> Result<ClientRequest, BadRequest> {
    let body = serde_json::json!({
        "model": model,
        "prompt": "warm ".repeat(64),
        "max_tokens": 1,
        "cache_salt": uuid::Uuid::new_v4().simple().to_string(),
    });
    let body = Bytes::from(body.to_string());
    ClientRequest::parse(Endpoint::Completions, body, InjectedHandOff::Refuse)
}

fn common_model(prefill: &Peer, decode: &Peer) -> Option<String> {
    let models = Arc::clone(&prefill.observed.now().models);
    let both_may = |model: &str| prefill.may_have(Some(model)) && decode.may_have(Some(model));
    models.iter().map(|served| &served.id).find(|model| decode.serves(model) && both_may(model)).cloned()
}

/// Makes one hand-off; of so many blocks.
pub(crate) async fn exercise(
    core: &Arc<Core>,
    prefill: &Arc<Peer>,
    decode: &Arc<Peer>,
) -> Result<usize, NotWarm> {
    let model = common_model(prefill, decode).ok_or(NotWarm::NoCommonModel)?;
    let settings = core.settings();
    let policies = settings.routing.policies(Some(&model));
    let request = request(&model)?;
    let order = Arc::new(Order { request, shows: None, settings, policies });
    let id = RequestId::accept(None);
    let (ids, headers, trace) = ((&id, &id), own_headers(&id), Trace::default());
    let mut leg = PrefillLeg::start(core, prefill.enter(), &order, ids, headers, trace, true);
    let (head, answer) = leg.answer().await?;
    if !head.status().is_success() {
        return Err(NotWarm::Status { stage: Stage::Prefill, status: head.status() });
    }
    let hand_off = match core.granted_by(prefill, &order, &head, &answer) {
        Ok(hand_off) => hand_off,
        Err(Refused { refusal, unused }) => {
            drop(unused.map(|unused| Lease::open(core, *unused, prefill, &order, &id)));
            return Err(refusal.into());
        }
    };
    core.side_channel_named(prefill, &hand_off);
    if prefill.saw_engine(&hand_off.engine_id) | prefill.saw_tp_size(hand_off.channel.tp_size) {
        core.pool.relearn();
    }
    let blocks = hand_off.blocks;
    let mut lease = Lease::open(core, hand_off, prefill, &order, &id);
    let _in_flight = decode.enter();
    let leg = Leg {
        stage: Stage::Decode,
        peer: decode,
        method: Method::POST,
        path: Endpoint::Completions.path(),
        headers: own_headers(&id),
        body: order.request.decode_body(lease.raw_for(decode)),
    };
    lease.dispatched(decode);
    let answer = core.upstream.send(leg, order.settings.timeouts.decode_head.min(LONGEST)).await?;
    let status = answer.status();
    core.upstream.collect(Stage::Decode, answer.into_body(), order.settings.limits.answer_bytes).await?;
    if !status.is_success() {
        return Err(NotWarm::Status { stage: Stage::Decode, status });
    }
    lease.read();
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn item_67_one_caller_warms_and_who_goes_away_meanwhile_stays_cold() {
        let warmth = Warmth::default();
        assert!(warmth.is_warm() && !warmth.begin(), "without the setting nobody is cold");
        warmth.cool();
        assert!(!warmth.is_warm() && warmth.begin() && !warmth.begin());
        warmth.cool();
        warmth.end(WARM);
        assert!(!warmth.is_warm());
        assert!(warmth.begin());
        warmth.end(WARM);
        assert!(warmth.is_warm());
    }
}

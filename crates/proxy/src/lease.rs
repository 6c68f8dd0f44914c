//! The router's hold on one granted hand-off, and how its blocks are freed when no decode engine is
//! known to have read them. Telling P twice is harmless, an untold P holds the blocks for long: so a
//! decode engine that was asked but showed nothing counts as one that did not read.

mod notified;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::{Method, StatusCode};
use kv_connector::protocol::params::{Generation, TransferMode};
use tokio::time::Instant;

use crate::Core;
use crate::disagg::Order;
use crate::error::{Stage, UpstreamFailure};
use crate::handoff::HandedOff;
use crate::ledger::{Granted, HandOffState};
use crate::metrics::{HandOffResult, Way};
use crate::pool::health;
use crate::pool::peer::Peer;
use crate::registry::EngineRecord;
use crate::request::Endpoint;
use crate::request_id::RequestId;
use crate::splice::{PromptPart, Spliced};
use crate::trace::SpanKind;
use crate::upstream::{Leg, own_headers};

/// How many decode engines a release tries.
const RELEASE_TRIES: usize = 3;

/// Pause before a failed release is tried again, doubled each time up to the longest.
const RELEASE_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// A model name that no fleet serves: a decode engine refuses it inside its handler, after the
/// body has been read, and on that path tells the prefill engine that nobody will read the blocks.
const NO_SUCH_MODEL: &str = "kvbaton/release-by-rejection";

/// When a decode engine that is just shaking hands with P is made to step: soon after a handshake
/// on a healthy network, and once more for a slow one.
const NUDGES: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(900)];

/// One granted hand-off, from P's answer until a decode engine has shown that it read the blocks.
/// Dropped before that, it is released.
pub(crate) struct Lease {
    /// Taken only by whatever ends the lease.
    hold: Option<Box<Hold>>,
}

struct Hold {
    core: Arc<Core>,
    prefill: Arc<Peer>,
    key: u64,
    hand_off: HandedOff,
    order: Order,
    request_id: RequestId,
    /// The id that the prefill engine was given.
    sent_as: RequestId,
    decode: Option<Arc<Peer>>,
    /// A decode engine may have it.
    given: bool,
    granted: Instant,
    lasts: Duration,
    /// The engine as it was registered when it granted the hand-off.
    origin: Option<Arc<EngineRecord>>,
}

impl Lease {
    pub(crate) fn open(
        core: &Arc<Core>,
        hand_off: HandedOff,
        prefill: &Arc<Peer>,
        order: &Order,
        request_id: &RequestId,
    ) -> Self {
        let policy = &order.settings.hand_off;
        let lasts = prefill.spec.lease.unwrap_or(match hand_off.generation {
            Generation::V2 => policy.lease_v2,
            Generation::V14 => policy.lease,
        });
        let key = core.ledger.open(Granted {
            request_id: request_id.as_str().to_owned(),
            prefill: prefill.id.clone(),
            engine_id: hand_off.engine_id.clone(),
            remote_request_id: hand_off.remote_request_id.clone(),
            blocks: hand_off.blocks,
            lease: lasts,
        });
        let origin = core.registry.engine(&hand_off.engine_id);
        let hold = Box::new(Hold {
            origin,
            core: Arc::clone(core),
            prefill: Arc::clone(prefill),
            key,
            hand_off,
            order: order.clone(),
            request_id: request_id.clone(),
            sent_as: request_id.clone(),
            decode: None,
            given: false,
            granted: Instant::now(),
            lasts,
        });
        Self { hold: Some(hold) }
    }

    /// The prefill engine was given this id.
    pub(crate) fn sent_as(mut self, id: RequestId) -> Self {
        if let Some(hold) = &mut self.hold {
            hold.sent_as = id;
        }
        self
    }

    /// The id that the decode leg must have too, if any: in push mode engines know by it what to write where.
    pub(crate) fn shared_id(&self) -> Option<&RequestId> {
        let hold = self.hold.as_ref()?;
        (hold.hand_off.mode == TransferMode::Push).then_some(&hold.sent_as)
    }

    /// The engine that holds the blocks.
    pub(crate) fn engine_id(&self) -> Option<&str> {
        self.hold.as_ref().map(|hold| hold.hand_off.engine_id.as_str())
    }

    /// The hand-off's bytes for the decode leg to a peer.
    pub(crate) fn raw_for(&self, decode: &Peer) -> Option<Bytes> {
        self.hold.as_ref().map(|hold| hold.core.hand_off_for(&hold.hand_off, decode))
    }

    /// What the prefill engine said of the prompt.
    pub(crate) fn part(&self) -> Option<PromptPart> {
        self.hold.as_ref().map(|hold| hold.hand_off.part.clone())
    }

    /// Whose blocks they are.
    pub(crate) fn prefill(&self) -> Option<&Arc<Peer>> {
        self.hold.as_ref().map(|hold| &hold.prefill)
    }

    /// Since when the prefill engine holds the blocks.
    pub(crate) fn granted(&self) -> Option<Instant> {
        self.hold.as_ref().map(|hold| hold.granted)
    }

    /// Whether the lease may end before a decode engine has read the blocks.
    pub(crate) fn is_expiring(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| {
            let margin = hold.order.settings.hand_off.lease_margin.min(hold.lasts / 2);
            hold.granted.elapsed() + margin >= hold.lasts
        })
    }

    /// Whether the blocks are gone with the engine that granted them.
    pub(crate) fn is_orphaned(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.is_orphaned())
    }

    /// The hand-off is being sent to a decode engine.
    pub(crate) fn dispatched(&mut self, decode: &Arc<Peer>) {
        if let Some(hold) = &mut self.hold {
            hold.core.ledger.dispatched(hold.key, &decode.id);
            hold.decode = Some(Arc::clone(decode));
            hold.given = true;
        }
    }

    /// The decode engine that it was sent to cannot have seen it.
    pub(crate) fn unseen(mut self) -> Self {
        if let Some(hold) = &mut self.hold {
            hold.given = false;
        }
        self
    }

    /// Bytes of its blocks; zero where the registry does not know their layout.
    pub(crate) fn bytes(&self) -> u64 {
        let of_hold = self.hold.as_ref().and_then(|hold| Some((hold.origin.as_ref()?, hold.hand_off.blocks)));
        of_hold.map_or(0, |(engine, blocks)| engine.bytes_per_block().saturating_mul(blocks as u64))
    }

    /// The decode engine failed, most likely because it could not read the blocks.
    pub(crate) fn was_not_read_by(&self, decode: &Peer) {
        if let Some(hold) = &self.hold {
            health::was_not_read(&hold.prefill, decode);
        }
    }

    /// The decode engine has shown that it read the blocks.
    pub(crate) fn read(mut self) {
        if let Some(hold) = self.hold.take() {
            if let Some(decode) = &hold.decode {
                decode.knows_engine(&hold.hand_off.engine_id);
                health::was_read(&hold.prefill, decode);
            }
            let bytes = hold.origin.as_ref().map_or(0, |engine| engine.bytes_per_block());
            let blocks = hold.hand_off.blocks;
            hold.core.metrics.handed_over(blocks, bytes.saturating_mul(blocks as u64));
            hold.core.ledger.close(hold.key, HandOffResult::Relayed);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(hold) = self.hold.take() else { return };
        // A decode engine that has had it so long has read it, or the blocks are gone.
        if hold.decode.is_some() && hold.granted.elapsed() >= hold.lasts {
            hold.core.ledger.close(hold.key, HandOffResult::Relayed);
            return;
        }
        // Both engines know of each other: one writes and frees, and nobody could make it free sooner.
        if hold.given && hold.hand_off.mode == TransferMode::Push {
            hold.core.ledger.close(hold.key, HandOffResult::Pushed);
            return;
        }
        hold.core.ledger.enter(hold.key, HandOffState::Releasing);
        let tasks = hold.core.tasks.clone();
        tasks.spawn(hold.release());
    }
}

/// How the first of several tries worked that does.
async fn first_way<T>(running: &mut FuturesUnordered<T>) -> Option<Way>
where
    T: Future<Output = Result<Result<Way, NotReleased>, tokio::time::error::Elapsed>>,
{
    while let Some(tried) = running.next().await {
        match tried {
            Ok(Ok(way)) => return Some(way),
            Ok(Err(error)) => tracing::debug!(%error, "release refused"),
            Err(_late) => tracing::debug!("release not answered"),
        }
    }
    None
}

/// Why one try to release a hand-off failed.
#[derive(Debug, thiserror::Error)]
enum NotReleased {
    #[error(transparent)]
    Broken(#[from] UpstreamFailure),
    #[error("the decode engine answered {0}")]
    Status(StatusCode),
    #[error("the blocks may not be those of the prompt")]
    Unsound,
}

impl Hold {
    /// Whether another engine, or another life of this one, is where the blocks were. An engine that
    /// is only not registered (any more) may be there all the same.
    fn is_orphaned(&self) -> bool {
        let registry = &self.core.registry;
        match (&self.origin, registry.engine(&self.hand_off.engine_id)) {
            (Some(origin), Some(now)) => now.is_another_life(origin),
            (Some(origin), None) => registry.is_replaced(origin),
            (None, Some(_)) => false,
            (None, None) => {
                let former = |url| registry.is_former(&self.hand_off.engine_id, url);
                self.prefill.address.as_deref().is_some_and(former)
            }
        }
    }

    /// Releases the hand-off, trying again while the prefill engine may still hold the blocks.
    async fn release(mut self: Box<Self>) {
        // The trace goes out when its last span has ended: later tries have none.
        let mut span = std::mem::take(&mut self.order.trace).span("release", SpanKind::Internal);
        span.say("kvbaton.peer", || self.prefill.id.clone());
        span.say("kvbaton.blocks", || self.hand_off.blocks);
        let mut pause = RELEASE_PAUSE;
        loop {
            if self.is_orphaned() {
                span.failed("engine_gone");
                self.core.ledger.close(self.key, HandOffResult::EngineGone);
                return;
            }
            let mut came_back = std::pin::pin!(self.core.pool.came_back.notified());
            came_back.as_mut().enable();
            if let Some(way) = self.free().await {
                span.say("kvbaton.release.way", || way.label());
                self.core.ledger.close(self.key, HandOffResult::Released(way));
                return;
            }
            span.failed("stranded");
            drop(std::mem::take(&mut span));
            self.core.ledger.enter(self.key, HandOffState::Stranded);
            if pause == RELEASE_PAUSE {
                tracing::warn!(
                    request_id = self.request_id.as_str(),
                    engine_id = %self.hand_off.engine_id,
                    blocks = self.hand_off.blocks,
                    "no decode engine could release a hand-off: its blocks stay until one can or the lease ends"
                );
            }
            tokio::select! {
                () = self.core.stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                () = came_back => {}
            }
            if self.granted.elapsed() >= self.lasts {
                return;
            }
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }

    /// The way that worked, the cheapest one tried first.
    async fn free(&self) -> Option<Way> {
        if self.notify().await {
            return Some(Way::Notification);
        }
        self.try_peers().await
    }

    /// The decode engines that can release it, the likeliest first: the one that it was meant for, then
    /// those that have shaken hands with the prefill engine before, whose word goes out at once. One that
    /// cannot read from it may answer all the same, having computed the prompt itself.
    fn releasers(&self) -> Vec<Arc<Peer>> {
        self.core.pool.learn(&self.core.registry);
        let is_meant = |peer: &Arc<Peer>| self.decode.as_ref().is_some_and(|meant| Arc::ptr_eq(peer, meant));
        let mut peers = self.core.pool.ready_peers(Stage::Decode);
        peers.retain(|peer| is_meant(peer) || self.core.pool.fits(&self.prefill, peer));
        // Whoever is sent a hand-off can read the blocks.
        peers.retain(|peer| peer.may_have(Some(self.order.model())));
        peers.sort_by_key(|peer| (!is_meant(peer), !peer.has_met(&self.hand_off.engine_id)));
        peers.truncate(RELEASE_TRIES);
        peers
    }

    /// Asks one decode engine after the other, each after the one before it has had a short time: that one
    /// may hang, or only be busy.
    async fn try_peers(&self) -> Option<Way> {
        let deadline = self.order.settings.timeouts.release;
        let mut running = FuturesUnordered::new();
        for peer in self.releasers() {
            // A stranger to P has a handshake to make.
            let head_start = deadline / if peer.has_met(&self.hand_off.engine_id) { 10 } else { 5 };
            running.push(tokio::time::timeout(deadline, self.try_peer(peer)));
            if let Ok(Some(way)) = tokio::time::timeout(head_start, first_way(&mut running)).await {
                return Some(way);
            }
        }
        first_way(&mut running).await
    }

    /// The current generation's server tells P of a refusal inside its handler; the word goes out
    /// with the engine's next step, unless it must shake hands with P first: then it waits for a
    /// request that makes the engine step again. So a stranger to P, like version 2, which never
    /// tells P of a refusal, is rather asked to read the blocks for one token.
    async fn try_peer(&self, peer: Arc<Peer>) -> Result<Way, NotReleased> {
        let peer = &peer;
        let _in_flight = peer.enter();
        let acquainted = peer.has_met(&self.hand_off.engine_id);
        let newest = self.hand_off.generation == Generation::V14;
        if self.hand_off.mode == TransferMode::Push {
            // Nothing but a write makes a prefill engine free blocks that it pushes.
            return self.have_written(peer).await;
        }
        if newest && acquainted {
            return self.reject(peer).await.map(|()| Way::Rejection);
        }
        if self.hand_off.sound || !newest {
            let read = self.send(peer, self.order.endpoint().path(), self.one_token_body(peer)).await?;
            if read.is_success() {
                peer.knows_engine(&self.hand_off.engine_id);
                return Ok(Way::Read);
            }
            // Where the read itself failed, the engines cannot reach each other: no word will arrive.
            if !newest || read.is_server_error() {
                return Err(NotReleased::Status(read));
            }
        }
        self.reject(peer).await?;
        for pause in NUDGES {
            tokio::time::sleep(pause).await;
            self.send(peer, Endpoint::Completions.path(), self.nudge_body()).await?;
        }
        Ok(Way::Rejection)
    }

    /// Has the blocks written to a decode engine for one token.
    async fn have_written(&self, peer: &Arc<Peer>) -> Result<Way, NotReleased> {
        if !self.hand_off.sound {
            return Err(NotReleased::Unsound);
        }
        let (path, body) = (self.order.endpoint().path(), self.one_token_body(peer));
        let written = self.send_as(peer, path, body, &self.sent_as).await?;
        if !written.is_success() {
            return Err(NotReleased::Status(written));
        }
        peer.knows_engine(&self.hand_off.engine_id);
        Ok(Way::Read)
    }

    async fn reject(&self, peer: &Arc<Peer>) -> Result<(), NotReleased> {
        match self.send(peer, Endpoint::Completions.path(), self.rejected_body(peer)).await? {
            StatusCode::NOT_FOUND => Ok(()),
            status => Err(NotReleased::Status(status)),
        }
    }

    async fn send(&self, peer: &Arc<Peer>, path: &str, body: Spliced) -> Result<StatusCode, UpstreamFailure> {
        self.send_as(peer, path, body, &RequestId::accept(None)).await
    }

    async fn send_as(
        &self,
        peer: &Arc<Peer>,
        path: &str,
        body: Spliced,
        id: &RequestId,
    ) -> Result<StatusCode, UpstreamFailure> {
        let leg = |body| Leg {
            stage: Stage::Decode,
            peer,
            method: Method::POST,
            path,
            headers: own_headers(id),
            body,
        };
        let deadline = self.order.settings.timeouts.release;
        let response = match self.core.upstream.send(leg(body.clone()), deadline).await {
            Err(failure) if failure.stale => self.core.upstream.send_anew(leg(body), deadline).await?,
            sent => sent?,
        };
        let status = response.status();
        let limit = self.order.settings.limits.answer_bytes;
        self.core.upstream.collect(Stage::Decode, response.into_body(), limit).await?;
        Ok(status)
    }

    fn one_token_body(&self, decode: &Peer) -> Spliced {
        let salt = uuid::Uuid::new_v4().simple().to_string();
        self.order.request.release_body(self.core.hand_off_for(&self.hand_off, decode), &salt)
    }

    /// The smallest request that makes an engine step.
    fn nudge_body(&self) -> Spliced {
        let model = serde_json::Value::from(self.order.model());
        Spliced::from(Bytes::from(format!(r#"{{"model":{model},"prompt":"-","max_tokens":1}}"#)))
    }

    fn rejected_body(&self, decode: &Peer) -> Spliced {
        let hand_off = self.core.hand_off_for(&self.hand_off, decode);
        let mut body = Vec::with_capacity(hand_off.len() + 128);
        body.extend_from_slice(br#"{"model":""#);
        body.extend_from_slice(NO_SUCH_MODEL.as_bytes());
        body.extend_from_slice(br#"","prompt":"-","max_tokens":1,"kv_transfer_params":"#);
        body.extend_from_slice(&hand_off);
        body.push(b'}');
        Spliced::from(Bytes::from(body))
    }
}

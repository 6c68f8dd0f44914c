//! How a hand-off's blocks are freed that no decode engine is known to have read: round after round, until
//! somebody has told the prefill engine or the lease ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use http::{Method, StatusCode};
use kv_connector::protocol::params::{Generation, TransferMode};
use tokio::time::Instant;

use super::Hold;
use crate::error::{Stage, UpstreamFailure};
use crate::ledger::HandOffState;
use crate::metrics::{HandOffResult, Way};
use crate::pool::peer::Peer;
use crate::request::Endpoint;
use crate::request_id::RequestId;
use crate::splice::Spliced;
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
/// on a healthy network, which takes about as long, and twice more for slower ones.
pub(super) const NUDGES: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(200), Duration::from_millis(500)];

/// Why one try to release a hand-off failed.
#[derive(Debug, thiserror::Error)]
enum NotReleased {
    #[error(transparent)]
    Broken(#[from] UpstreamFailure),
    #[error("the decode engine answered {0}")]
    Status(StatusCode),
    #[error("the blocks may not be those of the prompt")]
    Unsound,
    #[error("no answer in time")]
    Late,
}

/// The attempts of one release. Who is slow is heard on while others are asked.
#[derive(Default)]
struct Attempts<'a> {
    running: FuturesUnordered<BoxFuture<'a, (u64, Result<Way, NotReleased>)>>,
    /// What runs: whom it asks, and since when.
    asked: BTreeMap<u64, (Arc<Peer>, Instant)>,
    number: u64,
}

impl<'a> Attempts<'a> {
    /// Begins one; its number.
    fn ask(&mut self, hold: &'a Hold, peer: Arc<Peer>) -> u64 {
        let (number, deadline) = (self.number, hold.order.settings.timeouts.release);
        self.number += 1;
        self.asked.insert(number, (Arc::clone(&peer), Instant::now()));
        self.running.push(Box::pin(async move {
            let tried = tokio::time::timeout(deadline, hold.try_peer(peer)).await;
            (number, tried.unwrap_or(Err(NotReleased::Late)))
        }));
        number
    }

    /// Waits for the next that ends; its number, and the way if it worked. None where none runs.
    async fn next(&mut self) -> Option<(u64, Option<Way>)> {
        let (number, tried) = self.running.next().await?;
        self.asked.remove(&number);
        let way = tried.inspect_err(|error| tracing::debug!(%error, "a hand-off was not released")).ok();
        Some((number, way))
    }

    /// How the first works that does before this ends; `newest` is given up on when it fails.
    async fn until(&mut self, end: impl Future<Output = ()>, newest: Option<u64>) -> Option<Way> {
        let mut end = std::pin::pin!(end);
        loop {
            tokio::select! {
                () = &mut end => return None,
                Some((number, way)) = self.next() => {
                    if way.is_some() || newest == Some(number) {
                        return way;
                    }
                }
            }
        }
    }

    /// How the first works that does of those that run.
    async fn any(&mut self) -> Option<Way> {
        while let Some((_, way)) = self.next().await {
            if way.is_some() {
                return way;
            }
        }
        None
    }

    /// Lets those that run come to their end.
    async fn all(&mut self) {
        while self.next().await.is_some() {}
    }

    /// How many ask a peer, and how long ago the latest of them began.
    fn at(&self, peer: &Arc<Peer>) -> (usize, Option<Duration>) {
        let at_peer = || self.asked.values().filter(|(asked, _)| Arc::ptr_eq(asked, peer));
        (at_peer().count(), at_peer().map(|(_, since)| since.elapsed()).min())
    }
}

impl Hold {
    /// Releases the hand-off, trying again while the prefill engine may still hold the blocks.
    pub(super) async fn release(mut self: Box<Self>) {
        // The trace goes out when its last span has ended: what ends after the first rounds has none.
        let mut span = std::mem::take(&mut self.trace).span("release", SpanKind::Internal);
        span.say("kvbaton.peer", || self.prefill.id.clone());
        span.say("kvbaton.blocks", || self.hand_off.blocks);
        let (hold, began, mut pause) = (&*self, Instant::now(), RELEASE_PAUSE);
        let (mut attempts, mut stranded) = (Attempts::default(), false);
        let way = loop {
            if hold.is_orphaned() {
                span.failed("engine_gone");
                return hold.core.ledger.close(hold.key, HandOffResult::EngineGone);
            }
            let mut came_back = std::pin::pin!(hold.core.pool.came_back.notified());
            came_back.as_mut().enable();
            if let Some(way) = hold.round(&mut attempts).await {
                break way;
            }
            let late = began.elapsed() >= hold.order.settings.timeouts.release;
            if !stranded && (attempts.asked.is_empty() || late) {
                stranded = true;
                span.failed("stranded");
                drop(std::mem::take(&mut span));
                hold.strand();
            }
            let rest = async {
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = came_back => {}
                }
            };
            let found = tokio::select! {
                // What has been asked may still be answered.
                () = hold.core.stop.cancelled() => match attempts.any().await {
                    Some(way) => Some(way),
                    None => return,
                },
                found = attempts.until(rest, None) => found,
            };
            if let Some(way) = found {
                break way;
            }
            if hold.granted.elapsed() >= hold.lasts {
                return;
            }
            pause = LONGEST_PAUSE.min(pause * 2);
        };
        span.say("kvbaton.release.way", || way.label());
        drop(span);
        hold.core.ledger.close(hold.key, HandOffResult::Released(way));
        // One of version 2 that is told to stop gives away the blocks that it reads into.
        if hold.hand_off.generation == Generation::V2 {
            tokio::select! {
                () = attempts.all() => {}
                () = hold.core.leaves() => {}
            }
        }
    }

    fn strand(&self) {
        self.core.ledger.enter(self.key, HandOffState::Stranded);
        tracing::warn!(
            request_id = self.request_id.as_str(),
            engine_id = %self.hand_off.engine_id,
            blocks = self.hand_off.blocks,
            "no decode engine could release a hand-off: its blocks stay until one can or the lease ends"
        );
    }

    /// Tells the prefill engine, or asks one decode engine after the other, each after the one before it has
    /// had a short time: that one may hang, or only be busy. How the first works that does meanwhile.
    async fn round<'a>(&'a self, attempts: &mut Attempts<'a>) -> Option<Way> {
        if self.notify().await {
            return Some(Way::Notification);
        }
        let head_start = self.order.settings.timeouts.release / 10;
        for peer in self.releasers(attempts) {
            let number = attempts.ask(self, peer);
            if let Some(way) = attempts.until(tokio::time::sleep(head_start), Some(number)).await {
                return Some(way);
            }
        }
        None
    }

    /// The decode engines to ask in a round, the likeliest first: those that nobody is asking already, the one
    /// that it was meant for, then those that have shaken hands with the prefill engine before, whose word goes
    /// out at once. One that cannot read from it may answer all the same, having computed the prompt itself.
    fn releasers(&self, attempts: &Attempts<'_>) -> Vec<Arc<Peer>> {
        self.core.pool.learn(&self.core.registry);
        let is_meant = |peer: &Arc<Peer>| self.decode.as_ref().is_some_and(|meant| Arc::ptr_eq(peer, meant));
        let patience = self.order.settings.timeouts.release / 4;
        let mut peers = self.core.pool.ready_peers(Stage::Decode);
        peers.retain(|peer| is_meant(peer) || self.core.pool.fits(&self.prefill, peer));
        // Whoever is sent a hand-off can read the blocks.
        peers.retain(|peer| peer.may_have(Some(self.order.model())));
        // It may be that one request only was lost. In push mode the second would have the first one's id.
        let once = self.hand_off.mode == TransferMode::Push;
        peers.retain(|peer| attempts.at(peer).1.is_none_or(|since| !once && since >= patience));
        peers.sort_by_key(|peer| {
            (attempts.at(peer).0, !is_meant(peer), !peer.has_met(&self.hand_off.engine_id))
        });
        peers.truncate(RELEASE_TRIES);
        peers
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
    pub(super) fn nudge_body(&self) -> Spliced {
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

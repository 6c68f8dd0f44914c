//! The router's hold on one granted hand-off, and how its blocks are freed when no decode engine is
//! known to have read them. Telling P twice is harmless, an untold P holds the blocks for long: so a
//! decode engine that was asked but showed nothing counts as one that did not read.

mod followed;
mod notified;
mod release;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_connector::protocol::params::{Generation, TransferMode};
use tokio::time::Instant;

use crate::Core;
use crate::disagg::Order;
use crate::handoff::HandedOff;
use crate::ledger::{Granted, HandOffState};
use crate::metrics::HandOffResult;
use crate::pool::health;
use crate::pool::peer::Peer;
use crate::registry::EngineRecord;
use crate::request_id::RequestId;
use crate::splice::PromptPart;
use crate::trace::Trace;
pub(crate) use followed::{DecodeLeg, Showed};

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
    order: Arc<Order>,
    request_id: RequestId,
    /// The id that the prefill engine was given.
    sent_as: RequestId,
    decode: Option<Arc<Peer>>,
    /// A decode engine may have it.
    given: bool,
    granted: Instant,
    lasts: Duration,
    /// What is still done after the request's end has a span there.
    trace: Trace,
    /// The engine as it was registered when it granted the hand-off.
    origin: Option<Arc<EngineRecord>>,
}

impl Lease {
    pub(crate) fn open(
        core: &Arc<Core>,
        hand_off: HandedOff,
        prefill: &Arc<Peer>,
        order: &Arc<Order>,
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
            order: Arc::clone(order),
            request_id: request_id.clone(),
            sent_as: request_id.clone(),
            decode: None,
            given: false,
            granted: Instant::now(),
            lasts,
            trace: Trace::default(),
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

    /// It was granted to the request of this trace.
    pub(crate) fn traced(mut self, trace: Trace) -> Self {
        if let Some(hold) = &mut self.hold {
            hold.trace = trace;
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
            if hold.prefill.spec.notify {
                hold.core.ledger.enter(hold.key, HandOffState::Releasing);
                hold.core.tasks.clone().spawn(hold.settle());
            } else {
                hold.core.ledger.close(hold.key, HandOffResult::Pushed);
            }
            return;
        }
        hold.core.ledger.enter(hold.key, HandOffState::Releasing);
        hold.core.tasks.clone().spawn(hold.release());
    }
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
}

//! Decode legs that nobody may cut before the engine shows that it has the blocks. The lease is held beside the
//! leg, and both are let come that far if the request is dropped.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};

use super::first_leg::SentPrefill;
use super::second_leg::waiting;
use super::{Exchange, Order};
use crate::Core;
use crate::error::{Broken, Progress, Stage, UpstreamFailure};
use crate::lease::{DecodeLeg, Lease, Showed};
use crate::pool::peer::{InFlight, Peer};
use crate::request_id::RequestId;
use crate::stream::Guards;
use crate::wire::EngineBody;

/// What a decode engine is told where the lease is not with its leg.
pub(super) struct Given {
    pub(super) raw: Bytes,
    /// The id of both legs, where engines find each other by it.
    pub(super) id: Option<RequestId>,
}

/// What became of a decode leg: its answer, or what broke and the hand-off that it cannot have seen.
pub(super) type Sent = Result<(Response<EngineBody>, Guards), (UpstreamFailure, Option<Lease>)>;

/// Legs under way.
pub(super) struct Legs {
    pub(super) core: Arc<Core>,
    pub(super) prefill: Option<SentPrefill>,
    /// What the prefill leg has come to.
    pub(super) lease: Option<Lease>,
    pub(super) decode: Option<Second>,
    pub(super) peer: Arc<Peer>,
}

/// A decode leg that waits for blocks.
pub(super) enum Second {
    Running(Pin<Box<dyn Future<Output = Sent> + Send>>),
    /// Its head has come: before any block, with some engines.
    Headed(Box<(Response<EngineBody>, Guards)>),
}

impl Drop for Legs {
    fn drop(&mut self) {
        let Some(decode) = self.decode.take() else { return };
        let shows = Box::pin(shown(Arc::clone(&self.core), decode));
        let leg = DecodeLeg { peer: Arc::clone(&self.peer), shows };
        match (self.prefill.take(), self.lease.take()) {
            (Some(prefill), _) => prefill.leg.abandon_with(leg),
            (None, Some(lease)) => lease.follow(leg),
            (None, None) => {}
        }
    }
}

/// What a decode leg shows of the blocks that it waits for.
async fn shown(core: Arc<Core>, decode: Second) -> Showed {
    let sent = match decode {
        Second::Headed(answered) => Ok(*answered),
        Second::Running(running) => running.await.map_err(|(failure, _)| failure),
    };
    match sent {
        Ok((answer, guards)) => Showed::answer(&core, answer, guards).await,
        Err(failure) => Showed::failure(failure),
    }
}

/// A leg that is not there.
pub(super) const fn lost() -> UpstreamFailure {
    UpstreamFailure::new(Stage::Prefill, Broken::Reset, Progress::NotSent)
}

impl Core {
    /// The decode leg to blocks that have been computed.
    pub(super) async fn followed(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
        in_flight: InFlight,
        lease: Lease,
        anew: bool,
    ) -> Sent {
        let peer = Arc::clone(&in_flight.peer);
        let Some(raw) = lease.raw_for(&peer) else { return Err((lost(), None)) };
        let given = Given { raw, id: lease.shared_id().cloned() };
        if lease.is_pushed() {
            self.metrics.pushed("in_turn");
        }
        exchange.account.tell(|told| told.prefill = lease.prefill().cloned());
        let (core, order, exchange) = (Arc::clone(self), Arc::clone(order), exchange.clone());
        let second =
            Box::pin(
                async move { core.decode(&order, &exchange, in_flight, None, Some(&given), anew).await },
            );
        let decode = Some(Second::Running(second));
        Legs { core: Arc::clone(self), prefill: None, lease: None, decode, peer }.join(lease).await
    }
}

impl Legs {
    /// The decode engine's answer, with the hand-off that has been granted meanwhile.
    pub(super) async fn join(mut self, mut lease: Lease) -> Sent {
        lease.dispatched(&self.peer);
        self.lease = Some(lease);
        let sent = match &mut self.decode {
            Some(Second::Running(decode)) => decode.as_mut().await,
            _ => Err((lost(), None)),
        };
        let sent = match self.decode.take() {
            Some(Second::Headed(answered)) => Ok(*answered),
            _ => sent,
        };
        let Some(lease) = self.lease.take() else { return sent };
        match sent {
            Ok((answer, mut guards)) if answer.status().is_success() => {
                guards.part = lease.part();
                if let Some(waiting) = waiting(&lease) {
                    guards.flow.waits_for(waiting);
                }
                guards.lease = Some(lease);
                Ok((answer, guards))
            }
            Ok((answer, guards)) => {
                // Blocks that were to be written and never came may be the prefill engine's fault.
                if !lease.is_pushed() {
                    blame(&self.peer, answer.status(), Some(&lease));
                }
                let refused = answer.status().is_client_error();
                lease.showed(if refused { Showed::Refused } else { Showed::Failed });
                Ok((answer, guards))
            }
            Err((failure, _)) if failure.is_unseen() => Err((failure, Some(lease.unseen()))),
            Err((failure, _)) => {
                lease.showed(Showed::failure(failure));
                Err((failure, None))
            }
        }
    }
}

/// Holds an answer of this status against whoever it speaks against.
pub(super) fn blame(decode: &Peer, status: StatusCode, lease: Option<&Lease>) {
    match lease {
        _ if !status.is_server_error() => {}
        // With this status an engine also says that it could not read the blocks.
        Some(lease) if status == StatusCode::INTERNAL_SERVER_ERROR => lease.was_not_read_by(decode),
        _ => decode.blamed(),
    }
}

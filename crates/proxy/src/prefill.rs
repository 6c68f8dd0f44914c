//! The prefill leg in flight. One that nobody waits for any more is heard out and its blocks are
//! released: what P has finished cannot be aborted, and only its answer names the blocks.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Method, Response};
use kv_connector::protocol::params::Generation;
use tokio::time::timeout;

use crate::Core;
use crate::error::{Broken, Progress, Stage, UpstreamFailure};
use crate::handoff;
use crate::lease::Lease;
use crate::metrics::AbandonedPrefill;
use crate::pool::peer::InFlight;
use crate::request::ClientRequest;
use crate::request_id::RequestId;
use crate::upstream::{Leg, route};

/// How long abandoned prefills are still heard out when the router ends.
const LEAVING: Duration = Duration::from_secs(2);

type Answered = Result<(Response<()>, Bytes), UpstreamFailure>;

/// One prefill request on its way. Dropped before its answer, it is abandoned.
pub(crate) struct PrefillLeg {
    running: Option<Running>,
}

struct Running {
    answer: Pin<Box<dyn Future<Output = Answered> + Send>>,
    core: Arc<Core>,
    in_flight: InFlight,
    request: ClientRequest,
    request_id: RequestId,
}

impl PrefillLeg {
    /// Prepares the leg; it is sent when its answer is first awaited, `anew` on a connection of its own.
    pub(crate) fn start(
        core: &Arc<Core>,
        in_flight: InFlight,
        request: &ClientRequest,
        request_id: &RequestId,
        headers: HeaderMap,
        anew: bool,
    ) -> Self {
        let peer = Arc::clone(&in_flight.peer);
        // That generation hands off only what ended by length.
        let ignore_eos = peer.generation() == Some(Generation::V2);
        let (body, path) = (request.prefill_body(ignore_eos), request.endpoint().path());
        let exchange = Arc::clone(core);
        let answer = Box::pin(async move {
            let leg = Leg { stage: Stage::Prefill, peer: &peer, method: Method::POST, path, headers, body };
            exchange.whole_answer(leg, anew).await
        });
        let (request, request_id) = (request.clone(), request_id.clone());
        let running = Running { answer, core: Arc::clone(core), in_flight, request, request_id };
        Self { running: Some(running) }
    }

    /// The whole answer of the prefill engine. One that is late has its leg heard out like one whose
    /// client has left.
    pub(crate) async fn answer(&mut self) -> Answered {
        let lost = UpstreamFailure::new(Stage::Prefill, Broken::Reset, Progress::Answering);
        let running = self.running.as_mut().ok_or(lost)?;
        let deadline = running.core.settings().timeouts.prefill;
        let silent = UpstreamFailure::new(Stage::Prefill, Broken::Timeout, Progress::Sent);
        let answered = timeout(deadline, running.answer.as_mut()).await.map_err(|_late| silent)?;
        self.running = None;
        answered
    }
}

impl Drop for PrefillLeg {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            let tasks = running.core.tasks.clone();
            tasks.spawn(running.abandon());
        }
    }
}

impl Running {
    /// Closing the connection would abort a prefill that still computes, but not one that has ended:
    /// its blocks could then be named by nobody until the lease ends.
    async fn abandon(self) {
        let Self { answer, core, in_flight, request, request_id } = self;
        let of_peer = in_flight.peer.spec.abandon_grace;
        let grace = of_peer.unwrap_or(core.settings().hand_off.abandon_grace);
        let leaving = async {
            core.stop.cancelled().await;
            tokio::time::sleep(LEAVING).await;
        };
        let heard = tokio::select! {
            heard = timeout(grace, answer) => heard.ok(),
            () = leaving => None,
        };
        let fate = match heard {
            None => AbandonedPrefill::Aborted,
            Some(Err(_)) => AbandonedPrefill::Failed,
            Some(Ok((head, _))) if !head.status().is_success() => AbandonedPrefill::KeptNone,
            Some(Ok((head, answer))) => {
                let peer = &in_flight.peer;
                let route = route(&head);
                let accepted =
                    handoff::accept(&request, &answer, peer, route.same_host, core.tokens_per_block());
                let unread = accepted.map_or_else(|refused| refused.unused.map(|unused| *unused), Some);
                // Not even a release may go to an address that is not the peer's.
                let unread = unread.filter(|unread| core.foreign_address(peer, unread, route).is_none());
                let settings = core.settings();
                let by_way_of = settings.hand_off.registry_address.as_ref();
                match unread.and_then(|unread| unread.by_way_of(by_way_of).ok()) {
                    None => AbandonedPrefill::KeptNone,
                    Some(unread) => {
                        drop(Lease::open(&core, unread, peer, &request, &request_id));
                        AbandonedPrefill::Released
                    }
                }
            }
        };
        core.metrics.prefill_abandoned(fate);
    }
}

impl Core {
    /// What the check of block counts may know.
    pub(crate) fn tokens_per_block(&self) -> impl FnOnce(&str) -> Option<u64> {
        let check = self.settings().hand_off.check_block_count;
        move |engine_id| if check { self.registry.tokens_per_block(engine_id) } else { None }
    }

    async fn whole_answer(&self, leg: Leg<'_>, anew: bool) -> Answered {
        let stage = leg.stage;
        let deadline = self.settings().timeouts.prefill + self.settings().hand_off.abandon_grace;
        let exchange = async {
            let sent = if anew {
                self.upstream.send_anew(leg, deadline).await
            } else {
                self.upstream.send(leg, deadline).await
            };
            let (head, body) = sent?.into_parts();
            let answer = self.upstream.collect(stage, body, self.settings().limits.answer_bytes).await?;
            Ok((Response::from_parts(head, ()), answer))
        };
        let silent = UpstreamFailure::new(stage, Broken::Timeout, Progress::Sent);
        timeout(deadline, exchange).await.unwrap_or(Err(silent))
    }
}

//! The prefill leg in flight. When the client leaves, a prefill that is about to end is heard out
//! and its blocks are released; a longer one is aborted by closing its connection.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Method, Response};
use kv_connector::protocol::params::Generation;
use tokio::time::timeout;

use crate::Core;
use crate::error::{Broken, Progress, Stage, UpstreamFailure};
use crate::handoff;
use crate::lease::Lease;
use crate::pool::peer::InFlight;
use crate::request::ClientRequest;
use crate::request_id::RequestId;
use crate::upstream::{Leg, route};

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
    /// Prepares the leg; it is sent when its answer is first awaited.
    pub(crate) fn start(
        core: &Arc<Core>,
        in_flight: InFlight,
        request: &ClientRequest,
        request_id: &RequestId,
        headers: HeaderMap,
    ) -> Self {
        let peer = Arc::clone(&in_flight.peer);
        // That generation hands off only what ended by length.
        let ignore_eos = peer.generation() == Some(Generation::V2);
        let (body, path) = (request.prefill_body(ignore_eos), request.endpoint().path());
        let exchange = Arc::clone(core);
        let answer = Box::pin(async move {
            let leg = Leg { stage: Stage::Prefill, peer: &peer, method: Method::POST, path, headers, body };
            exchange.whole_answer(leg).await
        });
        let (request, request_id) = (request.clone(), request_id.clone());
        let running = Running { answer, core: Arc::clone(core), in_flight, request, request_id };
        Self { running: Some(running) }
    }

    /// The whole answer of the prefill engine.
    pub(crate) async fn answer(&mut self) -> Answered {
        let lost = UpstreamFailure::new(Stage::Prefill, Broken::Reset, Progress::Answering);
        let running = self.running.as_mut().ok_or(lost)?;
        let answered = running.answer.as_mut().await;
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
    /// Closing the connection aborts a prefill that still computes, but not one that has ended:
    /// its blocks could then be named by nobody until the lease ends.
    async fn abandon(self) {
        let Self { answer, core, in_flight, request, request_id } = self;
        let grace = core.settings().hand_off.abandon_grace;
        let Ok(Ok((head, answer))) = timeout(grace, answer).await else { return };
        if !head.status().is_success() {
            return;
        }
        let peer = &in_flight.peer;
        let unread =
            match handoff::accept(&request, &answer, peer, route(&head).same_host, core.tokens_per_block()) {
                Ok(hand_off) => Some(hand_off),
                Err(refused) => refused.unused.map(|unused| *unused),
            };
        if let Some(unread) = unread {
            drop(Lease::open(&core, unread, peer, &request, &request_id));
        }
    }
}

impl Core {
    /// What the check of block counts may know.
    pub(crate) fn tokens_per_block(&self) -> impl FnOnce(&str) -> Option<u64> {
        let check = self.settings().hand_off.check_block_count;
        move |engine_id| if check { self.registry.tokens_per_block(engine_id) } else { None }
    }

    async fn whole_answer(&self, leg: Leg<'_>) -> Answered {
        let stage = leg.stage;
        let deadline = self.settings().timeouts.prefill;
        let exchange = async {
            let (head, body) = self.upstream.send(leg, deadline).await?.into_parts();
            let answer = self.upstream.collect(stage, body, self.settings().limits.answer_bytes).await?;
            Ok((Response::from_parts(head, ()), answer))
        };
        let silent = UpstreamFailure::new(stage, Broken::Timeout, Progress::Sent);
        timeout(deadline, exchange).await.unwrap_or(Err(silent))
    }
}

//! A decode leg that nobody waits for any more, where its engine must not be told so before it shows that it has
//! the blocks. In push mode one that has not announced where its blocks are cannot be written to, and nothing says
//! when it has. One of version 2 gives the blocks that it reads into to another request at once, and the rest of
//! what it reads falsifies that one's answer. So the leg is let come as far as the hand-off, and what it shows of
//! that decides what becomes of the lease.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use http_body_util::BodyExt as _;
use kv_connector::protocol::params::{Generation, TransferMode};
use tokio::time::{Instant, timeout_at};

use super::{Hold, Lease};
use crate::Core;
use crate::answer::is_type;
use crate::error::UpstreamFailure;
use crate::pool::peer::Peer;
use crate::stream::{Events, Guards, Sight};
use crate::wire::EngineBody;

/// How long a leg that nobody waits for may still run when the router ends.
const LEAVING: Duration = Duration::from_secs(2);

/// A decode leg whose client has left, or that runs beside an abandoned prefill leg.
pub(crate) struct DecodeLeg {
    pub(crate) peer: Arc<Peer>,
    /// Ends when the engine shows that the blocks have come, or that they are of no use.
    pub(crate) shows: Pin<Box<dyn Future<Output = Showed> + Send>>,
}

/// What a decode leg has shown of the blocks that it waits for; what is in it holds the connection.
pub(crate) enum Showed {
    /// They have come.
    Blocks(#[expect(dead_code, reason = "held until a prefill beside it has ended")] Box<dyn Send>),
    /// The engine refused the request, or has not seen it: it has announced nothing.
    Refused,
    /// It failed, and may have announced itself before. Another that announced itself in its place would keep
    /// its own blocks for good if so: they are written once.
    Failed,
}

impl Showed {
    /// What a leg shows that ended before its head came.
    pub(crate) const fn failure(failure: UpstreamFailure) -> Self {
        if failure.is_unseen() { Self::Refused } else { Self::Failed }
    }

    /// What an answer shows whose head has come.
    pub(crate) async fn answer(core: &Core, answer: Response<EngineBody>, guards: Guards) -> Self {
        match answer.status() {
            status if status.is_client_error() => return Self::Refused,
            status if !status.is_success() => return Self::Failed,
            _ => {}
        }
        let events = is_type(answer.headers(), b"text/event-stream").then(|| {
            let longest = core.settings().limits.answer_bytes;
            Events::new(guards.endpoint, None, core.held.share(), longest)
        });
        Self::stream(answer.into_body(), events, guards).await
    }

    /// What the rest of an answer shows whose client had no token yet.
    pub(crate) async fn stream(mut body: EngineBody, mut events: Option<Events>, guards: Guards) -> Self {
        while let Some(Ok(frame)) = body.frame().await {
            let Ok(data) = frame.into_data() else { continue };
            let Some(events) = &mut events else { return Self::Blocks(Box::new((body, guards))) };
            match events.take(data) {
                Ok((_, Sight::Nothing)) => {}
                Ok((_, Sight::Token)) => return Self::Blocks(Box::new((body, guards))),
                Ok((_, Sight::Failure)) | Err(_) => break,
            }
        }
        Self::Failed
    }
}

impl Lease {
    /// Whether the blocks are freed only when the prefill engine has written them to somebody.
    pub(crate) fn is_pushed(&self) -> bool {
        self.shared_id().is_some()
    }

    /// Whether a decode leg with it is followed when nobody waits for its answer any more.
    pub(crate) fn is_followed(&self) -> bool {
        self.is_pushed() || self.hold.as_ref().is_some_and(|hold| hold.hand_off.generation == Generation::V2)
    }

    /// Has the decode leg to which the blocks go come as far as the hand-off, with nobody waiting for its answer.
    pub(crate) fn follow(self, leg: DecodeLeg) {
        let Some(hold) = &self.hold else { return };
        let ends = hold.followed_until(&leg.peer);
        let core = Arc::clone(&hold.core);
        let tasks = core.tasks.clone();
        tasks.spawn(async move {
            let showed = tokio::select! {
                showed = timeout_at(ends, leg.shows) => showed.ok(),
                () = core.leaves() => None,
            };
            if let Some(showed) = showed {
                self.showed(showed);
            }
        });
    }

    /// What the decode engine that had the hand-off has shown.
    pub(crate) fn showed(self, showed: Showed) {
        match showed {
            Showed::Blocks(_) => self.read(),
            Showed::Refused => drop(self.unseen()),
            Showed::Failed => drop(self),
        }
    }
}

impl Hold {
    /// When a leg that shows nothing is given up. An answer that is no stream comes when all of it is generated,
    /// for nobody and long after the blocks; engines that have not met shake hands first.
    fn followed_until(&self, decode: &Peer) -> Instant {
        let release = self.order.settings.timeouts.release;
        let blocks_come = if decode.has_met(&self.hand_off.engine_id) { release / 5 } else { release };
        match self.hand_off.mode {
            TransferMode::Push if self.order.wants_stream() => self.granted + self.lasts,
            TransferMode::Push => self.granted + blocks_come,
            // It may begin to read only now, and others can read in its place when it is given up.
            TransferMode::Pull => Instant::now() + blocks_come,
        }
    }
}

impl Core {
    /// The router ends, and what nobody waits for has had its time.
    pub(crate) async fn leaves(&self) {
        self.stop.cancelled().await;
        tokio::time::sleep(LEAVING).await;
    }
}

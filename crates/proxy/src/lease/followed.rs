//! A decode leg that nobody waits for any more, in push mode. A decode engine that has not announced where its
//! blocks are cannot be written to, and nothing says when it has: so it is let come as far as the hand-off, and
//! what it shows of that decides what becomes of the lease.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use http_body_util::BodyExt as _;
use tokio::time::timeout_at;

use super::Lease;
use crate::error::{Progress, UpstreamFailure};
use crate::pool::peer::Peer;
use crate::stream::{Events, Guards, Sight};
use crate::wire::EngineBody;

/// How long a decode leg is still followed when the router ends.
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
        match failure.progress {
            Progress::NotSent => Self::Refused,
            Progress::Sent | Progress::Answering => Self::Failed,
        }
    }

    /// What an answer shows whose head has come.
    pub(crate) async fn answer(answer: Response<EngineBody>, guards: Guards) -> Self {
        match answer.status() {
            status if status.is_client_error() => return Self::Refused,
            status if !status.is_success() => return Self::Failed,
            _ => {}
        }
        let mut body = answer.into_body();
        match body.frame().await {
            Some(Ok(_)) => Self::Blocks(Box::new((body, guards))),
            _ => Self::Failed,
        }
    }

    /// What the rest of a stream shows whose client had no token yet.
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

    /// Has the decode leg to which the blocks go come as far as the hand-off, with nobody waiting for its answer.
    pub(crate) fn follow(self, leg: DecodeLeg) {
        let Some(hold) = &self.hold else { return };
        let release = hold.order.settings.timeouts.release;
        let patience = if hold.order.wants_stream() {
            hold.lasts
        } else if leg.peer.has_met(&hold.hand_off.engine_id) {
            // Its answer would come when all of it is generated, for nobody, and long after the blocks.
            release / 5
        } else {
            release
        };
        let ends = hold.granted + patience;
        let core = Arc::clone(&hold.core);
        let tasks = core.tasks.clone();
        tasks.spawn(async move {
            let leaving = async {
                core.stop.cancelled().await;
                tokio::time::sleep(LEAVING).await;
            };
            let showed = tokio::select! {
                showed = timeout_at(ends, leg.shows) => showed.ok(),
                () = leaving => None,
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

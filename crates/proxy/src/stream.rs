//! The body that goes back to the client: the engine's chunks as they come, polled through without
//! a task, with the guards that must live as long as the answer and a clear end when it breaks.

mod events;
mod failure;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::account::Account;
use crate::error::{Broken, Progress, Stage, UpstreamFailure};
use crate::flow::Flow;
use crate::lease::{DecodeLeg, Lease, Showed};
use crate::metrics::{Metrics, Outcome};
use crate::pool::peer::InFlight;
use crate::request::Endpoint;
use crate::request_id::RequestId;
use crate::splice::{PromptPart, Spliced};
use crate::upstream::body_broken;
use crate::wire::EngineBody;

pub(crate) use events::{Events, Sight};
pub use failure::{EventError, error_event};
use failure::{broken_event, leaving_event};

/// What the client sees when an answer cannot be completed and is no event stream: the connection
/// ends without the body's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelayError {
    /// The engine broke off.
    #[error("the answer broke off: {0}")]
    Broken(UpstreamFailure),
    /// The router leaves.
    #[error("the router is shutting down")]
    Leaving,
}

/// The guards of one answer.
pub(crate) struct Guards {
    pub(crate) request_id: RequestId,
    pub(crate) endpoint: Endpoint,
    pub(crate) in_flight: InFlight,
    pub(crate) lease: Option<Lease>,
    /// What the prefill engine said of the prompt, if the answer is made from its blocks.
    pub(crate) part: Option<PromptPart>,
    /// The client's name for the model (raw JSON), where it is shown in the place of the engine's.
    pub(crate) model: Option<Bytes>,
    pub(crate) account: Account,
    /// The answer's status.
    pub(crate) status: u16,
    pub(crate) metrics: Arc<Metrics>,
    /// What is measured of it.
    pub(crate) flow: Box<Flow>,
}

impl Guards {
    /// The answer is whole as far as the client is concerned.
    fn served(&mut self) {
        self.was_read();
        self.account.ended(Outcome::of_status(self.status), self.status);
    }

    /// The answer speaks for the engine that gave it; one that says that it is busy says nothing.
    pub(crate) fn engine_served(&self) {
        if self.status < 500 && self.status != 429 {
            self.in_flight.peer.succeeded();
        }
    }

    /// The decode engine has shown that it has the blocks.
    pub(crate) fn was_read(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.read();
        }
    }

    /// The answer cannot be completed: the blocks may be unread, and the engine is to blame.
    fn broke(&mut self) {
        self.lease = None;
        self.account.ended(Outcome::EngineError, self.status);
    }
}

/// When an answer that has begun is given up.
pub(crate) struct Bounds {
    /// The longest silence.
    pub(crate) idle: Duration,
    /// When it must be over.
    pub(crate) ends: Instant,
    /// The router leaves.
    pub(crate) cut: CancellationToken,
}

/// A response body on its way to the client.
pub struct RelayBody(Kind);

enum Kind {
    /// Held whole.
    Whole { body: Spliced, account: Account, status: u16 },
    /// Passed on chunk by chunk. Boxed: it is large, and most of the time one of a few thousand.
    Live(Box<Live>),
    /// Nothing more will come.
    Ended,
}

struct Live {
    body: EngineBody,
    guards: Guards,
    events: Option<Events>,
    /// The engine said so itself.
    failed: bool,
    idle: Duration,
    ends: Instant,
    silence: Pin<Box<Sleep>>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl RelayBody {
    /// An answer that is already complete.
    pub(crate) fn whole(body: Spliced, account: Account, status: u16) -> Self {
        if body.is_empty() {
            account.ended(Outcome::of_status(status), status);
        }
        Self(Kind::Whole { body, account, status })
    }

    /// An answer passed on as it comes, `events` if it is a stream of them.
    pub(crate) fn live(body: EngineBody, guards: Guards, events: Option<Events>, bounds: Bounds) -> Self {
        let Bounds { idle, ends, cut } = bounds;
        let silence = Box::pin(tokio::time::sleep_until(ends.min(Instant::now() + idle)));
        let cut = Box::pin(cut.cancelled_owned());
        let live = Live { body, guards, events, failed: false, idle, ends, silence, cut };
        Self(Kind::Live(Box::new(live)))
    }
}

impl Drop for RelayBody {
    fn drop(&mut self) {
        let Kind::Live(live) = &mut self.0 else { return };
        if let Some(lease) = live.guards.lease.take_if(|lease| lease.is_followed())
            && let Kind::Live(live) = std::mem::replace(&mut self.0, Kind::Ended)
        {
            let Live { body, guards, events, .. } = *live;
            let peer = Arc::clone(&guards.in_flight.peer);
            lease.follow(DecodeLeg { peer, shows: Box::pin(Showed::stream(body, events, guards)) });
        }
    }
}

impl Body for RelayBody {
    type Data = Bytes;
    type Error = RelayError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RelayError>>> {
        let live = match &mut self.0 {
            Kind::Whole { body, account, status } => {
                let frame = Pin::new(&mut *body).poll_frame(context).map_err(|never| match never {});
                if let Poll::Ready(Some(Ok(frame))) = &frame {
                    account.sent(frame.data_ref().map_or(0, Bytes::len));
                }
                if body.is_end_stream() {
                    account.ended(Outcome::of_status(*status), *status);
                }
                return frame;
            }
            Kind::Ended => return Poll::Ready(None),
            Kind::Live(live) => live,
        };
        let last = loop {
            let passed = match Pin::new(&mut live.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => live.pass(frame),
                Poll::Ready(Some(Err(error))) => Err(Last::Broken(body_broken(&error))),
                Poll::Ready(None) => Err(Last::End),
                Poll::Pending => match live.poll_bounds(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(last) => Err(last),
                },
            };
            match passed {
                Ok(Some(frame)) => return Poll::Ready(Some(Ok(frame))),
                Ok(None) => {}
                Err(last) => break last,
            }
        };
        let last = live.end(last);
        drop(Self(std::mem::replace(&mut self.0, Kind::Ended)));
        Poll::Ready(last)
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Whole { body, .. } => body.is_end_stream(),
            Kind::Live(_) => false,
            Kind::Ended => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Whole { body, .. } => body.size_hint(),
            // An event stream may end with one event more than the engine sent.
            Kind::Live(live) if live.events.is_none() => live.body.size_hint(),
            Kind::Live(_) => SizeHint::default(),
            Kind::Ended => SizeHint::with_exact(0),
        }
    }
}

/// How an answer passed on as it came ended.
#[derive(Clone, Copy, Debug)]
enum Last {
    End,
    Broken(Broken),
    Cut,
}

impl Live {
    /// What of a frame goes on now.
    fn pass(&mut self, frame: Frame<Bytes>) -> Result<Option<Frame<Bytes>>, Last> {
        let data = match frame.into_data() {
            Ok(data) if data.is_empty() => return Ok(None),
            Ok(data) => data,
            Err(trailers) => return Ok(Some(trailers)),
        };
        let now = Instant::now();
        if now >= self.ends {
            return Err(Last::Broken(Broken::Total));
        }
        self.silence.as_mut().reset(self.ends.min(now + self.idle));
        self.guards.flow.came(now, true);
        self.guards.in_flight.prompt_is_done();
        let mut tokens = false;
        let data = match &mut self.events {
            None => data,
            Some(events) => {
                let (data, sight) = events.take(data).map_err(Last::Broken)?;
                match sight {
                    Sight::Nothing => {}
                    Sight::Token => {
                        tokens = true;
                        self.guards.was_read();
                    }
                    // Under 200 this is how an engine says that it could not load the blocks.
                    Sight::Failure => {
                        self.failed = true;
                        match self.guards.lease.take() {
                            Some(lease) => lease.was_not_read_by(&self.guards.in_flight.peer),
                            None => self.guards.in_flight.peer.blamed(),
                        }
                    }
                }
                data
            }
        };
        self.guards.flow.passed(now, &data, tokens);
        self.guards.account.sent(data.len());
        if self.events.as_ref().is_some_and(Events::is_finished) {
            // Clients may leave at the mark without waiting for the body's end.
            self.guards.account.ended(Outcome::of_status(self.guards.status), self.guards.status);
        }
        Ok((!data.is_empty()).then(|| Frame::data(data)))
    }

    fn poll_bounds(&mut self, context: &mut Context<'_>) -> Poll<Last> {
        if self.silence.as_mut().poll(context).is_ready() {
            let total = Instant::now() >= self.ends;
            return Poll::Ready(Last::Broken(if total { Broken::Total } else { Broken::Idle }));
        }
        self.cut.as_mut().poll(context).map(|()| Last::Cut)
    }

    fn end(&mut self, last: Last) -> Option<Result<Frame<Bytes>, RelayError>> {
        let finished = self.events.as_ref().is_some_and(Events::is_finished);
        if !self.failed && (finished || matches!(last, Last::End)) {
            self.guards.engine_served();
        }
        match last {
            Last::End => match self.events.as_mut().map(Events::rest) {
                Some(Err(broken)) => self.broke(broken),
                Some(Ok(rest)) if !rest.is_empty() => {
                    self.guards.served();
                    Some(Ok(Frame::data(rest)))
                }
                Some(Ok(_)) | None => {
                    self.guards.served();
                    None
                }
            },
            // The client has its whole answer; only the connection ended badly.
            Last::Broken(_) | Last::Cut if finished => {
                self.guards.served();
                None
            }
            Last::Broken(broken) => self.broke(broken),
            Last::Cut => {
                self.guards.flow.failed("cut");
                self.guards.account.ended(Outcome::Cut, self.guards.status);
                self.guards.metrics.stream_cut();
                Some(match self.events {
                    Some(_) => Ok(Frame::data(leaving_event(self.guards.endpoint))),
                    None => Err(RelayError::Leaving),
                })
            }
        }
    }

    fn broke(&mut self, broken: Broken) -> Option<Result<Frame<Bytes>, RelayError>> {
        let failure = UpstreamFailure::new(Stage::Decode, broken, Progress::Answering);
        self.guards.metrics.upstream_failed(failure);
        self.guards.metrics.stream_broken();
        self.guards.flow.failed(broken.label());
        if broken.blames_the_engine() {
            self.guards.in_flight.peer.failed(broken.label(), false);
            self.guards.in_flight.peer.blamed();
        }
        self.guards.broke();
        tracing::warn!(
            request_id = self.guards.request_id.as_str(),
            peer = %self.guards.in_flight.peer.id,
            kind = broken.label(),
            "a decode engine broke off an answer"
        );
        Some(match self.events {
            Some(_) => Ok(Frame::data(broken_event(self.guards.endpoint, broken))),
            None => Err(RelayError::Broken(failure)),
        })
    }
}

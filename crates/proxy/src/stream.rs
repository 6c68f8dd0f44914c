//! The body that goes back to the client: the engine's chunks as they come, polled through without
//! a task, with the guards that must live as long as the answer and a clear end when it breaks.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use memchr::memmem;
use tokio::time::{Instant, Sleep};

use crate::error::{Broken, Progress, Stage, UpstreamFailure};
use crate::lease::Lease;
use crate::metrics::{Metrics, Outcome};
use crate::pool::peer::InFlight;
use crate::request::Endpoint;
use crate::request_id::RequestId;
use crate::splice::Spliced;
use crate::upstream::body_broken;

/// What the client sees when an answer cannot be completed and is no event stream: the connection
/// ends without the body's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the answer broke off: {0}")]
pub struct RelayError(pub UpstreamFailure);

/// Counts one request when it ends; dropped without an outcome, the client has left.
pub(crate) struct Tally {
    metrics: Arc<Metrics>,
    endpoint: Endpoint,
    outcome: Outcome,
}

impl Tally {
    pub(crate) fn new(metrics: Arc<Metrics>, endpoint: Endpoint) -> Self {
        Self { metrics, endpoint, outcome: Outcome::Abandoned }
    }

    /// How the request ended; counted when the tally is dropped.
    pub(crate) fn ended(mut self, outcome: Outcome) -> Self {
        self.outcome = outcome;
        self
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.metrics.request_ended(self.endpoint, self.outcome);
    }
}

/// The guards of one answer.
pub(crate) struct Guards {
    pub(crate) request_id: RequestId,
    pub(crate) in_flight: InFlight,
    pub(crate) lease: Option<Lease>,
    pub(crate) tally: Option<Tally>,
    pub(crate) metrics: Arc<Metrics>,
    /// When the prefill answer came, until the first byte of this one.
    pub(crate) handed_over: Option<Instant>,
}

impl Guards {
    /// The answer is whole as far as the client is concerned.
    fn served(&mut self) {
        self.was_read();
        self.tally = self.tally.take().map(|tally| tally.ended(Outcome::Served));
    }

    /// The decode engine has shown that it has the blocks.
    pub(crate) fn was_read(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.read();
        }
    }

    /// The answer cannot be completed: the blocks may be unread, and the engine is to blame.
    pub(crate) fn broke(&mut self) {
        self.lease = None;
        self.tally = self.tally.take().map(|tally| tally.ended(Outcome::EngineError));
    }
}

/// A response body on its way to the client.
pub struct RelayBody(Kind);

enum Kind {
    /// Held whole; the guards end with it.
    Whole { body: Spliced, _tally: Option<Tally> },
    /// Passed on chunk by chunk. Boxed: it is large, and most of the time one of a few thousand.
    Live(Box<Live>),
    /// Nothing more will come.
    Ended,
}

struct Live {
    body: Incoming,
    guards: Guards,
    events: Option<Events>,
    idle: Duration,
    silence: Pin<Box<Sleep>>,
}

/// What was seen of an event stream.
struct Events {
    /// Events that may come before the first token, so before the blocks were read.
    before_token: usize,
    /// The beginning of an event whose end has not come.
    begun: Vec<u8>,
    tail: [u8; DONE.len()],
}

/// What an event stream says of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sight {
    Nothing,
    Token,
    Failure,
}

const DONE: &[u8; 14] = b"data: [DONE]\n\n";
const ERROR_EVENT: &[u8] = b"data: {\"error\"";
/// An event longer than this holds a token.
const LONGEST_BEGINNING: usize = 16 << 10;

impl RelayBody {
    /// An answer that is already complete.
    pub(crate) fn whole(body: Spliced, tally: Option<Tally>) -> Self {
        Self(Kind::Whole { body, _tally: tally })
    }

    /// An answer passed on as it comes. `events` for an event stream of that endpoint.
    pub(crate) fn live(body: Incoming, guards: Guards, events: Option<Endpoint>, idle: Duration) -> Self {
        let events = events.map(|endpoint| Events {
            before_token: match endpoint {
                Endpoint::Completions => 0,
                // Chat streams begin with an event that only names the role.
                Endpoint::ChatCompletions => 1,
            },
            begun: Vec::new(),
            tail: [0; DONE.len()],
        });
        let silence = Box::pin(tokio::time::sleep(idle));
        Self(Kind::Live(Box::new(Live { body, guards, events, idle, silence })))
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
            Kind::Whole { body, .. } => {
                return Pin::new(body).poll_frame(context).map_err(|never| match never {});
            }
            Kind::Ended => return Poll::Ready(None),
            Kind::Live(live) => live,
        };
        let broken = match Pin::new(&mut live.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                live.saw(&frame);
                return Poll::Ready(Some(Ok(frame)));
            }
            Poll::Ready(None) => {
                live.guards.served();
                self.0 = Kind::Ended;
                return Poll::Ready(None);
            }
            Poll::Ready(Some(Err(error))) => body_broken(&error),
            Poll::Pending => match live.silence.as_mut().poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(()) => Broken::Timeout,
            },
        };
        let last = live.broke(broken);
        self.0 = Kind::Ended;
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

impl Live {
    fn saw(&mut self, frame: &Frame<Bytes>) {
        let Some(data) = frame.data_ref().filter(|data| !data.is_empty()) else { return };
        self.silence.as_mut().reset(Instant::now() + self.idle);
        if let Some(since) = self.guards.handed_over.take() {
            self.guards.metrics.hand_over_took(since.elapsed().as_secs_f64());
        }
        let Some(events) = &mut self.events else { return };
        events.remember(data);
        if self.guards.lease.is_none() {
            return;
        }
        match events.look(data) {
            Sight::Nothing => {}
            Sight::Token => self.guards.was_read(),
            // Under 200 this is how an engine says that it could not load the blocks.
            Sight::Failure => self.guards.lease = None,
        }
    }

    fn broke(&mut self, broken: Broken) -> Option<Result<Frame<Bytes>, RelayError>> {
        if self.events.as_ref().is_some_and(Events::is_done) {
            // The client has its whole answer; only the connection ended badly.
            self.guards.served();
            return None;
        }
        let failure = UpstreamFailure::new(Stage::Decode, broken, Progress::Answering);
        self.guards.metrics.upstream_failed(failure);
        self.guards.metrics.stream_broken();
        self.guards.in_flight.peer.failed(broken.label(), false);
        self.guards.broke();
        tracing::warn!(
            request_id = self.guards.request_id.as_str(),
            peer = %self.guards.in_flight.peer.id,
            kind = broken.label(),
            "a decode engine broke off an answer"
        );
        Some(match self.events {
            Some(_) => Ok(Frame::data(error_event(broken))),
            None => Err(RelayError(failure)),
        })
    }
}

impl Events {
    fn remember(&mut self, data: &[u8]) {
        if data.len() >= self.tail.len() {
            self.tail.copy_from_slice(&data[data.len() - DONE.len()..]);
        } else {
            self.tail.rotate_left(data.len());
            let from = self.tail.len() - data.len();
            self.tail[from..].copy_from_slice(data);
        }
    }

    /// Looks at the stream's next piece; called until it has said something.
    fn look(&mut self, data: &[u8]) -> Sight {
        self.begun.extend_from_slice(data);
        let mut rest = self.begun.as_slice();
        let mut sight = Sight::Nothing;
        while let Some(end) = memmem::find(rest, b"\n\n") {
            let event = &rest[..end];
            rest = &rest[end + 2..];
            if event.starts_with(ERROR_EVENT) {
                sight = Sight::Failure;
                break;
            }
            if !event.starts_with(b"data: ") {
                continue;
            }
            if self.before_token == 0 {
                sight = Sight::Token;
                break;
            }
            self.before_token -= 1;
        }
        if sight == Sight::Nothing && rest.len() > LONGEST_BEGINNING {
            sight = Sight::Token;
        }
        self.begun = if sight == Sight::Nothing { rest.to_vec() } else { Vec::new() };
        sight
    }

    fn is_done(&self) -> bool {
        self.tail == *DONE
    }
}

/// The last event of a broken stream. The blank line first: the engine may have died inside an
/// event, and what it left of it must not swallow this one.
fn error_event(broken: Broken) -> Bytes {
    let message = match broken {
        Broken::Timeout => "The decode engine stopped sending.",
        Broken::Connect | Broken::Reset | Broken::Protocol | Broken::TooLarge => {
            "The decode engine broke off the answer."
        }
    };
    Bytes::from(format!(
        "\n\ndata: {{\"error\":{{\"message\":\"{message}\",\"type\":\"upstream_error\",\"param\":null,\"code\":\"upstream_{}\"}}}}\n\n",
        broken.label()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_mark_is_known_across_chunks() {
        let mut events = Events { before_token: 0, begun: Vec::new(), tail: [0; 14] };
        for chunk in [&b"data: {}\n\nda"[..], b"ta: [DO", b"NE]\n", b"\n"] {
            assert!(!events.is_done());
            events.remember(chunk);
        }
        assert!(events.is_done());
        events.remember(b"x");
        assert!(!events.is_done());
    }

    #[test]
    fn only_a_token_shows_that_the_blocks_were_read() {
        let look = |before_token, pieces: &[&[u8]]| {
            let mut events = Events { before_token, begun: Vec::new(), tail: [0; 14] };
            pieces.iter().map(|piece| events.look(piece)).collect::<Vec<_>>()
        };
        let (nothing, token, failure) = (Sight::Nothing, Sight::Token, Sight::Failure);
        assert_eq!(look(0, &[b"data: {\"id\":1}\n\n"]), [token]);
        assert_eq!(look(1, &[b"data: {\"id\":1}\n\n", b"data: {}\n\n"]), [nothing, token]);
        assert_eq!(look(1, &[b"data: {\"id\":1}\n\ndata: {}\n\n"]), [token]);
        assert_eq!(look(0, &[b"data: ", b"{\"error\": {}}\n", b"\n"]), [nothing, nothing, failure]);
        assert_eq!(look(1, &[b"data: {}\n\nda", b"ta: {\"error\":{}}\n\n"]), [nothing, failure]);
        assert_eq!(look(0, &[b": keep-alive\n\n", b"data: {}\n\n"]), [nothing, token]);
        assert_eq!(look(0, &[&[b'x'; LONGEST_BEGINNING + 1]]), [token]);
    }

    #[test]
    fn the_error_event_is_one_event_of_json() {
        let event = error_event(Broken::Reset);
        let text = std::str::from_utf8(&event).unwrap();
        let json = text.strip_prefix("\n\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(value["error"]["type"], "upstream_error");
        assert_eq!(value["error"]["code"], "upstream_reset");
    }
}

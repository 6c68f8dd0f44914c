//! Requests as operators see them. What is told of a running request is what is known so far.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokio::time::Instant;

use super::track::{Told, Track};
use super::{Record, Step, Timelines};

/// What is known of a request and does not depend on when one looks.
#[derive(Clone, Debug, Serialize)]
pub struct RequestFacts {
    /// Its id.
    pub request_id: String,
    /// The endpoint, by its name in metrics.
    pub endpoint: &'static str,
    /// `running` or `ended`.
    pub state: &'static str,
    /// How it ended.
    pub outcome: Option<&'static str>,
    /// The status that it was answered with; 499 where the client left before that.
    pub status: Option<u16>,
    /// The model that it names, once its body is read.
    pub model: Option<Box<str>>,
    /// Whether its answer is a stream, once its body is read.
    pub stream: Option<bool>,
    /// Name of the API key that it came with.
    pub key: Option<Arc<str>>,
    /// The prefill peer that it was sent to last.
    pub prefill: Option<Arc<str>>,
    /// The decode peer that it was sent to last.
    pub decode: Option<Arc<str>>,
    /// How often it was sent to an engine.
    pub tries: usize,
    /// Bytes of its body.
    pub request_bytes: Option<usize>,
    /// Bytes of the answer so far.
    pub answer_bytes: u64,
    /// Pieces in which the answer went out so far; of a stream about one for each token.
    pub answer_pieces: u64,
    /// How long it waited for its turn.
    pub queue_seconds: Option<f64>,
    /// How long the last prefill took.
    pub prefill_seconds: Option<f64>,
    /// From the hand-off to the first byte of the decode engine's answer.
    pub hand_off_seconds: Option<f64>,
    /// From its coming to the first byte of its answer.
    pub first_byte_seconds: Option<f64>,
}

/// A request.
#[derive(Clone, Debug, Serialize)]
pub struct RequestView {
    /// What is known of it.
    #[serde(flatten)]
    pub facts: RequestFacts,
    /// When it came, in seconds of Unix time.
    pub began_at: f64,
    /// How long it took, or has taken so far.
    pub seconds: f64,
}

/// A request with all that happened to it, in order.
#[derive(Clone, Debug, Serialize)]
pub struct RequestTimeline {
    /// The request.
    #[serde(flatten)]
    pub request: RequestView,
    /// What happened.
    pub steps: Vec<StepView>,
    /// Steps that found no room.
    pub steps_left_out: u32,
}

/// Something that happened to a request.
#[derive(Clone, Debug, Serialize)]
pub struct StepView {
    /// What, as a code.
    pub step: &'static str,
    /// When, since the request came.
    pub seconds: f64,
    /// The peer that it happened with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<Arc<str>>,
    /// The status of an engine's answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// How many blocks were handed off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
    /// Why, as a code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

/// A request among others, on the router's own clock.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RequestGlance {
    pub(crate) number: u64,
    pub(crate) began_ms: u64,
    pub(crate) ended_ms: Option<u64>,
    #[serde(flatten)]
    pub(crate) facts: RequestFacts,
}

impl Timelines {
    /// At most so many requests, the newest first, only running or only ended ones if asked.
    pub(crate) fn views(&self, limit: usize, running: Option<bool>) -> Vec<RequestView> {
        let all = self.newest_first().into_iter();
        let asked = all.filter(|record| running.is_none_or(|running| record.ended().is_none() == running));
        asked.take(limit).map(|record| record.view(&record.track.lock())).collect()
    }

    /// The newest request of this id.
    pub(crate) fn view(&self, request_id: &str) -> Option<RequestTimeline> {
        let all = self.newest_first();
        let record = all.iter().find(|record| record.request_id.as_str() == request_id)?;
        let track = record.track.lock();
        Some(RequestTimeline {
            request: record.view(&track),
            steps: track.told().map(StepView::of).collect(),
            steps_left_out: track.left_out(),
        })
    }

    /// The newest requests, at most so many.
    pub(crate) fn glances(&self, limit: usize) -> Vec<RequestGlance> {
        let glance = |record: Arc<Record>| RequestGlance {
            number: record.number,
            began_ms: self.millis(record.began),
            ended_ms: record.ended().map(|after| self.millis(record.began + Duration::from_micros(after))),
            facts: record.facts(&record.track.lock()),
        };
        self.newest_first().into_iter().take(limit).map(glance).collect()
    }
}

impl Record {
    fn view(&self, track: &Track) -> RequestView {
        let elapsed = Instant::now().saturating_duration_since(self.began);
        let began = SystemTime::now().checked_sub(elapsed).unwrap_or(UNIX_EPOCH);
        RequestView {
            facts: self.facts(track),
            began_at: began.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            seconds: self.ended().map_or(elapsed, Duration::from_micros).as_secs_f64(),
        }
    }

    fn facts(&self, track: &Track) -> RequestFacts {
        let last = |is: fn(&Step) -> bool| track.told().rev().find(|told| is(&told.step));
        let at = |is: fn(&Step) -> bool| last(is).map(|told| told.at);
        let between = |from: Option<u64>, to: Option<u64>| {
            let micros = to?.checked_sub(from?)?;
            Some(Duration::from_micros(micros).as_secs_f64())
        };
        let sent = last(|step| *step == Step::PrefillSent);
        let decode = last(|step| *step == Step::DecodeSent);
        let is_sent = |told: &Told<'_>| matches!(told.step, Step::PrefillSent | Step::DecodeSent);
        let first_byte = at(|step| *step == Step::FirstByte);
        let ended = self.ended().is_some();
        let about = track.about.as_ref();
        RequestFacts {
            request_id: self.request_id.as_str().to_owned(),
            endpoint: self.endpoint,
            state: if ended { "ended" } else { "running" },
            outcome: ended.then(|| self.outcome().label()),
            status: ended.then(|| self.status()),
            model: about.map(|about| about.model.clone()),
            stream: about.map(|about| about.stream),
            key: about.and_then(|about| about.key.clone()),
            prefill: sent.as_ref().and_then(|told| told.peer.cloned()),
            decode: decode.and_then(|told| told.peer.cloned()),
            tries: track.told().filter(is_sent).count(),
            request_bytes: about.map(|about| about.bytes),
            answer_bytes: self.sent_bytes(),
            answer_pieces: self.pieces.load(std::sync::atomic::Ordering::Relaxed),
            queue_seconds: between(at(|step| *step == Step::Read), at(|step| *step == Step::Admitted)),
            prefill_seconds: between(
                sent.map(|told| told.at),
                at(|step| matches!(step, Step::PrefillAnswered(_))),
            ),
            hand_off_seconds: between(at(|step| matches!(step, Step::HandedOff(_))), first_byte),
            first_byte_seconds: between(Some(0), first_byte),
        }
    }
}

impl StepView {
    fn of(told: Told<'_>) -> Self {
        let (mut status, mut blocks, mut reason) = (None, None, None);
        let step = match told.step {
            Step::Received => "received",
            Step::Read => "read",
            Step::Admitted => "admitted",
            Step::DecodeChosen => "decode_chosen",
            Step::PrefillChosen => "prefill_chosen",
            Step::PrefillSent => "prefill_sent",
            Step::PrefillAnswered(answered) => {
                status = Some(answered);
                "prefill_answered"
            }
            Step::PrefillFailed(why) => {
                reason = Some(why);
                "prefill_failed"
            }
            Step::HandedOff(count) => {
                blocks = Some(u64::from(count));
                "handed_off"
            }
            Step::HandOffRefused(why) => {
                reason = Some(why);
                "hand_off_refused"
            }
            Step::Bypassed(why) => {
                reason = Some(why);
                "bypassed"
            }
            Step::DecodeSent => "decode_sent",
            Step::DecodeHead(answered) => {
                status = Some(answered);
                "decode_head"
            }
            Step::DecodeFailed(why) => {
                reason = Some(why);
                "decode_failed"
            }
            Step::FirstByte => "first_byte",
            Step::FirstToken => "first_token",
            Step::Ended => "ended",
        };
        let seconds = Duration::from_micros(told.at).as_secs_f64();
        Self { step, seconds, peer: told.peer.cloned(), status, blocks, reason }
    }
}

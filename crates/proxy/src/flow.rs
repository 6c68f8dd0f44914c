//! What is measured of one decode leg: its times, its tokens and its spans. It is told of the answer's bytes as
//! they pass and says the rest to the account when it is dropped. Holds none of them.

mod usage;

use std::sync::Arc;

use tokio::time::Instant;

use crate::account::Account;
use crate::metrics::{Batch, Metrics, OfModel, Took};
use crate::pool::peer::Peer;
use crate::routing::PeerKey;
use crate::timeline::Step;
use crate::trace::{Span, SpanKind};
use usage::Usage;

/// Blocks that wait for a decode engine.
pub(crate) struct Waiting {
    /// Since the prefill answer came.
    pub(crate) since: Instant,
    /// Name of the prefill peer that holds them.
    pub(crate) at: Arc<str>,
    /// Its number.
    pub(crate) from: PeerKey,
    /// Their bytes, where that is known.
    pub(crate) bytes: u64,
}

/// One decode leg. Boxed by its owner: it is moved about.
pub(crate) struct Flow {
    peer: Arc<Peer>,
    metrics: Arc<Metrics>,
    model: Arc<OfModel>,
    sent: Instant,
    has_head: bool,
    has_body: bool,
    /// Until the first byte of this answer.
    handed_over: Option<Waiting>,
    hand_off: Span,
    decode: Span,
    stream: Span,
    /// When the last token came.
    last_token: Option<Instant>,
    chunks: u64,
    steps: Batch,
    usage: Usage,
    /// The last field: with the last account the request's own span ends, after these.
    account: Account,
}

impl Flow {
    /// A leg that is being sent now.
    pub(crate) fn begin(
        account: &Account,
        metrics: &Arc<Metrics>,
        model: Arc<OfModel>,
        peer: &Arc<Peer>,
        decode: Span,
        handed_over: Option<Waiting>,
    ) -> Box<Self> {
        account.step_with(peer, Step::DecodeSent);
        let hand_off = match &handed_over {
            Some(blocks) => account.trace().span("hand_off", SpanKind::Internal).since(blocks.since),
            None => Span::default(),
        };
        Box::new(Self {
            account: account.clone(),
            peer: Arc::clone(peer),
            metrics: Arc::clone(metrics),
            model,
            sent: Instant::now(),
            has_head: false,
            has_body: false,
            handed_over,
            hand_off,
            decode,
            stream: Span::default(),
            last_token: None,
            chunks: 0,
            steps: Batch::default(),
            usage: Usage::default(),
        })
    }

    /// The blocks are on their way since a moment that was not known when the leg was sent.
    pub(crate) fn waits_for(&mut self, blocks: Waiting) {
        if !self.has_body {
            self.hand_off = self.account.trace().span("hand_off", SpanKind::Internal).since(blocks.since);
            self.handed_over = Some(blocks);
        }
    }

    /// The answer's head came.
    pub(crate) fn answered(&mut self, status: u16) {
        self.has_head = true;
        self.account.step_with(&self.peer, Step::DecodeHead(status));
        self.metrics.took(Took::DecodeHead, self.sent.elapsed(), self.account.example());
        self.decode.say("http.response.status_code", || status);
    }

    /// The leg broke, in one word.
    pub(crate) fn failed(&mut self, kind: &'static str) {
        self.account.step_with(&self.peer, Step::DecodeFailed(kind));
        self.stream.failed(kind);
        self.decode.failed(kind);
        self.hand_off.failed(kind);
    }

    /// Bytes of the body came, the first of a stream or all of another answer; only the first ones are news.
    pub(crate) fn came(&mut self, now: Instant, streams: bool) {
        if std::mem::replace(&mut self.has_body, true) {
            return;
        }
        self.account.step_with(&self.peer, Step::FirstByte);
        if let Some(blocks) = self.handed_over.take() {
            let took = now.saturating_duration_since(blocks.since);
            // A whole answer has the time in it that its tokens took.
            self.peer.traffic.record(&blocks.at, streams.then_some(took));
            if streams && blocks.bytes > 0 {
                self.peer.routing.moved(blocks.from, blocks.bytes, took, now);
            }
            self.metrics.took(Took::HandOver, took, self.account.example());
            self.account.tell(|told| told.handed_over = Some(took));
            self.hand_off = Span::default();
        }
    }

    /// The answer is a stream of events.
    pub(crate) fn streams(&mut self) {
        self.account.tell(|told| told.is_stream = true);
        self.stream = self.decode.child("stream");
    }

    /// A chunk of a stream goes on, which holds tokens or not.
    pub(crate) fn passed(&mut self, now: Instant, chunk: &[u8], tokens: bool) {
        self.usage.look_in(chunk);
        if !tokens {
            return;
        }
        self.chunks += 1;
        match self.last_token.replace(now) {
            Some(before) => {
                self.steps.step(now.saturating_duration_since(before), &self.model.inter_token);
            }
            None => {
                self.account.step(Step::FirstToken);
                let took = now.saturating_duration_since(self.account.began());
                self.model.first_token_took(took, self.account.example());
                self.account.tell(|told| told.first_token = Some(took));
                self.stream.say("kvbaton.first_token_seconds", || took.as_secs_f64());
            }
        }
    }

    /// An answer that was held whole.
    pub(crate) fn whole(&mut self, answer: &[u8]) {
        self.came(Instant::now(), false);
        self.usage.look_in(answer);
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        if self.has_head {
            self.metrics.took(Took::Decode, self.sent.elapsed(), self.account.example());
        }
        self.steps.give(&self.model.inter_token);
        let counted = (self.chunks > 0).then_some(self.chunks);
        let usage = &self.usage;
        self.account.tell(|told| {
            told.output_tokens = usage.output.or(counted).or(told.output_tokens);
            told.prompt_tokens = told.prompt_tokens.or(usage.prompt);
        });
        if let Some(output) = usage.output {
            self.decode.say("gen_ai.usage.output_tokens", || output);
        }
    }
}

//! What is measured of one decode leg: its times, its tokens and its spans. It is told of the answer's bytes as
//! they pass and says the rest to the account when it is dropped. Holds none of them.

mod usage;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::account::Account;
use crate::metrics::{Batch, Metrics, OfModel, Took};
use crate::trace::Span;
use usage::Usage;

/// One decode leg. Boxed by its owner: it is moved about.
pub(crate) struct Flow {
    metrics: Arc<Metrics>,
    model: Arc<OfModel>,
    sent: Instant,
    has_head: bool,
    /// When the prefill answer came, until the first byte of this one.
    handed_over: Option<Instant>,
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
    /// A leg that is being sent now, `handed_over` since when its blocks wait.
    pub(crate) fn begin(
        account: &Account,
        metrics: &Arc<Metrics>,
        model: Arc<OfModel>,
        decode: Span,
        handed_over: Option<Instant>,
    ) -> Box<Self> {
        let hand_off = match handed_over {
            Some(since) => account.trace().span("hand_off", crate::trace::SpanKind::Internal).since(since),
            None => Span::default(),
        };
        Box::new(Self {
            metrics: Arc::clone(metrics),
            model,
            sent: Instant::now(),
            has_head: false,
            handed_over,
            hand_off,
            decode,
            stream: Span::default(),
            last_token: None,
            chunks: 0,
            steps: Batch::default(),
            usage: Usage::default(),
            account: account.clone(),
        })
    }

    /// The answer's head came.
    pub(crate) fn answered(&mut self, status: u16) {
        self.has_head = true;
        self.metrics.took(Took::DecodeHead, self.sent.elapsed(), self.account.example());
        self.decode.say("http.response.status_code", || status);
    }

    /// The leg broke, in one word.
    pub(crate) fn failed(&mut self, kind: &'static str) {
        self.stream.failed(kind);
        self.decode.failed(kind);
        self.hand_off.failed(kind);
    }

    /// The body's first bytes came; how long after the prefill answer, if there was one.
    pub(crate) fn came(&mut self) -> Option<Duration> {
        let took = self.handed_over.take()?.elapsed();
        self.metrics.took(Took::HandOver, took, self.account.example());
        self.account.tell(|told| told.handed_over = Some(took));
        self.hand_off = Span::default();
        Some(took)
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
                let took = now.saturating_duration_since(self.account.began());
                self.model.first_token_took(took, self.account.example());
                self.account.tell(|told| told.first_token = Some(took));
                self.stream.say("kvbaton.first_token_seconds", || took.as_secs_f64());
            }
        }
    }

    /// An answer that was held whole.
    pub(crate) fn whole(&mut self, answer: &[u8]) {
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

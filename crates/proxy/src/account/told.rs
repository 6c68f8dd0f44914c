//! What the parts of the core say of one request, and the one line that it makes in the log.
//! Sizes, names and times only: never a prompt, a token or an address.

use std::sync::Arc;
use std::time::Duration;

use crate::metrics::OfModel;
use crate::pool::peer::Peer;
use crate::trace::Span;

/// The target of the line, by which a filter can tell it from others.
pub(super) const TARGET: &str = "kvbaton::access";

/// Said of a request so far.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// The model, by its name only if the fleet knows it: a client may write anything there.
    pub(crate) of_model: Option<Arc<OfModel>>,
    /// Whose API key it came with.
    pub(crate) key: Option<Arc<str>>,
    pub(crate) is_stream: bool,
    /// Bytes of the body.
    pub(crate) received: usize,
    pub(crate) prefill: Option<Arc<Peer>>,
    pub(crate) decode: Option<Arc<Peer>>,
    pub(crate) retries: u32,
    pub(crate) waited: Option<Duration>,
    pub(crate) prefilled: Option<Duration>,
    pub(crate) handed_over: Option<Duration>,
    pub(crate) first_token: Option<Duration>,
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) cached_tokens: Option<u64>,
    pub(crate) output_tokens: Option<u64>,
}

/// What the account itself knows.
pub(super) struct Line<'a> {
    pub(super) request_id: &'a str,
    pub(super) trace_id: Option<u128>,
    pub(super) endpoint: &'static str,
    pub(super) status: u16,
    pub(super) outcome: &'static str,
    pub(super) sent: u64,
    pub(super) took: Duration,
}

/// The name of a request's outermost span: method and path, and none of what a path may hold.
pub(super) fn root_name(endpoint: &'static str) -> &'static str {
    match endpoint {
        "completions" => "POST /v1/completions",
        "chat_completions" => "POST /v1/chat/completions",
        "responses" => "POST /v1/responses",
        "messages" => "POST /v1/messages",
        other => other,
    }
}

/// The name that OpenTelemetry has for what an endpoint does.
pub(crate) fn operation(endpoint: &'static str) -> Option<&'static str> {
    match endpoint {
        "completions" => Some("text_completion"),
        "chat_completions" | "responses" | "messages" => Some("chat"),
        _ => None,
    }
}

fn seconds(duration: Option<Duration>) -> Option<f64> {
    duration.map(|duration| duration.as_secs_f64())
}

impl Told {
    /// What the conventions for generative models have names for.
    pub(super) fn describe(&self, root: &mut Span, endpoint: &'static str) {
        if let Some(operation) = operation(endpoint) {
            root.say("gen_ai.operation.name", || operation);
            root.say("gen_ai.provider.name", || "vllm");
        }
        if let Some(model) = &self.of_model {
            root.say("gen_ai.request.model", || model.name());
        }
        let counts = [
            ("gen_ai.usage.input_tokens", self.prompt_tokens),
            ("gen_ai.usage.cache_read.input_tokens", self.cached_tokens),
            ("gen_ai.usage.output_tokens", self.output_tokens),
        ];
        for (name, count) in counts {
            if let Some(count) = count {
                root.say(name, || count);
            }
        }
        let peers = [("kvbaton.prefill", &self.prefill), ("kvbaton.decode", &self.decode)];
        for (name, peer) in peers {
            if let Some(peer) = peer {
                root.say(name, || peer.id.clone());
            }
        }
        root.say("kvbaton.stream", || self.is_stream);
        root.say("kvbaton.retries", || self.retries);
    }

    pub(super) fn log(&self, line: &Line<'_>) {
        // No span's fields beside it: a request ends inside of one or outside.
        tracing::info!(
            target: TARGET,
            parent: None,
            request_id = line.request_id,
            trace_id = line.trace_id.map(|id| tracing::field::display(format!("{id:032x}"))),
            endpoint = line.endpoint,
            model = self.of_model.as_ref().map(|model| model.name()),
            key = self.key.as_deref(),
            stream = self.is_stream,
            status = line.status,
            outcome = line.outcome,
            prefill = self.prefill.as_ref().map(|peer| peer.id.as_str()),
            decode = self.decode.as_ref().map(|peer| peer.id.as_str()),
            retries = self.retries,
            received_bytes = self.received,
            sent_bytes = line.sent,
            prompt_tokens = self.prompt_tokens,
            cached_tokens = self.cached_tokens,
            output_tokens = self.output_tokens,
            queue_seconds = seconds(self.waited),
            prefill_seconds = seconds(self.prefilled),
            hand_over_seconds = seconds(self.handed_over),
            first_token_seconds = seconds(self.first_token),
            seconds = line.took.as_secs_f64(),
            "request ended"
        );
    }
}

//! The two generation endpoints: from the bytes of a request to its answer.
//!
//! One path for completions and chat; a client that goes away drops everything here, and the
//! closed output channels tell the core.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use kv_connector::protocol::KvTransferParams;
use serde_json::{Map, Value};
use tokio::sync::mpsc;

use super::answer::Envelope;
use super::reject::{Rejection, json_response};
use super::request::{self, Endpoint, GenerationRequest};
use super::sequence::{Sequence, SequenceRules};
use crate::core::request::{Command, NewRequest, Output, Sampling};
use crate::faults::{Leg, Plan, Stage};
use crate::kv::mix;
use crate::shared::Shared;

/// A generation request that has been read from the wire.
pub(crate) struct Incoming {
    pub(crate) endpoint: Endpoint,
    pub(crate) body: Bytes,
    pub(crate) request_id: Option<String>,
    pub(crate) is_json: bool,
}

/// Tells the engine that the receivers of a request are gone.
struct WakeOnDrop(Arc<Shared>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.wake.notify_one();
    }
}

/// Releases a hand-off that was refused before the engine had it, unless the answer went well.
struct HandoffCleanup {
    shared: Arc<Shared>,
    params: Option<Box<KvTransferParams>>,
}

impl HandoffCleanup {
    fn new(shared: &Arc<Shared>, transfer: &Transfer) -> Self {
        let params = match transfer {
            Transfer::Params(params) if params.do_remote_prefill && shared.config.is_v14() => {
                Some(params.clone())
            }
            _ => None,
        };
        Self { shared: Arc::clone(shared), params }
    }

    fn disarm(&mut self) {
        self.params = None;
    }
}

impl Drop for HandoffCleanup {
    fn drop(&mut self) {
        let Some(params) = self.params.take() else { return };
        let id = format!("rejected-{}", random_hex(16));
        // A full queue means that the lease has to end it, as when the notice is lost.
        let _ = self.shared.commands.try_send(Command::PreAborted { id, params });
        self.shared.wake.notify_one();
    }
}

/// What `kv_transfer_params` amounts to.
enum Transfer {
    None,
    Params(Box<KvTransferParams>),
    /// An object on whose values the engine core breaks.
    Unusable,
}

impl Transfer {
    fn of(map: Option<&Map<String, Value>>) -> Self {
        let Some(map) = map.filter(|map| !map.is_empty()) else { return Self::None };
        let mut map = map.clone();
        for flag in ["do_remote_prefill", "do_remote_decode"] {
            if let Some(value) = map.get_mut(flag) {
                *value = Value::Bool(truthy(value));
            }
        }
        let fetches = map.get("do_remote_prefill") == Some(&Value::Bool(true));
        match serde_json::from_value(Value::Object(map.clone())) {
            Ok(params) => Self::Params(Box::new(params)),
            Err(_) if fetches => Self::Unusable,
            Err(_) => {
                let do_remote_decode = map.get("do_remote_decode") == Some(&Value::Bool(true));
                Self::Params(Box::new(KvTransferParams { do_remote_decode, ..KvTransferParams::default() }))
            }
        }
    }

    fn leg(&self) -> Leg {
        match self {
            Self::Params(params) if params.do_remote_prefill => Leg::Decode,
            Self::Params(params) if params.do_remote_decode => Leg::Prefill,
            Self::Unusable => Leg::Decode,
            Self::None | Self::Params(_) => Leg::Plain,
        }
    }
}

fn truthy(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(flag) => *flag,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

/// Which leg a body belongs to, for faults that act before it is parsed.
pub(crate) fn leg_of(body: &[u8]) -> Leg {
    let value: Option<Value> = serde_json::from_slice(body).ok();
    let params = value.as_ref().and_then(|value| value.get("kv_transfer_params")).and_then(Value::as_object);
    Transfer::of(params).leg()
}

/// Answers one generation request.
pub(crate) async fn generate(shared: Arc<Shared>, incoming: Incoming, plan: Plan) -> Response {
    let endpoint = incoming.endpoint;
    match run(&shared, incoming, plan).await {
        Ok(response) => response,
        Err(rejection) if endpoint == Endpoint::Messages => rejection.message_response(),
        Err(rejection) => rejection.response(),
    }
}

async fn run(shared: &Arc<Shared>, incoming: Incoming, plan: Plan) -> Result<Response, Rejection> {
    if !incoming.is_json {
        return Err(Rejection::unsupported_media_type());
    }
    let request = request::parse(incoming.endpoint, &incoming.body)?;
    let transfer = Transfer::of(request.kv_transfer_params.as_ref());
    count_leg(shared, &transfer);
    let mut cleanup = HandoffCleanup::new(shared, &transfer);
    if shared.is_dead() {
        cleanup.disarm();
        return Err(Rejection::dead());
    }
    // A real engine registers before it listens: nobody could read from one that has not.
    if transfer.leg() == Leg::Prefill && !shared.known.load(Ordering::Relaxed) {
        return Err(Rejection::starting());
    }
    let samplings = request.check(&shared.config)?;
    // The prompt's tokens are not computed here, so that there is nothing to say of them: engines were seen to
    // crash on this (vllm#27449), or to leave it out. Nobody may rely on either.
    let pulls = transfer.leg() == Leg::Decode;
    let transfer = if pulls && request.reads_prompt_logprobs() { Transfer::Unusable } else { transfer };
    let base_id = match request.endpoint {
        // This one does not look at the header.
        Endpoint::Responses => request.request_id.clone(),
        _ => incoming.request_id.or_else(|| request.request_id.clone()),
    };
    let base_id = base_id.unwrap_or_else(|| random_hex(8));
    let job = submit(shared, request, &samplings, &transfer, &base_id, &plan).await?;
    if job.request.stream {
        cleanup.disarm();
        hold_or_stall(shared, Stage::BeforeHead, &plan).await;
        return Ok(stream(job, plan));
    }
    let response = whole(job, &plan).await?;
    cleanup.disarm();
    Ok(response)
}

fn count_leg(shared: &Shared, transfer: &Transfer) {
    let counter = match transfer.leg() {
        Leg::Prefill => &shared.prefill_requests,
        Leg::Decode => &shared.decode_requests,
        Leg::Plain | Leg::Any => &shared.plain_requests,
    };
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A request that the core has, with all its choices.
pub(super) struct Job {
    shared: Arc<Shared>,
    pub(super) request: GenerationRequest,
    id: String,
    created: u64,
    pub(super) sequences: Vec<Sequence>,
    outputs: Vec<Option<mpsc::Receiver<Output>>>,
    next: usize,
    _wake: WakeOnDrop,
}

async fn submit(
    shared: &Arc<Shared>,
    request: GenerationRequest,
    samplings: &[Sampling],
    transfer: &Transfer,
    base_id: &str,
    plan: &Plan,
) -> Result<Job, Rejection> {
    let params = match transfer {
        Transfer::None => None,
        Transfer::Params(params) => Some((**params).clone()),
        Transfer::Unusable => {
            let _ = shared.commands.send(Command::Poison).await;
            None
        }
    };
    let id = match request.endpoint {
        Endpoint::Completions => format!("cmpl-{base_id}"),
        Endpoint::Chat | Endpoint::Messages => format!("chatcmpl-{base_id}"),
        Endpoint::Responses => format!("resp_{base_id}"),
    };
    let per_prompt = usize::try_from(request.n).unwrap_or(1).max(1);
    let rules = SequenceRules {
        stop: request.stop.clone(),
        include_stop: request.include_stop,
        min_tokens: usize::try_from(request.min_tokens).unwrap_or(0),
    };
    let mut outputs = Vec::new();
    let mut sequences = Vec::new();
    for (index, (prompt, sampling)) in request.prompts.iter().zip(samplings).enumerate() {
        let external = match request.endpoint {
            Endpoint::Completions => format!("{id}-{index}"),
            _ => id.clone(),
        };
        let internal = internal_id(shared, &external);
        for child in 0..per_prompt {
            let mut sampling = sampling.clone();
            sampling.max_tokens += plan.extra_tokens;
            if child > 0 {
                sampling.noise = mix(sampling.noise.wrapping_add(child as u64));
            }
            let (sender, receiver) = mpsc::channel(sampling.max_tokens + 2);
            let new = NewRequest {
                id: if per_prompt > 1 { format!("{child}_{internal}") } else { internal.clone() },
                prompt: prompt.tokens.clone(),
                sampling,
                params: params.clone(),
                corrupt: plan.corrupt,
                outputs: sender,
            };
            shared.commands.send(Command::Submit(Box::new(new))).await.map_err(|_| Rejection::dead())?;
            outputs.push(Some(receiver));
            sequences.push(Sequence::new(rules.clone()));
        }
    }
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let wake = WakeOnDrop(Arc::clone(shared));
    Ok(Job { shared: Arc::clone(shared), request, id, created, sequences, outputs, next: 0, _wake: wake })
}

/// v14 makes ids unique with a random suffix; v2 uses the external id as it is.
fn internal_id(shared: &Shared, external: &str) -> String {
    if shared.config.is_v14() { format!("{external}-{}", random_hex(4)) } else { external.to_owned() }
}

/// Random lowercase hex digits from `bytes` random bytes.
pub(crate) fn random_hex(bytes: usize) -> String {
    (0..bytes).map(|_| format!("{:02x}", rand::random::<u8>())).collect()
}

impl Job {
    pub(super) fn envelope(&self) -> Envelope<'_> {
        Envelope { shared: &self.shared, request: &self.request, id: &self.id, created: self.created }
    }

    /// The next output of any choice, in turn; `None` when every choice has ended.
    pub(super) async fn next_output(&mut self) -> Option<(usize, Output)> {
        poll_fn(|cx| {
            let count = self.outputs.len();
            let mut open = false;
            for step in 0..count {
                let index = (self.next + step) % count;
                let Some(receiver) = &mut self.outputs[index] else { continue };
                open = true;
                match receiver.poll_recv(cx) {
                    Poll::Ready(Some(output)) => {
                        self.next = index + 1;
                        return Poll::Ready(Some((index, output)));
                    }
                    // The core ends a request before it drops the channel, so this is its own end.
                    Poll::Ready(None) => return Poll::Ready(Some((index, Output::Dead))),
                    Poll::Pending => {}
                }
            }
            if open { Poll::Pending } else { Poll::Ready(None) }
        })
        .await
    }

    /// Takes an output in: the index and the text to show, or what ended everything.
    pub(super) fn take(&mut self, index: usize, output: Output) -> Result<String, Rejection> {
        match output {
            Output::Token(generated) => {
                let piece = self.sequences[index].push(*generated);
                if self.sequences[index].ending.is_some() {
                    // A stop string may have ended it before the core did: closing aborts it there.
                    self.outputs[index] = None;
                    self.shared.wake.notify_one();
                }
                Ok(piece)
            }
            Output::LoadFailed => Err(Rejection::internal()),
            Output::Duplicate => {
                Err(Rejection::bad_value(format!("Request id {} already running.", self.id), None))
            }
            Output::Dead => Err(Rejection::dead()),
        }
    }

    /// Of several hand-offs only one is answered: prompt 0's, from its last sequence.
    pub(super) fn handoff(&self, plan: &Plan) -> Value {
        if let Some(params) = &plan.handoff {
            return params.clone();
        }
        if plan.drop_handoff {
            return Value::Null;
        }
        let per_prompt = usize::try_from(self.request.n).unwrap_or(1).max(1);
        let params = self.sequences.get(per_prompt - 1).and_then(|sequence| sequence.params.as_ref());
        params.and_then(|params| serde_json::to_value(params).ok()).unwrap_or(Value::Null)
    }
}

async fn hold_or_stall(shared: &Shared, stage: Stage, plan: &Plan) {
    shared.faults.pass(stage, plan.leg).await;
    if plan.stall == Some(stage) {
        std::future::pending::<()>().await;
    }
}

async fn whole(mut job: Job, plan: &Plan) -> Result<Response, Rejection> {
    while let Some((index, output)) = job.next_output().await {
        job.take(index, output)?;
    }
    hold_or_stall(&job.shared, Stage::BeforeHead, plan).await;
    let body = job.envelope().whole(&job.sequences, &job.handoff(plan));
    Ok(json_response(StatusCode::OK, body.to_string()))
}

pub(super) struct EventStream {
    pub(super) job: Job,
    pub(super) plan: Plan,
    pub(super) ready: VecDeque<String>,
    pub(super) opened: bool,
    /// Events of a dialect that numbers them.
    pub(super) numbered: u64,
    pub(super) ended: bool,
    shown: usize,
    offsets: Vec<usize>,
}

fn stream(job: Job, plan: Plan) -> Response {
    let offsets = vec![0; job.sequences.len()];
    let events = EventStream {
        job,
        plan,
        ready: VecDeque::new(),
        opened: false,
        numbered: 0,
        ended: false,
        shown: 0,
        offsets,
    };
    let body = futures_util::stream::unfold(events, |mut events| async move {
        let event = events.next_event().await?;
        Some((Ok::<Bytes, Infallible>(Bytes::from(event)), events))
    });
    let mut response = Response::new(Body::from_stream(body));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response
}

impl EventStream {
    async fn next_event(&mut self) -> Option<String> {
        if self.shown == 1 {
            hold_or_stall(&self.job.shared, Stage::MidStream, &self.plan).await;
        }
        while self.ready.is_empty() {
            if self.ended {
                return None;
            }
            match self.job.request.endpoint {
                Endpoint::Completions | Endpoint::Chat => self.advance().await,
                Endpoint::Responses => self.advance_response().await,
                Endpoint::Messages => self.advance_message().await,
            }
        }
        if self.plan.chunk_delay_millis > 0 {
            tokio::time::sleep(Duration::from_millis(self.plan.chunk_delay_millis)).await;
        }
        self.shown += 1;
        self.ready.pop_front()
    }

    async fn advance(&mut self) {
        let Some((index, output)) = self.job.next_output().await else {
            if self.job.request.include_usage {
                let usage = self.job.envelope().usage_event(&self.job.sequences);
                self.push(&usage);
            }
            self.end();
            return;
        };
        if !std::mem::replace(&mut self.opened, true) && self.job.request.endpoint == Endpoint::Chat {
            for choice in 0..self.job.sequences.len() {
                let event = self.job.envelope().role_event(choice);
                self.push(&event);
            }
        }
        match self.job.take(index, output) {
            Ok(piece) => {
                let event = self.token_event(index, &piece);
                self.push(&event);
            }
            Err(rejection) => {
                self.ready.push_back(format!("data: {}\n\n", rejection.event_body()));
                self.end();
            }
        }
    }

    fn token_event(&mut self, index: usize, piece: &str) -> Value {
        let sequence = &self.job.sequences[index];
        let event = self.job.envelope().token_event(index, sequence, piece, self.offsets[index]);
        let reported = event["choices"][0]["logprobs"]["tokens"].as_array();
        let width: usize = reported.map_or(0, |all| all.iter().filter_map(Value::as_str).map(str::len).sum());
        self.offsets[index] += width;
        event
    }

    fn push(&mut self, event: &Value) {
        self.ready.push_back(format!("data: {event}\n\n"));
    }

    fn end(&mut self) {
        self.ready.push_back("data: [DONE]\n\n".to_owned());
        self.close();
    }

    pub(super) fn close(&mut self) {
        self.ended = true;
        self.job.outputs.clear();
        self.job.shared.wake.notify_one();
    }
}

//! Every metric of the router: name, unit and help, once. `docs/metrics.md` is made from this list.
//! Few labels, each from a closed set or bounded by the fleet; never an address or a request id.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::steps::Steps;
use super::table::{Durations, DurationsBy, labels, metrics};

labels! {
    RequestLabels { endpoint: &'static str, model: Arc<str>, outcome: &'static str, status: u32 }
    ModelLabel { model: Arc<str> }
    NameLabels { asked: Arc<str>, served: Arc<str> }
    EngineLabels { model: Arc<str>, stage: &'static str }
    DecisionLabels { decision: &'static str, reason: &'static str }
    ResultLabel { result: &'static str }
    ReasonLabel { reason: &'static str }
    FailureLabels { stage: &'static str, kind: &'static str }
    StageLabel { stage: &'static str }
    WayLabel { way: &'static str }
    PeerLabels { stage: &'static str, condition: &'static str }
    PeerLabel { stage: &'static str, peer: String }
    RefusalLabels { limit: &'static str, reason: &'static str }
    OperationLabels { operation: &'static str, result: &'static str }
    PairLabels { verdict: &'static str, used: &'static str }
    StateLabel { state: &'static str }
    SourceLabel { source: Arc<str> }
}

type Number = Gauge<f64, AtomicU64>;

metrics! {
    /// All of them.
    Table {
        requests: Family<RequestLabels, Counter>, "requests",
            "Requests by endpoint, model, outcome and status; 499 where the client left before its answer was complete, model `other` for names that no engine of the fleet lists";
        request: DurationsBy<ModelLabel>, "request" Seconds,
            "Time from a request's head to the end of its answer";
        first_token: DurationsBy<ModelLabel>, "time_to_first_token" Seconds,
            "Time from a streamed request's head to the first event of its answer that holds a token";
        inter_token: Family<ModelLabel, Steps>, "inter_token" Seconds,
            "Time between two chunks of a stream that hold tokens; an engine may put several tokens into one";
        prompt_tokens: Family<ModelLabel, Counter>, "prompt_tokens",
            "Prompt tokens that engines counted";
        cached_tokens: Family<ModelLabel, Counter>, "cached_prompt_tokens",
            "Prompt tokens that prefill engines found in their caches";
        output_tokens: Family<ModelLabel, Counter>, "output_tokens",
            "Generated tokens: the engine's count where its answer tells it, else the chunks of its stream, which are about as many";
        names: Family<NameLabels, Counter>, "model_requests",
            "Requests for a name of `[[models]]` by the model of the engines that it became";
        model_engines: Family<EngineLabels, Gauge>, "model_engines",
            "Engines of a stage that take the requests of a model with a `pd_ratio`";
        model_ratio: Family<ModelLabel, Number>, "model_pd_ratio",
            "Prefill engines for each decode engine among them; absent while there is none of either";
        prefill: Durations, "prefill" Seconds,
            "Time from sending the prefill leg to its whole answer";
        hand_over: Durations, "hand_over" Seconds,
            "Time from the prefill answer to the first body byte of the decode answer";
        decode_head: Durations, "decode_head" Seconds,
            "Time from sending the decode leg to its response head";
        decode: Durations, "decode" Seconds,
            "Time from sending the decode leg to the end of its answer";
        wait: Durations, "admission_wait" Seconds,
            "Time that requests waited for their turn";
        running: Family<StageLabel, Gauge>, "admission_running",
            "Requests that hold a place of a stage";
        waiting: Family<StageLabel, Gauge>, "admission_waiting",
            "Requests that wait and will need a stage";
        waiting_tokens: Family<StageLabel, Gauge>, "admission_waiting_tokens",
            "Their prompt tokens, as far as can be estimated";
        limit: Family<StageLabel, Gauge>, "admission_limit",
            "Places of a stage; absent without a limit";
        refused: Family<RefusalLabels, Counter>, "admission_refused",
            "Requests answered with 429, by limit (prefill, decode, model, key) and reason (full, rate, late)";
        decisions: Family<DecisionLabels, Counter>, "pd_decisions",
            "Requests by whether their prompt went to a prefill engine, and why";
        bypass: Family<ReasonLabel, Counter>, "pd_bypass",
            "Requests sent to a decode engine alone, by reason";
        hand_offs: Family<ResultLabel, Counter>, "handoffs",
            "Hand-offs by what became of them: relayed to a decode engine, missing from the prefill answer, refused as defective, released by the router, gone with their engine, expired";
        hand_offs_live: Gauge, "handoffs_live",
            "Hand-offs whose blocks a prefill engine still holds, as far as the router knows";
        blocks_live: Gauge, "handoff_blocks_live",
            "Their blocks";
        oldest_lease: Number, "lease_oldest" Seconds,
            "Age of the oldest of them; 0 when there is none";
        lease: Durations, "lease" Seconds,
            "Time from a hand-off's grant until its blocks were known to be free";
        blocks: Counter, "handed_over_blocks",
            "Blocks that decode engines took over";
        bytes: Counter, "handed_over" Bytes,
            "Bytes of these blocks as their prefill engine holds them, where the registry knows their layout";
        releases: Family<WayLabel, Counter>, "releases",
            "Hand-offs that the router released, by the way that worked";
        notification_failures: Family<ReasonLabel, Counter>, "notification_failures",
            "Unread hand-offs of which a prefill engine could not be notified, by reason";
        abandoned_prefills: Family<ResultLabel, Counter>, "abandoned_prefills",
            "Prefills that nobody waited for any more by what became of them: heard out and released, heard out without blocks to free, failed by themselves, aborted";
        retries: Family<StageLabel, Counter>, "retries",
            "Legs that were tried again on another engine";
        upstream_failures: Family<FailureLabels, Counter>, "upstream_failures",
            "Failed exchanges with engines by leg and kind";
        stream_errors: Counter, "stream_errors",
            "Streams that an engine broke off after their head";
        streams_cut: Counter, "streams_cut",
            "Streams that the router ended because it was shutting down";
        held: Gauge, "held" Bytes,
            "Bytes of requests and answers that the router holds";
        peers: Family<PeerLabels, Gauge>, "peers",
            "Peers by stage and condition: open to new requests, unready, closed by their engine, drained, leaving, cold while they make their first hand-offs; those kept from hand-offs also as quarantined";
        restarts: Family<StageLabel, Gauge>, "peer_restarts",
            "Restarts of the present peers' engines that the registry saw";
        breaker: Family<PeerLabel, Gauge>, "peer_breaker_state",
            "How a peer's breaker stands: 0 closed, 1 half-open, 2 open";
        openings: Family<PeerLabel, Gauge>, "peer_breaker_openings",
            "How often a present peer's breaker has opened";
        share: Family<PeerLabel, Number>, "peer_share",
            "The part of its share of requests that a peer gets, below 1 while it recovers";
        pairs: Family<PairLabels, Gauge>, "pairs",
            "Pairs of a prefill and a decode peer by verdict on their handshake, and whether requests use them";
        discovery_peers: Family<SourceLabel, Gauge>, "discovery_peers",
            "Peers that a source of addresses found, by the source; those that leave are counted until they are gone";
        discovery_failures: Family<SourceLabel, Counter>, "discovery_failures",
            "Times that a source of addresses could not be asked, or only by half";
        registry_engines: Family<StateLabel, Gauge>, "registry_engines",
            "Engines in the handshake registry by what they say of themselves";
        registry_payload: Gauge, "registry_payload" Bytes,
            "Bytes of their handshake payloads";
        registry_revision: Gauge, "registry_revision",
            "The registry's revision: how many changes it has seen";
        registry_calls: Family<OperationLabels, Counter>, "registry_calls",
            "What engines asked of the registry by operation (register, rank, heartbeat, remove) and result (done, refused, store_unavailable)";
        store_up: Gauge, "store_up",
            "Whether the store that routers share can be reached; 1 with the store in memory";
        store_age: Number, "store_age" Seconds,
            "Time since the store was heard of; since the start it is infinite until then";
        side_channel_looks: Family<ResultLabel, Counter>, "side_channel_looks",
            "Looks at engines' side channels by result: read, failed, not_asked, registers_itself";
        front_requests: Family<ResultLabel, Counter>, "front_requests",
            "Messages at the router's own side channels: answered or dropped";
        traces: Family<ResultLabel, Counter>, "traces",
            "Traces of sampled requests by what became of them: exported, dropped because too many waited, failed because the collector did not take them";
    }
}

//! Clients that go away: both engines free their blocks long before a lease ends, and the router
//! accounts for nothing any more.

use std::time::Duration;

use engine_sim::{Engine, EngineConfig, Generation, Leg, Stage};
use kvbaton::config::Config;
use serde_json::json;

use crate::support::{
    CHAT, COMPLETIONS, Cluster, PROMPT, Wire, chat, completion, generations, parse, request,
};

fn open(cluster: &Cluster, stream: bool, max_tokens: u64) -> impl Future<Output = Wire> {
    let mut body = completion(PROMPT, max_tokens);
    body["stream"] = json!(stream);
    let (addr, bytes) = (cluster.addr, request(COMPLETIONS, &[], &body.to_string()));
    async move { Wire::open(addr, &bytes).await }
}

/// Nothing is left anywhere, no lease ran out, and the next request is served.
async fn all_is_free(cluster: Cluster) {
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    for engine in [cluster.p(), cluster.d()] {
        let stats = engine.stats();
        assert_eq!((stats.running, stats.waiting, stats.leases, stats.kv_expired), (0, 0, 0, 0));
    }
    let answer = cluster.post(CHAT, &chat("still there?", 4)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    cluster.finish().await;
}

async fn in_flight(cluster: &Cluster, position: usize) -> u64 {
    cluster.get("/admin/peers").await.json()["peers"][position]["in_flight"].as_u64().unwrap()
}

#[tokio::test]
async fn item_31_while_the_prefill_engine_has_not_begun() {
    let cluster = Cluster::builder().start().await;
    let gate = cluster.p().faults().hold(Stage::Arrival, Leg::Prefill);
    let wire = open(&cluster, false, 8).await;
    gate.arrived(1).await;
    assert_eq!(in_flight(&cluster, 0).await, 1);
    drop(wire);
    let left = [("outcome", "abandoned")];
    cluster
        .wait_for("the client is known to be gone", async || {
            cluster.metric("kvbaton_requests_total", &left).await == 1.0
        })
        .await;
    // What nobody waits for is heard out and released.
    drop(gate);
    cluster.wait_idle().await;
    let for_a_client =
        generations(cluster.d()).iter().filter(|seen| parse(&seen.body)["max_tokens"] == 8).count();
    assert_eq!(for_a_client, 0);
    all_is_free(cluster).await;
}

#[tokio::test]
async fn item_31_while_the_prefill_engine_computes() {
    let slow = |config: &mut EngineConfig| config.prefill_time_per_token = Duration::from_millis(15);
    let cluster = Cluster::builder().engine(slow).start().await;
    let wire = open(&cluster, true, 8).await;
    cluster.wait_for("the prefill runs", async || cluster.p().stats().blocks_held > 0).await;
    drop(wire);
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.finish().await;
}

/// The prefill is done, its answer is on its way, nobody waits for it any more.
#[tokio::test]
async fn item_32_between_the_end_of_the_prefill_and_its_answer() {
    let cluster = Cluster::builder().start().await;
    let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
    let wire = open(&cluster, false, 8).await;
    gate.arrived(1).await;
    assert!(cluster.p().stats().blocks_held > 0);
    drop(wire);
    // Time for the router to notice, so that this is not the case of a client that leaves later.
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(gate);
    all_is_free(cluster).await;
}

async fn between_the_legs(stage: Stage, stream: bool, tune: fn(&mut EngineConfig)) {
    let cluster = Cluster::builder().engine(tune).start().await;
    let gate = cluster.d().faults().hold(stage, Leg::Decode);
    let wire = open(&cluster, stream, 8).await;
    gate.arrived(1).await;
    assert_eq!((in_flight(&cluster, 0).await, in_flight(&cluster, 1).await), (0, 1));
    let listed = cluster.get("/admin/handoffs").await.json();
    assert_eq!(listed["handoffs"].as_array().unwrap().len(), 1, "{listed}");
    drop(wire);
    cluster.wait_for("the decode leg is given up", async || in_flight(&cluster, 1).await == 0).await;
    drop(gate);
    all_is_free(cluster).await;
}

#[tokio::test]
async fn item_36_before_the_decode_engine_has_looked_at_the_request() {
    between_the_legs(Stage::Arrival, false, |_| {}).await;
}

#[tokio::test]
async fn before_the_decode_engine_has_looked_at_the_streamed_request() {
    between_the_legs(Stage::Arrival, true, |_| {}).await;
}

#[tokio::test]
async fn item_32_before_the_decode_engines_head() {
    between_the_legs(Stage::BeforeHead, false, |_| {}).await;
}

fn v2(config: &mut EngineConfig) {
    config.generation = Generation::V2;
    config.lease = Duration::from_secs(480);
    config.idle_trap = false;
}

#[tokio::test]
async fn item_36_before_a_v2_decode_engine_has_looked_at_the_request() {
    let cluster = Cluster::builder().engine(v2).config(patient).start().await;
    let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
    let wire = open(&cluster, false, 8).await;
    gate.arrived(1).await;
    drop(wire);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(in_flight(&cluster, 1).await, 1);
    drop(gate);
    all_is_free(cluster).await;
}

#[tokio::test]
async fn while_a_v2_decode_engine_hangs() {
    let hurried = |config: &mut Config| config.timeouts.release = Duration::from_secs(2);
    let cluster = Cluster::builder().decode(2).engine(v2).config(hurried).start().await;
    let gates: Vec<_> =
        cluster.decode.iter().map(|engine| engine.faults().hold(Stage::Arrival, Leg::Decode)).collect();
    let wire = open(&cluster, true, 8).await;
    let asked = async |at: usize| in_flight(&cluster, 1 + at).await == 1;
    cluster.wait_for("one is asked", async || asked(0).await || asked(1).await).await;
    drop(wire);
    let hangs = usize::from(asked(1).await);
    let mut gates = gates.into_iter().enumerate().partition::<Vec<_>, _>(|(at, _)| *at == hangs);
    gates.1.clear();
    let released = async || cluster.released().await == 1.0;
    cluster.wait_for("the other reads", released).await;
    cluster.wait_no_blocks().await;
    drop(gates);
    cluster.wait_idle().await;
    cluster.finish().await;
}

/// A decode engine may take a fifth of it to show that it has the blocks.
fn patient(config: &mut Config) {
    config.timeouts.release = Duration::from_secs(60);
}

/// Version 2 gives the blocks of a request that is aborted to the next one, though what it reads still comes into
/// them: the next one's answer would be wrong, and that of each later prompt which begins like it.
async fn while_a_v2_decode_engine_reads(stream: bool) {
    let cluster = Cluster::builder().engine(v2).config(patient).start().await;
    assert_eq!(cluster.post(CHAT, &chat("they meet", 2)).await.status, 200);
    cluster.d().transport_faults().hold_transfers(true);
    let wire = open(&cluster, stream, 8).await;
    let reads = async || cluster.d().stats().waiting_for_remote_kv == 1;
    cluster.wait_for("the decode engine reads", reads).await;
    drop(wire);
    // Time for the router to notice.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(reads().await && cluster.d().stats().aborted == 0, "{:?}", cluster.d().stats());
    cluster.d().transport_faults().hold_transfers(false);
    cluster.wait_for("it has the blocks", async || cluster.relayed().await == 2.0).await;
    all_is_free(cluster).await;
}

#[tokio::test]
async fn while_a_v2_decode_engine_reads_for_a_stream() {
    while_a_v2_decode_engine_reads(true).await;
}

#[tokio::test]
async fn while_a_v2_decode_engine_reads_for_a_whole_answer() {
    while_a_v2_decode_engine_reads(false).await;
}

#[tokio::test]
async fn v2_decode_engines_that_read_for_nobody_are_let_do_so() {
    let cluster = Cluster::builder().decode(2).engine(v2).config(patient).start().await;
    for engine in &cluster.decode {
        engine.transport_faults().hold_transfers(true);
    }
    let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
    let wire = open(&cluster, false, 8).await;
    gate.arrived(1).await;
    drop(wire);
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(gate);
    // The second is asked because the first says nothing for so long.
    let reads = |engine: &Engine| engine.stats().waiting_for_remote_kv == 1;
    cluster.wait_for("both read", async || cluster.decode.iter().all(reads)).await;
    cluster.decode[1].transport_faults().hold_transfers(false);
    let released = async || cluster.released().await == 1.0;
    cluster.wait_for("one has", released).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let first = cluster.decode[0].stats();
    assert_eq!((first.waiting_for_remote_kv, first.aborted), (1, 0));
    cluster.decode[0].transport_faults().hold_transfers(false);
    all_is_free(cluster).await;
}

#[tokio::test]
async fn in_the_middle_of_a_stream() {
    let slow = |config: &mut EngineConfig| config.decode_time_per_token = Duration::from_millis(10);
    let cluster = Cluster::builder().engine(slow).start().await;
    let mut wire = open(&cluster, true, 2000).await;
    assert_eq!(wire.head().await.0, 200);
    wire.body_until("\n\n").await;
    assert!(cluster.d().stats().blocks_held > 0);
    assert_eq!(in_flight(&cluster, 1).await, 1);
    drop(wire);
    cluster.wait_for("the decode engine aborts", async || cluster.d().stats().aborted == 1).await;
    all_is_free(cluster).await;
}

#[tokio::test]
async fn while_the_decode_engine_generates_a_whole_answer() {
    let slow = |config: &mut EngineConfig| config.decode_time_per_token = Duration::from_millis(10);
    let cluster = Cluster::builder().engine(slow).start().await;
    let wire = open(&cluster, false, 2000).await;
    cluster.wait_for("the decode engine generates", async || cluster.d().stats().tokens_generated > 3).await;
    drop(wire);
    cluster.wait_for("the decode engine aborts", async || cluster.d().stats().aborted == 1).await;
    all_is_free(cluster).await;
}

#[tokio::test]
async fn many_clients_at_every_moment() {
    let slow = |config: &mut EngineConfig| {
        config.prefill_time_per_token = Duration::from_micros(500);
        config.decode_time_per_token = Duration::from_millis(2);
    };
    let cluster = Cluster::builder().prefill(2).decode(2).engine(slow).start().await;
    let mut wires = Vec::new();
    for i in 0..40_u64 {
        wires.push(open(&cluster, i % 2 == 0, 30).await);
        tokio::time::sleep(Duration::from_millis(3)).await;
        if i % 3 != 0 {
            wires.remove(0);
        }
    }
    drop(wires);
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    for engine in cluster.prefill.iter().chain(&cluster.decode) {
        assert_eq!((engine.stats().kv_expired, engine.stats().dead), (0, false));
    }
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, 200);
    cluster.finish().await;
}

#[tokio::test]
async fn a_body_that_never_ends_holds_nothing() {
    let cluster = Cluster::builder().start().await;
    let bytes = request(COMPLETIONS, &[], &completion(PROMPT, 4).to_string());
    let wire = Wire::open(cluster.addr, &bytes[..bytes.len() - 5]).await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, 200);
    assert_eq!(generations(cluster.p()).len(), 1);
    drop(wire);
    all_is_free(cluster).await;
}

//! The state machine of both legs, as it is, over engines in memory under simulated time: random faults,
//! clients that leave at any moment, and after each seed nothing may be held. Every other seed has engines of
//! version 2. `KVBATON_MODEL_SECONDS` says for how long, `KVBATON_MODEL_SEED` where to begin.

mod engine;
mod world;

use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::BodyExt as _;
use kv_connector::protocol::params::Generation;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::held::Held;
use crate::upstream::Upstream;
use crate::{Client, Endpoint, Exchange, HandOffState, PeerSpec, Proxy, RequestId, Role, Settings};
use engine::{LONGEST_PREFILL, TRUTH};
pub(crate) use world::World;
use world::{Dice, Lapse};

const REQUESTS: u64 = 150;
const PREFILL: [&str; 2] = ["10.0.0.1", "10.0.0.2"];
const DECODE: [&str; 2] = ["10.0.0.3", "10.0.0.4"];

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().unwrap())
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.hand_off.lease = Duration::from_secs(480);
    settings.hand_off.lease_v2 = Duration::from_secs(480);
    settings.hand_off.abandon_grace = Duration::from_secs(20);
    settings.timeouts.prefill = Duration::from_secs(6);
    settings.timeouts.decode_head = Duration::from_secs(6);
    settings.timeouts.idle = Duration::from_secs(6);
    settings
}

fn fleet(world: &World) -> (Proxy, TaskTracker, CancellationToken) {
    let (settings, tasks, stop) = (settings(), TaskTracker::new(), CancellationToken::new());
    let held = Held::new(settings.limits.held_bytes);
    let upstream = Upstream::modelled(world.clone(), &settings.timeouts, held.clone(), tasks.clone());
    let proxy = Proxy::start_over(upstream, held, settings, tasks.clone(), stop.clone());
    for (role, hosts) in [(Role::Prefill, PREFILL), (Role::Decode, DECODE)] {
        for host in hosts {
            proxy.add_peer(PeerSpec::new(role, format!("http://{host}:80"))).unwrap();
        }
    }
    (proxy, tasks, stop)
}

/// One client's whole request; what is wrong with its answer, if anything.
async fn ask(proxy: Proxy, stream: bool, tokens: usize) -> Result<bool, String> {
    let body = format!(r#"{{"model":"sim","prompt":"a prompt","max_tokens":{tokens},"stream":{stream}}}"#);
    let request_id = RequestId::accept(None);
    let account = proxy.account(&request_id, "completions", &HeaderMap::new());
    let exchange = Exchange { request_id, headers: HeaderMap::new(), client: Client::default(), account };
    let order = proxy.read(Endpoint::Completions, &exchange, Bytes::from(body)).map_err(|e| e.to_string())?;
    let Ok(response) = proxy.serve(&order, &exchange).await else { return Ok(false) };
    let status = response.status();
    let Ok(body) = response.into_body().collect().await else { return Err("the body broke off".to_owned()) };
    let body = String::from_utf8(body.to_bytes().to_vec()).map_err(|error| error.to_string())?;
    if !status.is_success() || body.contains(r#""error""#) {
        return Ok(false);
    }
    let part = r#""text":""#;
    let said: String = body.split(part).skip(1).filter_map(|rest| rest.split('"').next()).collect();
    if said == TRUTH[..tokens] { Ok(true) } else { Err(format!("answered {said:?}: {body}")) }
}

/// One seed: how many clients got an answer.
async fn run(seed: u64) -> usize {
    let generation = if seed.is_multiple_of(2) { Generation::V2 } else { Generation::V14 };
    let world = World::new(generation, seed, &[PREFILL, DECODE].concat());
    let (proxy, tasks, stop) = fleet(&world);
    let (clients, wrongs) = (TaskTracker::new(), std::sync::Arc::new(parking_lot::Mutex::new(Vec::new())));
    let answered = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let mut dice = Dice(seed ^ 0x5EED);
    tokio::time::sleep(Duration::from_secs(5)).await;
    for _ in 0..REQUESTS {
        tokio::time::sleep(dice.up_to(Duration::from_millis(400))).await;
        if dice.percent(2) {
            let engines = [PREFILL, DECODE].concat();
            world.restart(engines[usize::try_from(dice.below(4)).unwrap()]);
        }
        let (stream, tokens) = (dice.percent(50), 1 + usize::try_from(dice.below(8)).unwrap());
        let leaves = dice.percent(50).then(|| dice.up_to(LONGEST_PREFILL + Duration::from_secs(4)));
        let (asked, wrongs, answered) =
            (ask(proxy.clone(), stream, tokens), wrongs.clone(), answered.clone());
        clients.spawn(async move {
            let patience = leaves.unwrap_or(Duration::from_secs(600));
            match tokio::time::timeout(patience, asked).await {
                Ok(Ok(right)) => drop(answered.fetch_add(right.into(), std::sync::atomic::Ordering::Relaxed)),
                Ok(Err(wrong)) => wrongs.lock().push(wrong),
                Err(_) if leaves.is_some() => {}
                Err(_) => wrongs.lock().push("no end".to_owned()),
            }
        });
    }
    clients.close();
    clients.wait().await;
    world.stop_faults();
    // What was begun for clients that have left ends by itself, and then the blocks are free at once.
    tokio::time::sleep(LONGEST_PREFILL + Duration::from_secs(2)).await;
    let story = format!("KVBATON_MODEL_SEED={seed}");
    assert_eq!(*wrongs.lock(), Vec::<String>::new(), "{story}");
    assert_eq!(world.violations(), Vec::<String>::new(), "{story}");
    assert_eq!(world.held(), [], "{story}: {:?}", proxy.hand_offs());
    // The stalled ones are given up.
    tokio::time::sleep(settings().hand_off.abandon_grace).await;
    let busy: Vec<_> = proxy.peers().into_iter().filter(|peer| peer.in_flight > 0).collect();
    assert!(busy.is_empty(), "{story}: {busy:?}");
    stop.cancel();
    drop(proxy);
    tasks.close();
    tokio::time::timeout(Duration::from_secs(30), tasks.wait()).await.expect("every task ends");
    answered.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn under_random_faults_nothing_is_held_and_no_answer_is_wrong() {
    let first = number("KVBATON_MODEL_SEED", 1);
    let budget = Duration::from_secs(number("KVBATON_MODEL_SECONDS", 60));
    let began = std::time::Instant::now();
    let (mut seed, mut answered) = (first, 0);
    while seed == first || began.elapsed() < budget {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        answered += runtime.unwrap().block_on(run(seed));
        seed += 1;
    }
    assert!(answered as u64 * 5 > (seed - first) * REQUESTS, "{answered} answers of {} seeds", seed - first);
}

/// Waits until something is the case; how long that took.
async fn until(holds: impl Fn() -> bool) -> Duration {
    let began = tokio::time::Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    began.elapsed()
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_comes_back_is_asked_at_once_for_what_nobody_could_release() {
    let (p, d) = (PREFILL[0], DECODE[0]);
    let world = World::new(Generation::V14, 7, &[p, d]);
    world.stop_faults();
    let (proxy, tasks, stop) = fleet(&world);
    until(|| proxy.peers().iter().filter(|peer| peer.accepts).count() == 2).await;
    let asked = tasks.spawn(ask(proxy.clone(), false, 4));
    until(|| !world.held().is_empty()).await;
    world.end(d);
    assert_eq!(asked.await.unwrap(), Ok(false), "nobody can decode it");
    until(|| proxy.hand_offs().iter().any(|live| live.state == HandOffState::Stranded)).await;
    // The pauses between its tries have grown to 8 s, the last of which has just begun.
    tokio::time::sleep(Duration::from_millis(7_800)).await;
    assert_eq!((world.held().len(), proxy.hand_offs().len()), (1, 1));
    world.restart(d);
    let freed = until(|| world.held().is_empty()).await;
    assert!(freed < Duration::from_secs(2), "{freed:?}");
    until(|| proxy.hand_offs().is_empty()).await;
    stop.cancel();
    drop(proxy);
    tasks.close();
    tasks.wait().await;
}

/// How long after its end a prompt's blocks stay whose client has left, when decode engines lapse.
async fn freed_in_spite_of(lapses: &[Lapse]) -> Duration {
    let world = World::new(Generation::V14, 7, &[PREFILL[0], DECODE[0], DECODE[1]]);
    world.stop_faults();
    let (proxy, tasks, stop) = fleet(&world);
    until(|| proxy.peers().iter().filter(|peer| peer.accepts).count() == 3).await;
    let asked = tasks.spawn(ask(proxy.clone(), false, 4));
    until(|| proxy.peers().iter().any(|peer| peer.in_flight > 0)).await;
    asked.abort();
    world.lapse(lapses);
    until(|| !world.held().is_empty()).await;
    let freed = until(|| world.held().is_empty()).await;
    assert!(world.next_lapse().is_none());
    until(|| proxy.hand_offs().is_empty()).await;
    stop.cancel();
    drop(proxy);
    tasks.close();
    tasks.wait().await;
    freed
}

#[tokio::test(start_paused = true)]
async fn while_one_engine_is_silent_the_other_is_asked_until_it_releases() {
    use Lapse::{Refusal, Silence};
    let (second, third) = (Duration::from_secs(1), Duration::from_secs(2));
    for (lapses, within) in [
        (&[Silence][..], second + second / 2),
        (&[Refusal, Refusal], second + second / 2),
        (&[Silence, Refusal, Refusal], third + second / 2),
        // Even both, when it was but one request that was lost.
        (&[Silence, Silence], third + second / 2),
    ] {
        let freed = freed_in_spite_of(lapses).await;
        assert!(freed < within, "{lapses:?}: {freed:?}");
    }
}

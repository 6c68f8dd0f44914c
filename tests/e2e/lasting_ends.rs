//! How streams end that are written without hyper: by the client, the engine, a deadline, or the router's own end.

use std::time::Duration;

use engine_sim::EngineConfig;
use kvbaton_proxy::Role;
use tokio::net::TcpStream;

use crate::lasting::{BOTH, By, TICK, lasting, settled, streamed};
use crate::support::{Cluster, End, FakeEngine, Gate, SOON, Step, Wire, bounded, chunk, events, sse_head};

const EVENT: &[u8] = b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

/// A stream whose engine sends one event, and does the rest when the gate is open.
struct Begun {
    cluster: Cluster,
    engine: FakeEngine,
    gate: Gate,
    wire: Wire,
}

impl Begun {
    async fn new(by: By, rest: Vec<Step>, tune: impl Fn(&mut kvbaton::config::Config) + 'static) -> Self {
        let gate = Gate::new();
        let mut steps = vec![Step::Send(sse_head()), Step::Send(chunk(EVENT)), Step::Wait(gate.clone())];
        steps.extend(rest);
        let engine = FakeEngine::start(steps).await;
        let cluster = Cluster::builder()
            .decode(0)
            .peer(Role::Decode, &engine.url())
            .config(tune)
            .logs_all()
            .may_warn(&["stream", "broke off", "release"])
            .start()
            .await;
        let before = lasting(&cluster);
        let mut wire = Wire::open_abrupt(cluster.addr, &by.request(&streamed(4))).await;
        assert_eq!(wire.head().await.0, 200);
        assert_eq!(wire.body_until("\n\n").await.as_bytes(), EVENT);
        settled(&cluster, by, before).await;
        Self { cluster, engine, gate, wire }
    }

    async fn is_counted(&self, status: &str, outcome: &str) {
        let labels = [("status", status), ("outcome", outcome)];
        let counted = async || self.cluster.metric("kvbaton_requests_total", &labels).await == 1.0;
        self.cluster.wait_for("the request is counted", counted).await;
    }
}

fn whole() -> Vec<Step> {
    [EVENT, DONE, b""].map(|data| Step::Send(chunk(data))).into()
}

/// The code of the error event that a stream's rest is.
fn error_code(rest: &str) -> String {
    let last = events(rest).pop().unwrap_or_else(|| panic!("no event: {rest:?}"));
    let last: serde_json::Value = serde_json::from_str(&last).unwrap();
    last["error"]["code"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn item_17_an_engine_that_dies_late_ends_the_stream_with_an_error_event() {
    for by in BOTH {
        let mut broken = Vec::new();
        broken.push((Step::Reset, "upstream_reset"));
        broken.push((Step::Send(Vec::new()), "upstream_reset"));
        broken.push((Step::Send(b"zz\r\nnonsense".to_vec()), "upstream_reset"));
        for (step, code) in broken {
            let mut begun = Begun::new(by, vec![Step::Send(chunk(b"data: {\"choi")), step], |_| {}).await;
            begun.gate.open();
            let (rest, end) = begun.wire.rest().await;
            assert_eq!((error_code(&rest).as_str(), end), (code, End::Clean), "{by:?}: {rest:?}");
            begun.is_counted("200", "engine_error").await;
            // Its connection serves on.
            begun.wire.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await;
            assert_eq!(begun.wire.head().await.0, 200);
            begun.cluster.wait_idle().await;
            begun.cluster.finish().await;
        }
    }
}

#[tokio::test]
async fn deadlines_hold_for_streams_that_last() {
    type Tune = fn(&mut kvbaton::config::Config);
    let idle: Tune = |config| config.timeouts.idle = TICK * 5;
    let total: Tune = |config| config.timeouts.total = TICK * 5;
    for by in BOTH {
        for (tune, code) in [(idle, "upstream_idle"), (total, "upstream_total")] {
            let mut begun = Begun::new(by, Vec::new(), tune).await;
            let (rest, end) = begun.wire.rest().await;
            assert_eq!((error_code(&rest).as_str(), end), (code, End::Clean), "{by:?}");
            begun.cluster.finish().await;
        }
    }
}

#[tokio::test]
async fn item_31_a_client_that_leaves_a_stream_that_lasts_is_a_499() {
    for by in BOTH {
        for resets in [true, false] {
            let mut begun = Begun::new(by, Vec::new(), |_| {}).await;
            // To send no more is to leave, but where it is set otherwise.
            if resets {
                begun.wire = Wire::connect(begun.cluster.addr).await;
            } else {
                begun.wire.close_sending().await;
            }
            begun.is_counted("499", "abandoned").await;
            assert_eq!(begun.engine.seen().len(), 1);
            begun.cluster.wait_idle().await;
            begun.cluster.finish().await;
        }
    }
}

#[tokio::test]
async fn a_client_that_may_close_its_half_gets_the_rest_and_is_missed_at_the_next_write() {
    for by in BOTH {
        let half = |config: &mut kvbaton::config::Config| config.stream.half_close = true;
        let mut begun = Begun::new(by, whole(), half).await;
        begun.wire.close_sending().await;
        tokio::time::sleep(TICK).await;
        begun.gate.open();
        let (rest, end) = begun.wire.rest().await;
        assert_eq!((rest.as_bytes(), end), (&[EVENT, DONE].concat()[..], End::Clean), "{by:?}");
        assert_eq!(begun.wire.everything().await, "", "{by:?}: nobody can ask any more");
        begun.is_counted("200", "served").await;
        begun.cluster.finish().await;

        let many = (0..200).map(|_| Step::Send(chunk(EVENT))).chain([Step::Hang]).collect();
        let mut begun = Begun::new(by, many, half).await;
        begun.wire = Wire::connect(begun.cluster.addr).await;
        begun.gate.open();
        begun.is_counted("499", "abandoned").await;
        begun.cluster.wait_idle().await;
        begun.cluster.finish().await;
    }
}

#[tokio::test]
async fn an_engine_is_told_at_once_that_nobody_listens() {
    let slow = |engine: &mut EngineConfig| engine.decode_time_per_token = Duration::from_millis(10);
    let cluster = Cluster::builder().engine(slow).logs_all().start().await;
    for (at, by) in BOTH.into_iter().enumerate() {
        let before = lasting(&cluster);
        let mut wire = Wire::open_abrupt(cluster.addr, &by.request(&streamed(2000))).await;
        assert_eq!(wire.head().await.0, 200);
        wire.body_until("\n\n").await;
        settled(&cluster, by, before).await;
        drop(wire);
        cluster.wait_for("the engine aborts", async || cluster.d().stats().aborted == at as u64 + 1).await;
    }
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

/// A stream whose engine goes on with large pieces, and how many of them it could send.
async fn flood(by: By, pieces: usize, stall: Duration) -> (Begun, Vec<Gate>, usize) {
    let piece = [b"data: ".as_slice(), &vec![b'x'; 1 << 20], b"\n\n"].concat();
    let gates: Vec<Gate> = (0..pieces).map(|_| Gate::new()).collect();
    let sent = gates.iter().flat_map(|gate| [Step::Send(chunk(&piece)), Step::Open(gate.clone())]);
    let sent = sent.chain([Step::Send(chunk(b""))]).collect();
    let begun = Begun::new(by, sent, move |config| config.connections.stall = stall).await;
    begun.gate.open();
    // Long enough for a router that reads ahead to have read all.
    tokio::time::sleep(TICK * 4).await;
    (begun, gates, piece.len())
}

#[tokio::test]
async fn a_client_that_stops_reading_costs_a_bounded_amount() {
    const PIECES: usize = 64;
    for by in BOTH {
        let (mut begun, gates, length) = flood(by, PIECES, SOON).await;
        let taken = gates.iter().filter(|gate| gate.is_open()).count();
        assert!(taken < PIECES / 2, "{by:?}: {taken} MiB went towards a client that reads nothing");
        let held = begun.cluster.metric("kvbaton_held_bytes", &[]).await;
        assert!(held <= 2.0 * length as f64, "{by:?}: {held} bytes are held for one stream");
        let (rest, end) = begun.wire.rest().await;
        assert_eq!((rest.len(), end), (length * PIECES, End::Clean), "{by:?}");
        begun.cluster.finish().await;
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_and_leaves_is_missed_at_once() {
    for by in BOTH {
        let (mut begun, gates, _) = flood(by, 64, SOON * 2).await;
        begun.wire = Wire::connect(begun.cluster.addr).await;
        begun.is_counted("499", "abandoned").await;
        assert!(!gates.iter().all(Gate::is_open), "{by:?}");
        begun.cluster.wait_idle().await;
        begun.cluster.finish().await;
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_is_given_up() {
    for by in BOTH {
        let (mut begun, gates, _) = flood(by, 64, TICK * 6).await;
        begun.is_counted("499", "abandoned").await;
        begun.cluster.wait_idle().await;
        assert!(!gates.iter().all(Gate::is_open), "{by:?}");
        assert_eq!(begun.wire.rest().await.1, End::Cut, "{by:?}");
        begun.cluster.finish().await;
    }
}

#[tokio::test]
async fn the_next_request_of_a_connection_has_its_own_deadline() {
    const HEAD: Duration = Duration::from_millis(600);
    for by in BOTH {
        for part in ["", "GET /livez HT"] {
            let mut begun = Begun::new(by, whole(), |config| config.connections.head = HEAD).await;
            // The stream lasts for longer than a head may.
            tokio::time::sleep(HEAD * 2).await;
            begun.gate.open();
            let (rest, end) = begun.wire.rest().await;
            assert_eq!((rest.as_bytes(), end), (&[EVENT, DONE].concat()[..], End::Clean), "{by:?}");
            begun.wire.send(part.as_bytes()).await;
            let start = std::time::Instant::now();
            assert_eq!(begun.wire.everything().await, "", "{by:?} {part:?}");
            assert!(start.elapsed() >= HEAD / 2, "{by:?} {part:?}: after {:?}", start.elapsed());
            begun.cluster.finish().await;
        }
    }
}

#[tokio::test]
async fn a_drain_waits_for_the_stream_and_not_for_its_connection() {
    // What a client has sent when the stream was over, or before.
    for by in BOTH {
        for (early, late) in [("", ""), ("", "GET /livez HT"), ("GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", "")]
        {
            let mut begun = Begun::new(by, whole(), |_| {}).await;
            begun.wire.send(early.as_bytes()).await;
            if early.is_empty() {
                // It begins when the stream is over.
                begun.gate.open();
                assert_eq!(begun.wire.rest().await.1, End::Clean);
                begun.wire.send(late.as_bytes()).await;
                tokio::time::sleep(TICK).await;
                begun.cluster.finish().await;
                assert_eq!(begun.wire.everything().await, "", "{by:?} {late:?}");
                continue;
            }
            let addr = begun.cluster.addr;
            let meanwhile = async {
                bounded("the router drains", async {
                    while TcpStream::connect(addr).await.is_ok() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                })
                .await;
                begun.gate.open();
                let (rest, end) = begun.wire.rest().await;
                assert_eq!((rest.as_bytes(), end), (&[EVENT, DONE].concat()[..], End::Clean), "{by:?}");
                assert_eq!(begun.wire.everything().await, "", "{by:?}: nothing more is answered");
            };
            tokio::join!(begun.cluster.finish(), meanwhile);
        }
    }
}

#[tokio::test]
async fn a_drain_that_must_not_wait_any_longer_says_so_in_the_stream() {
    for by in BOTH {
        let limited = |config: &mut kvbaton::config::Config| config.shutdown.limit = SOON / 3;
        let mut begun = Begun::new(by, Vec::new(), limited).await;
        let ((rest, end), ()) = tokio::join!(begun.wire.rest(), begun.cluster.finish());
        assert_eq!((error_code(&rest).as_str(), end), ("shutting_down", End::Clean), "{by:?}");
    }
}

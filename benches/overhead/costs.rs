//! What single things cost: the way through a router beside the engines asked one after the other, observing
//! everything, a very long prompt.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use crate::client::{self, Load, Until};
use crate::engine::{Engines, find, length};
use crate::process::{Router, Who};
use crate::{Plan, table};

/// How often each of the two that are compared has its turn.
const TURNS: usize = 5;
const CLIENTS: usize = 32;
const LONG: usize = 32 << 20;

pub(crate) fn measure(engines: &Engines, plan: Plan) -> String {
    [added(engines, plan), observed(engines, plan), long(engines, plan)].concat()
}

/// Latency through a router minus that of both engines by themselves, on kept connections.
fn added(engines: &Engines, plan: Plan) -> String {
    let mut text = "| with one client | added p50 ms | added p99 ms |\n|---|--:|--:|\n".to_owned();
    let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let at = |addr, load: &Load| {
        client::run(addr, load, 1, Until::Over(plan.lasts / 5));
        client::run(addr, load, 1, Until::Over(plan.lasts))
    };
    for who in Who::installed().into_iter().filter(|who| matches!(who, Who::VllmRouter | Who::Kvbaton)) {
        let router = Router::start(who, engines);
        for load in Load::all() {
            let legs = [at(local(engines.prefill), &load.as_prefill()), at(local(engines.decode), &load)];
            let through = at(router.addr, &load);
            let added = |part| through.latency(part) - legs.iter().map(|leg| leg.latency(part)).sum::<f64>();
            let _ =
                writeln!(text, "| {}, {} | {:.3} | {:.3} |", who.name(), load.name, added(0.5), added(0.99));
        }
    }
    text + "\n"
}

/// CPU time with an access log and one request of a hundred traced, and without, in turn.
fn observed(engines: &Engines, plan: Plan) -> String {
    let collector = Collector::start();
    let url = |port: u16| format!("http://127.0.0.1:{port}");
    let engines_of =
        ["--prefill", &url(engines.prefill), "--decode", &url(engines.decode)].map(str::to_owned);
    let traces = [
        "log.level=info".to_owned(),
        format!("telemetry.traces.endpoint={}", url(collector.0)),
        "telemetry.traces.protocol=http".to_owned(),
        "telemetry.traces.sample=0.01".to_owned(),
    ];
    let all: Vec<_> = traces.into_iter().flat_map(|setting| ["--set".to_owned(), setting]).collect();
    let routers = [Router::kvbaton(&engines_of), Router::kvbaton(&[&engines_of[..], &all].concat())];
    let load = Load::new("answer", 96, false);
    let mut cpu = [Vec::new(), Vec::new()];
    for _ in 0..TURNS {
        for (router, cpu) in routers.iter().zip(&mut cpu) {
            cpu.push(table::row(router, engines, &load, CLIENTS, plan).cpu_us);
        }
    }
    let [bare, observed] = cpu.map(|mut cpu| {
        cpu.sort_by(f64::total_cmp);
        cpu[TURNS / 2]
    });
    format!(
        "| small answer, {CLIENTS} clients | CPU µs per request |\n|---|--:|\n| metrics only | {bare:.1} |\n\
         | metrics, access log, 1 % traced | {observed:.1} ({:+.1} %) |\n\n",
        (observed / bare - 1.0) * 100.0
    )
}

/// The most memory that one request with a very long prompt takes.
fn long(engines: &Engines, plan: Plan) -> String {
    let size = if plan.most < 1000 { LONG / 32 } else { LONG };
    let router = Router::start(Who::Kvbaton, engines);
    let before = router.most_resident();
    let sample = client::run(router.addr, &Load::new("long", size, false), 1, Until::Requests(1));
    assert_eq!((sample.good(), sample.bad), (1, 0), "the long prompt was not answered");
    let took = router.most_resident() - before;
    format!(
        "A prompt of {:.0} MiB takes {:.1} MiB ({:.2} times its size).\n",
        size as f64 / 1_048_576.0,
        took as f64 / 1_048_576.0,
        took as f64 / size as f64
    )
}

/// Takes whatever traces come.
struct Collector(u16);

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || take(stream));
            }
        });
        Self(port)
    }
}

fn take(mut stream: TcpStream) -> Option<()> {
    let (mut came, mut space) = (Vec::new(), [0; 1 << 16]);
    loop {
        while let Some(end) = find(&came, b"\r\n\r\n") {
            let whole = end + 4 + length(&came[..end]);
            if came.len() < whole {
                break;
            }
            came.drain(..whole);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").ok()?;
        }
        let read = stream.read(&mut space).ok().filter(|read| *read > 0)?;
        came.extend_from_slice(&space[..read]);
    }
}

//! How our router's cost grows: with the prompt, the chunks of a stream, the peers, and the streams that are
//! open at the same time.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use crate::client::{self, Load};
use crate::engine::Engines;
use crate::process::{Router, Who};
use crate::{Plan, plot, table};

const CLIENTS: usize = 32;
/// Between the chunks of a slow stream: longer than the measurement.
const SLOW: Duration = Duration::from_secs(600);

/// Measures all four and draws them into `folder`, if there is one.
pub(crate) fn measure(engines: &Engines, plan: Plan, folder: Option<&str>) -> String {
    let mut text = String::new();
    let mut tell = |name: &str, title: &str, unit: &str, points: &[(f64, f64)]| {
        text.push_str(&told(name, title, unit, points, folder));
    };
    let router = Router::start(Who::Kvbaton, engines);
    let cpu = |load: &Load| table::row(&router, engines, load, CLIENTS, plan).cpu_us;

    let sizes = [100, 1_000, 10_000, 100_000, 1_000_000].into_iter();
    let points: Vec<_> =
        sizes.map(|size| (f64::from(size), cpu(&Load::new("", size as usize, false)))).collect();
    tell("body", "Bytes of the prompt", "CPU µs per request", &points);

    let mut points = Vec::new();
    for chunks in [1, 16, 64, 256] {
        engines.stream(chunks, Duration::ZERO);
        points.push((chunks as f64, cpu(&Load::new("", 96, true))));
    }
    engines.stream(16, Duration::ZERO);
    tell("chunks", "Chunks of a stream", "CPU µs per request", &points);

    drop(router);
    let mut points = Vec::new();
    for peers in [2, 20, 200, 1000].into_iter().filter(|peers| *peers <= plan.most) {
        let router = Router::kvbaton(&fleet(engines, peers));
        points.push((
            peers as f64,
            table::row(&router, engines, &Load::new("", 96, false), CLIENTS, plan).cpu_us,
        ));
    }
    tell("peers", "Peers", "CPU µs per request", &points);

    text + &streams(engines, plan, folder)
}

/// One table, which is drawn too if there is a folder.
fn told(name: &str, title: &str, unit: &str, points: &[(f64, f64)], folder: Option<&str>) -> String {
    let mut text = format!("| {title} | {unit} |\n|---|---|\n");
    for (x, y) in points {
        let _ = writeln!(text, "| {x:.0} | {y:.1} |");
    }
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder).unwrap();
        let drawn = plot::draw(title, unit, points);
        std::fs::write(Path::new(folder).join(format!("{name}.svg")), drawn).unwrap();
    }
    text + "\n"
}

/// The last of the four alone: what streams cost that are open at the same time and silent.
pub(crate) fn streams(engines: &Engines, plan: Plan, folder: Option<&str>) -> String {
    let mut points = Vec::new();
    engines.stream(2, SLOW);
    for streams in [100, 1000, 5000].into_iter().filter(|streams| *streams <= plan.most) {
        let router = Router::start(Who::Kvbaton, engines);
        let before = router.resident();
        let _open = client::open(router.addr, &Load::new("", 96, true), streams);
        let each = router.resident().saturating_sub(before) as f64 / streams as f64;
        points.push((streams as f64, each / 1024.0));
    }
    engines.stream(16, Duration::ZERO);
    told("streams", "Streams that are open at once", "KiB resident per stream", &points, folder)
}

/// Half of them prefill engines: addresses of the same two engines.
fn fleet(engines: &Engines, peers: usize) -> Vec<String> {
    let half = |flag: &'static str, port: u16| {
        let addresses =
            (0..peers / 2).map(move |at| format!("http://127.0.{}.{}:{port}", at / 250, at % 250 + 1));
        addresses.flat_map(move |url| [flag.to_owned(), url])
    };
    half("--prefill", engines.prefill).chain(half("--decode", engines.decode)).collect()
}

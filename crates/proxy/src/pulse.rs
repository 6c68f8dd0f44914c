//! The fleet as a stream for operators: first everything, then what has changed, at most four times a second.
//! Takes only locks that are held for moments, and never more than a part of one core for a viewer.

mod write;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::pool::matrix::Matrix;
use crate::pool::traffic::{self, PairRate};
use crate::{Core, Proxy};
use write::Frame as Writing;

/// Shortest pause between two frames.
const PAUSE: Duration = Duration::from_millis(250);

/// A frame is followed by a pause of at least so many times what it took to make it.
const RELIEF: u32 = 20;

/// Shortest pause between two looks at all pairs, which may be many.
const MATRIX_PAUSE: Duration = Duration::from_secs(1);

/// Most pairs, hand-offs and requests that one frame tells.
const MOST_PAIRS: usize = 200;
const MOST_HAND_OFFS: usize = 200;
const MOST_REQUESTS: usize = 60;

/// Most viewers at a time.
const MOST_VIEWERS: usize = 32;

/// There are as many viewers as may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are {limit} viewers of the fleet, as many as may be")]
pub struct TooManyViewers {
    /// How many may be.
    pub limit: usize,
}

/// What a viewer is told at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulseFrame {
    /// Whether it is everything, rather than what has changed.
    pub whole: bool,
    /// A JSON object in one line.
    pub json: String,
}

/// One viewer's stream.
pub struct Pulse {
    core: Arc<Core>,
    viewers: Viewers,
    next: Instant,
    whole: bool,
    peers: HashMap<String, u64>,
    requests: HashMap<u64, u64>,
    sections: [u64; 3],
    matrix: Option<Arc<Matrix>>,
    matrix_next: Instant,
}

/// How many viewers there are; clones share the count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Viewers(Arc<AtomicUsize>);

impl Viewers {
    fn enter(&self) -> Option<Self> {
        let more = |now: usize| (now < MOST_VIEWERS).then_some(now + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok().map(|_| self.clone())
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.viewers.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The router itself.
#[derive(Serialize)]
struct RouterGlance {
    version: &'static str,
    ready: bool,
    draining: bool,
    prefill_ready: usize,
    decode_ready: usize,
    running: usize,
    keeps_requests: bool,
    rate_seconds: u64,
}

#[derive(Serialize)]
struct HandOffs {
    live: usize,
    shown: Vec<crate::ledger::HandOffGlance>,
}

impl Proxy {
    /// The fleet as a stream.
    ///
    /// # Errors
    /// There are as many viewers as may be.
    pub fn pulse(&self) -> Result<Pulse, TooManyViewers> {
        let core = Arc::clone(&self.core);
        let viewers = core.viewers.enter().ok_or(TooManyViewers { limit: MOST_VIEWERS })?;
        let now = Instant::now();
        Ok(Pulse {
            core,
            viewers,
            next: now,
            whole: true,
            peers: HashMap::new(),
            requests: HashMap::new(),
            sections: [0; 3],
            matrix: None,
            matrix_next: now,
        })
    }
}

impl Pulse {
    /// The next frame; the first one comes at once, others when something has changed. None when the router
    /// leaves. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<PulseFrame> {
        loop {
            let closing = self.core.registry.closing().clone();
            tokio::select! {
                biased;
                () = closing.cancelled() => return None,
                () = tokio::time::sleep_until(self.next) => {}
            }
            let began = Instant::now();
            let whole = self.whole;
            let json = self.look();
            self.whole = false;
            self.next = Instant::now() + PAUSE.max(began.elapsed() * RELIEF);
            if let Some(json) = json {
                return Some(PulseFrame { whole, json });
            }
        }
    }

    /// What has changed since the last look.
    fn look(&mut self) -> Option<String> {
        let core = Arc::clone(&self.core);
        core.pool.learn(&core.registry);
        let mut frame = Writing::new(core.timelines.millis(Instant::now()));
        self.peers_into(&core, &mut frame);
        let ready = Proxy { core: Arc::clone(&core) }.readiness();
        let router = RouterGlance {
            version: env!("CARGO_PKG_VERSION"),
            ready: ready.is_ready(),
            draining: ready.draining,
            prefill_ready: ready.prefill_ready,
            decode_ready: ready.decode_ready,
            running: core.timelines.running(),
            keeps_requests: core.timelines.keeps(),
            rate_seconds: traffic::SECONDS,
        };
        frame.section("router", &router, &mut self.sections[0]);
        frame.section("pairs", &busiest(&core), &mut self.sections[1]);
        let (live, shown) = core.ledger.glance(MOST_HAND_OFFS, |at| core.timelines.millis(at));
        frame.section("hand_offs", &HandOffs { live, shown }, &mut self.sections[2]);
        self.requests_into(&core, &mut frame);
        self.matrix_into(&core, &mut frame);
        frame.finish()
    }

    fn peers_into(&mut self, core: &Core, frame: &mut Writing) {
        let all = core.pool.all();
        frame.begin_list("peers");
        for peer in &all {
            let hash = frame.item(&peer.glance(|at| core.timelines.millis(at)), self.peers.get(&peer.id));
            match self.peers.get_mut(&peer.id) {
                Some(known) => *known = hash,
                None => {
                    self.peers.insert(peer.id.clone(), hash);
                }
            }
        }
        frame.end_list();
        // As many as there are, or some have left.
        if self.peers.len() > all.len() {
            let here: std::collections::HashSet<&str> = all.iter().map(|peer| peer.id.as_str()).collect();
            let gone: Vec<String> =
                self.peers.keys().filter(|id| !here.contains(id.as_str())).cloned().collect();
            self.peers.retain(|id, _| here.contains(id.as_str()));
            frame.section("gone", &gone, &mut 0);
        }
    }

    fn requests_into(&mut self, core: &Core, frame: &mut Writing) {
        let newest = core.timelines.glances(MOST_REQUESTS);
        let mut seen = HashMap::with_capacity(newest.len());
        frame.begin_list("requests");
        for request in &newest {
            let hash = frame.item(request, self.requests.get(&request.number));
            seen.insert(request.number, hash);
        }
        frame.end_list();
        self.requests = seen;
    }

    fn matrix_into(&mut self, core: &Core, frame: &mut Writing) {
        let now = Instant::now();
        if now < self.matrix_next {
            return;
        }
        self.matrix_next = now + MATRIX_PAUSE;
        let (matrix, peers) = core.pool.judged();
        if self.matrix.as_ref().is_some_and(|known| Arc::ptr_eq(known, &matrix)) {
            return;
        }
        frame.section("matrix", &matrix.compact(&peers), &mut 0);
        self.matrix = Some(matrix);
    }
}

/// The pairs with the most hand-offs of late.
fn busiest(core: &Core) -> Vec<PairRate> {
    let mut pairs = Vec::new();
    for peer in core.pool.all() {
        peer.traffic.rates(&peer.name, &mut pairs);
    }
    let by_rate = |one: &PairRate, other: &PairRate| other.rate.total_cmp(&one.rate);
    let by_name =
        |one: &PairRate, other: &PairRate| (&one.prefill, &one.decode).cmp(&(&other.prefill, &other.decode));
    pairs.sort_unstable_by(|one, other| by_rate(one, other).then_with(|| by_name(one, other)));
    pairs.truncate(MOST_PAIRS);
    pairs
}

#[cfg(test)]
mod tests;

//! Engines in memory: their sockets, what they hold, and what goes wrong with them. A state that no engine
//! may come into is written down here and fails the test.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use kv_connector::protocol::params::Generation;
use parking_lot::Mutex;
use tokio::io::DuplexStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::engine;

/// splitmix64: the same choices for the same seed.
#[derive(Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    pub(crate) fn up_to(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.below(1_000_000) as f64 / 1e6)
    }
}

/// What an engine of version 2 must not be made to do, as it happens to others.
const CUT: &str = "gave blocks away that it still read into";

/// What a decode engine does with a request instead of what it should.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lapse {
    /// It never answers.
    Silence,
    /// It answers 503.
    Refusal,
}

/// One life of one engine.
#[derive(Debug)]
struct Life {
    number: u64,
    end: CancellationToken,
}

#[derive(Debug)]
struct State {
    generation: Generation,
    dice: Dice,
    faulty: bool,
    lives: BTreeMap<String, Life>,
    next: u64,
    /// Finished prompts whose blocks are kept: (engine, request).
    held: BTreeSet<(String, String)>,
    /// Reads of live requests.
    reading: Vec<(String, String)>,
    violations: Vec<String>,
    /// What comes of the next hand-offs that decode engines are sent.
    lapses: VecDeque<Lapse>,
}

/// All engines.
#[derive(Clone, Debug)]
pub(crate) struct World {
    state: Arc<Mutex<State>>,
    tasks: TaskTracker,
}

/// A read of blocks that goes on; dropped when its request is.
pub(super) struct Read {
    world: World,
    what: (String, String),
    /// Who reads.
    by: String,
    ended: bool,
}

impl Read {
    /// All has come.
    pub(super) fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        let mut state = self.world.state.lock();
        if let Some(at) = state.reading.iter().position(|other| *other == self.what) {
            state.reading.swap_remove(at);
        }
        if !self.ended && state.generation == Generation::V2 && state.is_alive(&self.by) {
            state.violations.push(format!("{} {CUT}: {:?}", self.by, self.what));
        }
    }
}

impl World {
    pub(super) fn new(generation: Generation, seed: u64, engines: &[&str]) -> Self {
        let state = State {
            generation,
            dice: Dice(seed),
            faulty: true,
            lives: BTreeMap::new(),
            next: 0,
            held: BTreeSet::new(),
            reading: Vec::new(),
            violations: Vec::new(),
            lapses: VecDeque::new(),
        };
        let world = Self { state: Arc::new(Mutex::new(state)), tasks: TaskTracker::new() };
        for engine in engines {
            world.restart(engine);
        }
        world
    }

    /// Ends an engine's life, with its connections and its blocks, and begins the next.
    pub(super) fn restart(&self, engine: &str) {
        let mut state = self.state.lock();
        let life = Life { number: state.next, end: CancellationToken::new() };
        state.next += 1;
        if let Some(last) = state.lives.insert(engine.to_owned(), life) {
            let id = format!("{engine}/{}", last.number);
            state.held.retain(|held| held.0 != id);
            last.end.cancel();
        }
    }

    /// Ends an engine's life; nobody is there until it begins another.
    pub(super) fn end(&self, engine: &str) {
        let gone = self.state.lock().lives.remove(engine);
        if let Some(gone) = gone {
            gone.end.cancel();
        }
    }

    pub(super) fn generation(&self) -> Generation {
        self.state.lock().generation
    }

    pub(super) fn stop_faults(&self) {
        self.state.lock().faulty = false;
    }

    /// The next hand-offs that decode engines are sent come to this, whichever engines these are.
    pub(super) fn lapse(&self, lapses: &[Lapse]) {
        self.state.lock().lapses.extend(lapses);
    }

    pub(super) fn next_lapse(&self) -> Option<Lapse> {
        self.state.lock().lapses.pop_front()
    }

    pub(super) fn held(&self) -> Vec<(String, String)> {
        self.state.lock().held.iter().cloned().collect()
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.state.lock().violations.clone()
    }

    /// Whether something with this chance goes wrong now.
    pub(super) fn fails(&self, percent: u64) -> bool {
        let mut state = self.state.lock();
        state.faulty && state.dice.percent(percent)
    }

    pub(super) fn up_to(&self, most: Duration) -> Duration {
        self.state.lock().dice.up_to(most)
    }

    /// A prompt is computed: its blocks are kept until somebody has told, or the engine ends.
    pub(super) fn finished(&self, engine_id: &str, request: &str) {
        let mut state = self.state.lock();
        if state.is_alive(engine_id) {
            state.held.insert((engine_id.to_owned(), request.to_owned()));
        }
    }

    /// A decode engine begins to read, perhaps what will be discarded; none if the blocks' engine has ended.
    pub(super) fn read(&self, by: &str, engine_id: &str, request: &str, discarded: bool) -> Option<Read> {
        let read = |what| Some(Read { world: self.clone(), what, by: by.to_owned(), ended: false });
        let mut state = self.state.lock();
        if !state.is_alive(engine_id) {
            return None;
        }
        let what = (engine_id.to_owned(), request.to_owned());
        if discarded {
            drop(state);
            return read(Default::default());
        }
        if !state.held.contains(&what) {
            state.violations.push(format!("read after they were free: {what:?}"));
        }
        if state.reading.contains(&what) {
            state.violations.push(format!("read by two at a time: {what:?}"));
        }
        state.reading.push(what.clone());
        drop(state);
        read(what)
    }

    /// A prefill engine is told that its blocks are read, or will not be.
    pub(super) fn told(&self, engine_id: &str, request: &str) {
        let mut state = self.state.lock();
        let what = (engine_id.to_owned(), request.to_owned());
        if state.held.remove(&what) && state.reading.contains(&what) {
            state.violations.push(format!("free while a live request read them: {what:?}"));
        }
    }

    /// A connection to an engine.
    pub(crate) async fn dial(&self, uri: &Uri) -> Option<DuplexStream> {
        let engine = uri.host()?.to_owned();
        if self.fails(1) {
            // Nobody answers.
            tokio::time::sleep(Duration::from_secs(2)).await;
            return None;
        }
        if self.fails(1) {
            return None;
        }
        let (id, end) = {
            let state = self.state.lock();
            let life = state.lives.get(&engine)?;
            (format!("{engine}/{}", life.number), life.end.clone())
        };
        let (near, far) = tokio::io::duplex(16 << 10);
        let world = self.clone();
        let served = async move {
            let service =
                service_fn(|request| engine::answer(world.clone(), engine.clone(), id.clone(), request));
            let connection =
                http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(far), service);
            tokio::select! {
                // What ends a connection is the other side's doing or the model's.
                _ = connection => {}
                () = end.cancelled() => {}
            }
        };
        self.tasks.spawn(served);
        Some(near)
    }
}

impl State {
    fn is_alive(&self, engine_id: &str) -> bool {
        let known =
            engine_id.split_once('/').and_then(|(engine, number)| Some((self.lives.get(engine)?, number)));
        known.is_some_and(|(life, number)| life.number.to_string() == number)
    }
}

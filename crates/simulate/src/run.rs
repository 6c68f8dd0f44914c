//! One run: requests come as the trace says, the router chooses, engines step, and each of that happens at its
//! moment. The router is told of everything when it would have heard of it.

mod queue;
mod tally;

use std::collections::HashSet;
use std::time::Duration;

use kvbaton_proxy::simulated::{
    Admitted, Permit, Routed, SimulatedPeer, SimulatedPrompt, SimulatedRouter, Turn,
};
use kvbaton_proxy::{PeerSpecError, Role, Settings};
use thiserror::Error;

use crate::blocks::Piece;
use crate::engine::{Engine, Kept, Pull, Token, Work};
use crate::fleet::Fleet;
use crate::plan::Plan;
use crate::report::Report;
use crate::trace::{Request, Trace};
use queue::{Moment, Moments};
use tally::Tally;

/// What a request must meet to be good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Goal {
    /// Longest time until its first token.
    pub ttft: Option<Duration>,
    /// Longest time between its tokens, on average.
    pub itl: Option<Duration>,
}

/// A run that cannot begin.
#[derive(Debug, Error)]
pub enum RunError {
    /// An engine's name cannot be used.
    #[error(transparent)]
    Name(#[from] PeerSpecError),
}

/// Runs a trace over a fleet.
///
/// # Errors
/// The fleet's engines cannot be named as they are.
pub fn run(plan: &Plan, fleet: &Fleet, trace: &Trace, seed: u64, goal: Goal) -> Result<Report, RunError> {
    let mut world = World::new(plan, fleet, trace, seed, goal)?;
    world.run();
    Ok(world.tally.report(plan, trace, &world.names, &world.engines))
}

/// A request between its coming and its end.
struct Live {
    permit: Option<Permit>,
    turn: Option<Turn>,
    routed: Option<Routed>,
    kept: Option<Vec<Piece>>,
    cached: u32,
    first: Duration,
    last: Duration,
}

struct World<'a> {
    fleet: &'a Fleet,
    trace: &'a Trace,
    router: SimulatedRouter,
    engines: Vec<Engine>,
    names: Vec<(String, Role)>,
    /// Until when an engine's link is in use.
    links: Vec<Duration>,
    met: HashSet<(usize, usize)>,
    moments: Moments,
    live: Vec<Option<Box<Live>>>,
    left: usize,
    text: Vec<u8>,
    tally: Tally,
    // Reused from step to step.
    tokens: Vec<Token>,
    kept: Vec<Kept>,
    pulls: Vec<Pull>,
}

impl<'a> World<'a> {
    fn new(plan: &Plan, fleet: &'a Fleet, trace: &'a Trace, seed: u64, goal: Goal) -> Result<Self, RunError> {
        let settings = Settings {
            routing: plan.routing.clone(),
            disaggregation: plan.disaggregation.clone(),
            admission: fleet.admission.clone(),
            ..Settings::default()
        };
        let (mut peers, mut engines, mut names) = (Vec::new(), Vec::new(), Vec::new());
        for (at, group) in fleet.engines.iter().enumerate() {
            let of_role = if group.role == Role::Prefill { "prefill" } else { "decode" };
            let base = group.name.clone().unwrap_or_else(|| format!("{of_role}-{}", at + 1));
            for number in 1..=group.count {
                let name = format!("{base}-{number}");
                let keeps = group.role == Role::Prefill;
                engines.push(Engine::new(group.speed.clone(), trace.block_tokens, keeps));
                names.push((name.clone(), group.role));
                let kv_bytes_per_token = group.speed.kv_bytes_per_token;
                let labels = group.labels.clone();
                peers.push(SimulatedPeer { role: group.role, name, labels, kv_bytes_per_token });
            }
        }
        let router = SimulatedRouter::new(settings, &fleet.model, peers, seed)?;
        Ok(Self {
            fleet,
            trace,
            router,
            links: vec![Duration::ZERO; engines.len()],
            engines,
            names,
            met: HashSet::new(),
            moments: Moments::default(),
            live: trace.requests.iter().map(|_| None).collect(),
            left: trace.requests.len(),
            text: Vec::new(),
            tally: Tally::new(goal),
            tokens: Vec::new(),
            kept: Vec::new(),
            pulls: Vec::new(),
        })
    }

    fn run(&mut self) {
        if let Some(first) = self.trace.requests.first() {
            self.moments.at(first.at, Moment::Comes(0));
        }
        let interval = self.fleet.metrics_interval;
        if !interval.is_zero() {
            let gap = interval / 2 / u32::try_from(self.engines.len()).unwrap_or(u32::MAX);
            for engine in 0..self.engines.len() {
                self.moments.at(gap * engine as u32, Moment::Page(engine));
            }
        }
        while self.left > 0
            && let Some((now, moment)) = self.moments.next()
        {
            self.happens(now, moment);
        }
    }

    fn happens(&mut self, now: Duration, moment: Moment) {
        match moment {
            Moment::Comes(request) => self.comes(now, request),
            Moment::Late(request) => self.late(request),
            Moment::ToPrefill(request) => self.reaches_prefill(now, request),
            Moment::Prefilled(request) => self.prefilled(now, request),
            Moment::ToDecode(request) => self.reaches_decode(now, request),
            Moment::Began(request) => {
                self.router.tell_time(now);
                if let Some(routed) = self.live_routed(request) {
                    let mut routed = routed;
                    self.router.began(&mut routed);
                    self.give_back(request, routed);
                }
            }
            Moment::Ended(request) => self.ended(now, request),
            Moment::Stepped(engine) => self.stepped(now, engine),
            Moment::Pulled { engine, seat, request } => self.pulled(now, engine, seat, request),
            Moment::Page(engine) => {
                self.router.tell_time(now);
                self.router.page_read(engine, &self.engines[engine].page());
                self.moments.at(now + self.fleet.metrics_interval, Moment::Page(engine));
            }
        }
    }

    fn live_routed(&mut self, request: u32) -> Option<Routed> {
        self.live[request as usize].as_mut()?.routed.take()
    }

    fn give_back(&mut self, request: u32, routed: Routed) {
        if let Some(live) = &mut self.live[request as usize] {
            live.routed = Some(routed);
        }
    }

    fn request(&self, request: u32) -> &'a Request {
        &self.trace.requests[request as usize]
    }

    fn prompt_bytes(&self, request: u32) -> usize {
        (f64::from(self.request(request).input) * self.fleet.bytes_per_token).round() as usize
    }

    fn comes(&mut self, now: Duration, request: u32) {
        if let Some(next) = self.trace.requests.get(request as usize + 1) {
            self.moments.at(next.at, Moment::Comes(request + 1));
        }
        self.router.tell_time(now);
        let zero = Duration::ZERO;
        let mut live =
            Live { permit: None, turn: None, routed: None, kept: None, cached: 0, first: zero, last: zero };
        match self.router.admit(u64::from(request), self.prompt_bytes(request)) {
            Admitted::Runs(permit) => {
                live.permit = Some(permit);
                self.live[request as usize] = Some(Box::new(live));
                self.starts(now, request);
            }
            Admitted::Waits(turn) => {
                live.turn = Some(turn);
                self.live[request as usize] = Some(Box::new(live));
                self.moments.at(now + self.router.longest_wait(), Moment::Late(request));
            }
            Admitted::Refused => {
                self.tally.refused += 1;
                self.left -= 1;
            }
        }
    }

    fn late(&mut self, request: u32) {
        let Some(turn) = self.live[request as usize].as_mut().and_then(|live| live.turn.take()) else {
            return;
        };
        if self.router.withdraw(turn) {
            self.live[request as usize] = None;
            self.tally.refused += 1;
            self.left -= 1;
        }
    }

    /// Their turn has come.
    fn woken(&mut self, now: Duration, woken: Vec<u64>) {
        for request in woken {
            let Some(live) = &mut self.live[request as usize] else { continue };
            if let Some(turn) = live.turn.take() {
                live.permit = Some(self.router.take(turn));
                self.starts(now, request as u32);
            }
        }
    }

    fn starts(&mut self, now: Duration, request: u32) {
        let of = self.request(request);
        let bytes = self.prompt_bytes(request);
        if self.router.reads_prompts() {
            write_prompt(&mut self.text, of, self.trace.block_tokens, bytes);
        }
        let session = of.session.map(|session| session.to_string());
        let cached = self.router.hears_of_caches().then(|| self.cached(of));
        let prompt = SimulatedPrompt {
            bytes,
            text: if self.router.reads_prompts() { &self.text } else { &[] },
            session: session.as_ref().map(String::as_bytes),
        };
        let routed = self.router.choose(&prompt, u64::from(of.input), cached.as_deref());
        let all = u64::from(of.input) + u64::from(of.output);
        let fits = |routed: &Routed| {
            let prefill =
                routed.prefill.is_none_or(|place| self.engines[place].has_room_for(u64::from(of.input) + 1));
            prefill && self.engines[routed.decode].has_room_for(all)
        };
        match routed {
            Some(routed) if fits(&routed) => {
                self.tally.decided(routed.decision);
                let to = routed.prefill.unwrap_or(routed.decode);
                let arrives = now + self.engines[to].settings.network;
                let leg = if routed.prefill.is_some() {
                    Moment::ToPrefill(request)
                } else {
                    Moment::ToDecode(request)
                };
                self.moments.at(arrives, leg);
                self.give_back(request, routed);
            }
            routed => {
                self.tally.too_long += 1;
                self.left -= 1;
                let permit = self.live[request as usize].take().and_then(|live| live.permit);
                if let Some(permit) = permit {
                    let woken = self.router.ended(routed, &permit);
                    self.woken(now, woken);
                }
            }
        }
    }

    /// Who has cached how many of a prompt's tokens.
    fn cached(&self, of: &Request) -> Vec<(usize, u64)> {
        let cached = self.engines.iter().map(|engine| u64::from(engine.cached(&of.blocks, of.input)));
        cached.enumerate().filter(|(_, tokens)| *tokens > 0).collect()
    }

    fn reaches_prefill(&mut self, now: Duration, request: u32) {
        let Some(engine) = self.routed(request).and_then(|routed| routed.prefill) else { return };
        let of = self.request(request);
        let work = Work { request, prompt: of.input, output: 1, names: of.blocks.clone(), pulls: false };
        self.engines[engine].submit(work);
        self.step(now, engine);
    }

    fn routed(&self, request: u32) -> Option<&Routed> {
        self.live[request as usize].as_ref()?.routed.as_ref()
    }

    /// The prefill engine's answer is here.
    fn prefilled(&mut self, now: Duration, request: u32) {
        self.router.tell_time(now);
        let tokens = u64::from(self.request(request).input);
        let Some(live) = &mut self.live[request as usize] else { return };
        let (Some(routed), Some(permit)) = (&mut live.routed, &mut live.permit) else { return };
        let woken = self.router.prefilled(routed, permit, tokens, u64::from(live.cached));
        let arrives = now + self.engines[routed.decode].settings.network;
        self.moments.at(arrives, Moment::ToDecode(request));
        self.woken(now, woken);
    }

    fn reaches_decode(&mut self, now: Duration, request: u32) {
        let Some((engine, pulls)) =
            self.routed(request).map(|routed| (routed.decode, routed.prefill.is_some()))
        else {
            return;
        };
        let of = self.request(request);
        let work = Work { request, prompt: of.input, output: of.output, names: of.blocks.clone(), pulls };
        self.engines[engine].submit(work);
        self.step(now, engine);
    }

    /// Lets an engine begin its next step, if it is idle.
    fn step(&mut self, now: Duration, engine: usize) {
        if self.engines[engine].is_stepping {
            return;
        }
        if let Some(takes) = self.engines[engine].begin(&mut self.pulls) {
            self.moments.at(now + takes, Moment::Stepped(engine));
        }
        for pull in std::mem::take(&mut self.pulls) {
            self.pull(now, engine, pull);
        }
    }

    fn pull(&mut self, now: Duration, engine: usize, pull: Pull) {
        let Some(from) = self.routed(pull.request).and_then(|routed| routed.prefill) else { return };
        let (source, reader) = (&self.engines[from].settings, &self.engines[engine].settings);
        let bytes = u64::from(pull.tokens) * source.kv_bytes_per_token;
        let pace = source.transfer_bytes_per_second.min(reader.transfer_bytes_per_second);
        let shaken = if self.met.insert((from, engine)) { reader.handshake } else { Duration::ZERO };
        let begins = (now + shaken).max(self.links[from]).max(self.links[engine]);
        let ends = begins + reader.transfer_start + Duration::from_secs_f64(bytes as f64 / pace);
        (self.links[from], self.links[engine]) = (ends, ends);
        self.tally.moved_bytes += bytes;
        self.moments.at(ends, Moment::Pulled { engine, seat: pull.seat, request: pull.request });
    }

    fn pulled(&mut self, now: Duration, engine: usize, seat: usize, request: u32) {
        self.engines[engine].pulled(seat);
        let source = self.routed(request).and_then(|routed| routed.prefill);
        let kept = self.live[request as usize].as_mut().and_then(|live| live.kept.take());
        if let (Some(source), Some(kept)) = (source, kept) {
            self.engines[source].was_read(&kept);
            self.step(now, source);
        }
        self.step(now, engine);
    }

    fn stepped(&mut self, now: Duration, engine: usize) {
        let (mut tokens, mut kept) = (std::mem::take(&mut self.tokens), std::mem::take(&mut self.kept));
        self.engines[engine].end(&mut tokens, &mut kept);
        let arrives = now + self.engines[engine].settings.network;
        for kept in kept.drain(..) {
            if let Some(live) = &mut self.live[kept.request as usize] {
                live.kept = Some(kept.pieces);
            }
        }
        let prefills = self.names[engine].1 == Role::Prefill;
        for token in tokens.drain(..) {
            let Some(live) = &mut self.live[token.request as usize] else { continue };
            if prefills {
                live.cached = token.cached;
                self.moments.at(arrives, Moment::Prefilled(token.request));
                continue;
            }
            if token.number == 1 {
                live.first = arrives;
                if live.routed.as_ref().is_some_and(|routed| routed.prefill.is_none()) {
                    live.cached = token.cached;
                }
                self.moments.at(arrives, Moment::Began(token.request));
            } else {
                self.tally.itl.add(arrives - live.last);
            }
            live.last = arrives;
            if token.ends {
                self.moments.at(arrives, Moment::Ended(token.request));
            }
        }
        (self.tokens, self.kept) = (tokens, kept);
        self.step(now, engine);
    }

    fn ended(&mut self, now: Duration, request: u32) {
        self.router.tell_time(now);
        let Some(live) = self.live[request as usize].take() else { return };
        self.left -= 1;
        self.tally.ended(self.request(request), live.first, live.last, live.cached);
        if let Some(permit) = live.permit {
            let woken = self.router.ended(live.routed, &permit);
            self.woken(now, woken);
        }
    }
}

/// Writes a prompt in which equal blocks are equal bytes.
fn write_prompt(text: &mut Vec<u8>, of: &Request, block_tokens: u32, bytes: usize) {
    text.clear();
    let of_block = (bytes as f64 / f64::from(of.input) * f64::from(block_tokens)).round().max(1.0) as usize;
    for name in &of.blocks {
        let end = (text.len() + of_block).min(bytes);
        let mut word = name.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        while text.len() < end {
            word = word.rotate_left(23).wrapping_mul(0xD134_2543_DE82_EF95);
            text.extend_from_slice(&word.to_le_bytes());
        }
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests;

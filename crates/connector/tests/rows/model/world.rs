//! Several prefill and decode engines, a router between them, and everything that can go wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_connector::ClockTime;
use kv_connector::protocol::{KvTransferParams, TransferMode};
use kv_connector::scheduler::{AllocatedBlocks, FinishStatus};
use kv_connector::transport::TransferState;
use kv_connector::transport::loopback::{Call, Fabric};
use kv_connector::worker::{HandshakeFailure, HandshakeJob, RankReply, TransferResults};

use super::hosts::{Host, Request, State, prefill_params};

const BLOCK_TOKENS: usize = 16;
const PREFILLS: usize = 2;
const DECODES: usize = 2;

/// Deterministic random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        if items.is_empty() { None } else { Some(&items[self.below(items.len())]) }
    }
}

/// A finished prefill's answer, to be given to one decode engine.
struct HandOff {
    params: KvTransferParams,
    source: (String, String),
    blocks: usize,
    fill: u8,
}

pub(super) struct World {
    seed: u64,
    random: Random,
    fabric: Fabric,
    mode: TransferMode,
    sizes: (u32, u32),
    hosts: Vec<Host>,
    jobs: Vec<(usize, usize, HandshakeJob)>,
    hand_offs: Vec<HandOff>,
    /// Prefill requests whose blocks were given up unread: whoever reads them now reads garbage.
    expired: BTreeSet<(String, String)>,
    reported: BTreeMap<(String, String), u32>,
    now: ClockTime,
    next: u64,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mode = if random.below(4) == 0 { TransferMode::Push } else { TransferMode::Pull };
        let sizes = [(1, 1), (1, 2), (2, 1), (2, 2)][random.below(4)];
        let mut world = Self {
            seed,
            random,
            fabric: Fabric::default(),
            mode,
            sizes,
            hosts: Vec::new(),
            jobs: Vec::new(),
            hand_offs: Vec::new(),
            expired: BTreeSet::new(),
            reported: BTreeMap::new(),
            now: Duration::from_secs(1000),
            next: 0,
        };
        for slot in 0..PREFILLS + DECODES {
            let host = world.build(slot);
            world.hosts.push(host);
        }
        world
    }

    fn build(&mut self, slot: usize) -> Host {
        self.next += 1;
        let (name, tp) = if slot < PREFILLS { ("p", self.sizes.1) } else { ("d", self.sizes.0) };
        let port = 5600 + slot as u16;
        Host::new(&self.fabric, &format!("{name}{}", self.next), port, tp, self.mode)
    }

    pub(super) fn run(mut self, steps: u64) {
        let seed = self.seed;
        let run = std::panic::AssertUnwindSafe(move || {
            for _ in 0..steps {
                self.act();
            }
            self.settle();
        });
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("the world of KVBATON_MODEL_SEED={seed} broke an invariant");
            std::panic::resume_unwind(panic);
        }
    }

    fn act(&mut self) {
        let prefill = self.random.below(PREFILLS);
        let decode = PREFILLS + self.random.below(DECODES);
        let any = self.random.below(PREFILLS + DECODES);
        match self.random.below(100) {
            0..12 => self.begin_prefill(prefill),
            12..24 => self.end_prefill(prefill),
            24..36 => self.begin_decode(decode),
            36..42 => self.end_decode(decode),
            42..74 => self.step(any),
            74..84 => self.answer_handshake(),
            84..91 => self.now += Duration::from_millis(self.random.next() % 4000),
            91..98 => self.break_something(any),
            98 => self.hosts[any].clear_faults(),
            _ => {
                if self.random.below(20) == 0 {
                    self.replace(any);
                }
            }
        }
    }

    fn name(&mut self, prefix: &str) -> String {
        self.next += 1;
        format!("{prefix}-{}", self.next)
    }

    fn begin_prefill(&mut self, slot: usize) {
        let count = 1 + self.random.below(3);
        let name = self.name("prefill");
        let fill = 1 + (self.next % 250) as u8;
        let host = &mut self.hosts[slot];
        let Some(blocks) = host.allocate(count) else { return };
        host.fill(&blocks, fill);
        host.scheduler.on_new_request(&name, count * BLOCK_TOKENS, Some(prefill_params()));
        let allocated = AllocatedBlocks { unhashed: vec![blocks.clone()], cached: vec![0] };
        host.scheduler.update_after_alloc(&name, &allocated, 0).unwrap();
        let request = Request { state: State::Running, blocks, expected: None, source: None, fill };
        host.requests.insert(name, request);
    }

    fn end_prefill(&mut self, slot: usize) {
        let running = self.hosts[slot].with_state(State::Running);
        let Some(name) = self.random.pick(&running).cloned() else { return };
        let aborted = self.random.below(6) == 0;
        let status = if aborted { FinishStatus::Aborted } else { FinishStatus::LengthCapped };
        let host = &mut self.hosts[slot];
        let (blocks, fill) = (host.requests[&name].blocks.clone(), host.requests[&name].fill);
        let tokens = (blocks.len() * BLOCK_TOKENS) as u64;
        let end =
            host.scheduler.request_finished(&name, status, std::slice::from_ref(&blocks), tokens, self.now);
        assert_eq!(end.delay_free, !aborted);
        if aborted {
            self.free(slot, &name, false);
            return;
        }
        host.requests.get_mut(&name).unwrap().state = State::Kept;
        let source = (host.engine_id.clone(), name);
        // Some answers get lost: only the lease frees their blocks.
        if self.random.below(8) > 0 {
            self.hand_offs.push(HandOff { params: end.params.unwrap(), source, blocks: blocks.len(), fill });
        }
    }

    fn begin_decode(&mut self, slot: usize) {
        if self.hand_offs.is_empty() {
            return;
        }
        let hand_off = self.hand_offs.swap_remove(self.random.below(self.hand_offs.len()));
        let name = match self.mode {
            TransferMode::Pull => self.name("decode"),
            // Both legs carry one id, to which each engine appends its own digits.
            TransferMode::Push => hand_off.source.1.clone(),
        };
        let (cached, aborts) = (self.random.below(hand_off.blocks + 1), self.random.below(10) == 0);
        let host = &mut self.hosts[slot];
        let tokens = hand_off.blocks * BLOCK_TOKENS;
        if host.requests.contains_key(&name) {
            return;
        }
        host.scheduler.on_new_request(&name, tokens, Some(hand_off.params));
        let blocks = if aborts { None } else { host.allocate(hand_off.blocks) };
        let Some(blocks) = blocks else {
            host.scheduler.request_finished(&name, FinishStatus::Aborted, &[], 0, self.now);
            return;
        };
        let external = host.scheduler.matched_tokens(&name, cached * BLOCK_TOKENS).tokens;
        assert_eq!(external, tokens - cached * BLOCK_TOKENS);
        let allocated = AllocatedBlocks { unhashed: vec![blocks[cached..].to_vec()], cached: vec![cached] };
        host.scheduler.update_after_alloc(&name, &allocated, external).unwrap();
        let parked = external > 0;
        let request = Request {
            state: if parked { State::Parked } else { State::Running },
            expected: parked.then_some((blocks.len() - cached, hand_off.fill)),
            source: Some(hand_off.source),
            fill: 0,
            blocks,
        };
        host.requests.insert(name, request);
    }

    fn end_decode(&mut self, slot: usize) {
        let host = &mut self.hosts[slot];
        let candidates: Vec<String> =
            [host.with_state(State::Running), host.with_state(State::Parked)].concat();
        let Some(name) = self.random.pick(&candidates).cloned() else { return };
        let state = host.requests[&name].state;
        if state == State::Parked && self.random.below(4) > 0 {
            return;
        }
        let end = host.scheduler.request_finished(&name, FinishStatus::Aborted, &[], 0, self.now);
        assert!(!end.delay_free);
        if state == State::Parked {
            // Its blocks may still be written: they stay until the end is reported.
            host.requests.get_mut(&name).unwrap().state = State::Kept;
        } else {
            self.free(slot, &name, false);
        }
    }

    fn step(&mut self, slot: usize) {
        let now = self.now;
        let (results, invalid) = self.hosts[slot].step(now);
        for (index, rank) in self.hosts[slot].ranks.iter_mut().enumerate() {
            self.jobs.extend(rank.worker.take_handshake_jobs().into_iter().map(|job| (slot, index, job)));
        }
        self.apply(slot, results, &invalid);
    }

    fn apply(&mut self, slot: usize, results: TransferResults, invalid: &BTreeSet<u64>) {
        for name in &results.finished_sending {
            self.report(slot, name);
            assert_eq!(self.hosts[slot].requests[name].state, State::Kept, "{name} was sent");
            self.hosts[slot].scheduler.on_sent(name);
            let expired = self.hosts[slot].is_overdue(name);
            if expired {
                self.expired.insert((self.hosts[slot].engine_id.clone(), name.clone()));
            }
            self.free(slot, name, expired);
        }
        let mut failed_blocks = BTreeSet::new();
        for name in &results.finished_recving {
            self.report(slot, name);
            let failed = results.failed_recving.contains(name);
            let host = &mut self.hosts[slot];
            host.scheduler.on_received(name);
            let request = host.requests.get_mut(name).unwrap_or_else(|| panic!("{name} is unknown"));
            let (count, fill) = request.expected.take().unwrap_or_else(|| panic!("{name} was not awaited"));
            let received = request.blocks[request.blocks.len() - count..].to_vec();
            let source = request.source.clone().unwrap();
            let state = std::mem::replace(&mut request.state, State::Running);
            // vLLM's push cannot tell a decode rank that could not announce whether a sibling did; where
            // several share a prefill rank, it may be written although its receive has failed.
            let unheard = failed && self.mode == TransferMode::Push && self.sizes.0 > self.sizes.1;
            if failed {
                failed_blocks.extend(received);
            } else if !self.expired.contains(&source) {
                assert!(host.holds(&received, fill), "{name} did not get what {source:?} held");
            }
            if state == State::Kept {
                self.free(slot, name, unheard);
            } else if failed {
                host.scheduler.request_finished(name, FinishStatus::Failed, &[], 0, self.now);
                self.free(slot, name, unheard);
            }
        }
        // With several ranks the invalid blocks of a failure show before the request does.
        if self.sizes.0 == 1 {
            assert!(invalid.is_subset(&failed_blocks), "{invalid:?} of {failed_blocks:?}");
        }
    }

    fn report(&mut self, slot: usize, name: &str) {
        let key = (self.hosts[slot].engine_id.clone(), name.to_owned());
        let count = self.reported.entry(key).or_insert(0);
        *count += 1;
        assert_eq!(*count, 1, "{name} is reported twice");
    }

    /// Frees a request's blocks, unless the model knows someone who may still touch them.
    fn free(&mut self, slot: usize, name: &str, expired: bool) {
        let host = &mut self.hosts[slot];
        let engine = host.engine_id.clone();
        let blocks = host.release(name);
        assert!(!host.moves_locally(&blocks), "{name}: freed under a transfer of its own engine");
        // A peer that reads past the lease cannot be stopped: the protocol's own limit.
        if !expired {
            let touched = self.hosts.iter().any(|other| other.moves_remotely(&engine, name, &blocks));
            assert!(
                !touched,
                "{engine} {name}: freed under a transfer of another engine, {:?} {:?}",
                self.mode, self.sizes
            );
        }
    }

    fn answer_handshake(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let (slot, index, job) = self.jobs.swap_remove(self.random.below(self.jobs.len()));
        let lost = self.random.below(12) == 0;
        let peer = self.hosts.iter().find(|host| !host.dead && host.engine_id == job.engine_id);
        let replies = match peer {
            Some(peer) if !lost => Ok(job
                .ranks
                .iter()
                .map(|&(pp_rank, tp_rank)| RankReply {
                    pp_rank,
                    tp_rank,
                    payload: peer.ranks[tp_rank as usize].worker.handshake_payload(),
                    clock: None,
                })
                .collect()),
            _ => Err(HandshakeFailure::Timeout),
        };
        let worker = &mut self.hosts[slot].ranks[index].worker;
        // A refused peer is one of the outcomes.
        let _connected_or_not = worker.complete_handshake(&job.engine_id, replies, self.now);
        self.hosts[slot].follow_journals();
    }

    fn break_something(&mut self, slot: usize) {
        let rank = self.random.below(self.hosts[slot].ranks.len());
        let (choice, times) = (self.random.below(14), 1 + self.random.below(3));
        let faults = &self.hosts[slot].ranks[rank].faults;
        match choice {
            0 => faults.fail_next(Call::AddRemoteAgent, 1),
            1 => faults.fail_next(Call::PrepareLocal, 1),
            2 => faults.fail_next(Call::PrepareRemote, 1),
            3 => faults.fail_next(Call::MakeTransfer, times),
            4 => faults.fail_next(Call::Post, times),
            5 => faults.fail_next(Call::Poll, times),
            6 => faults.fail_next(Call::ReleaseTransfer, times),
            7 => faults.fail_next(Call::SendNotification, times),
            8 => faults.fail_next_transfers(times),
            9 => faults.hold_transfers(true),
            10 => faults.hold_transfers(false),
            11 => faults.lose_agents(times == 1),
            _ => faults.script_transfers([vec![TransferState::InProgress; times]]),
        }
    }

    /// Ends an engine; another one takes over its address.
    fn replace(&mut self, slot: usize) {
        let gone = self.hosts[slot].engine_id.clone();
        for name in self.hosts[slot].requests.keys() {
            self.expired.insert((gone.clone(), name.clone()));
        }
        self.hosts[slot].shutdown();
        self.jobs.retain(|(owner, _, _)| *owner != slot);
        self.hosts[slot] = self.build(slot);
    }

    /// Nothing goes wrong any more: everything has to come to its end.
    fn settle(&mut self) {
        self.hosts.iter().for_each(Host::clear_faults);
        for round in 0..12 {
            self.hosts.iter().for_each(Host::clear_faults);
            while !self.jobs.is_empty() {
                self.answer_handshake();
            }
            (0..self.hosts.len()).for_each(|slot| self.step(slot));
            self.now += Duration::from_secs(if round < 6 { 1 } else { 70 });
        }
        for slot in 0..self.hosts.len() {
            let host = &self.hosts[slot];
            if self.mode == TransferMode::Pull || slot < PREFILLS {
                assert_eq!(
                    host.with_state(State::Kept),
                    Vec::<String>::new(),
                    "{} {:?}",
                    host.engine_id,
                    self.mode
                );
                assert_eq!(host.with_state(State::Parked), Vec::<String>::new(), "{}", host.engine_id);
            }
            self.hosts[slot].shutdown();
        }
    }
}

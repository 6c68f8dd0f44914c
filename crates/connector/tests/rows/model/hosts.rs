//! A host as an engine core is one: a request table, a block pool, the halves of the connector.

use std::collections::{BTreeMap, BTreeSet};

use kv_connector::ClockTime;
use kv_connector::aggregate::{Aggregator, WorkerReport};
use kv_connector::protocol::{Generation, KvTransferParams, TransferMode};
use kv_connector::scheduler::{Scheduler, SchedulerConfig};
use kv_connector::transport::ListId;
use kv_connector::transport::loopback::{Call, Event, Fabric};
use kv_connector::transport::{TransferId, TransferOp};
use kv_connector::worker::{TransferResults, WorkerConfig};

use crate::support::{BLOCKS, Engine, Rank, at};

/// Where a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Running,
    /// Waits for its blocks; has to be reported exactly once.
    Parked,
    /// Ended while parked or while others may read it; has to be reported exactly once.
    Kept,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) state: State,
    pub(super) blocks: Vec<u64>,
    /// Blocks at the end of `blocks` that are filled from elsewhere, and what they must hold then.
    pub(super) expected: Option<(usize, u8)>,
    /// The prefill request it is filled from.
    pub(super) source: Option<(String, String)>,
    pub(super) fill: u8,
}

#[derive(Debug)]
struct Moving {
    local: BTreeSet<u64>,
    remote_agent: String,
    /// The request at the remote engine.
    remote_request: String,
    remote: BTreeSet<u64>,
    ended: bool,
}

/// The engine an agent belongs to.
fn engine_of(agent: &str) -> &str {
    agent.rsplit_once('-').unwrap().0
}

/// Handles one worker was given and has not released.
#[derive(Debug, Default)]
pub(super) struct Handles {
    transfers: BTreeMap<TransferId, Moving>,
    lists: BTreeMap<ListId, Option<String>>,
    agents: BTreeSet<String>,
}

impl Handles {
    fn follow(&mut self, events: Vec<Event>, requests: &BTreeMap<String, Request>, free: &BTreeSet<u64>) {
        for event in events {
            match event {
                Event::Prepared { list, agent, .. } => {
                    self.lists.insert(list, agent.map(|agent| agent.0));
                }
                Event::Made { transfer, op, local, remote, notification } => {
                    let message = String::from_utf8(notification.unwrap()).unwrap();
                    let remote_request = message.rsplit_once(':').unwrap().0.to_owned();
                    let remote_agent = self.lists[&remote.0].clone().unwrap();
                    let blocks =
                        |ids: Vec<u64>| -> BTreeSet<u64> { ids.into_iter().map(|id| id % BLOCKS).collect() };
                    let (local, remote) = (blocks(local.1), blocks(remote.1));
                    assert!(
                        local.is_disjoint(free),
                        "{op:?} for {remote_request} at {remote_agent} uses free blocks {local:?}"
                    );
                    if op == TransferOp::Write {
                        // Both legs carry one id, so the writer's own request has it, too.
                        assert!(
                            requests.contains_key(&remote_request),
                            "{remote_request} is written too late"
                        );
                    }
                    let moving = Moving { local, remote_agent, remote_request, remote, ended: false };
                    assert!(self.transfers.insert(transfer, moving).is_none());
                }
                Event::Ended(transfer) => self.transfers.get_mut(&transfer).unwrap().ended = true,
                Event::Released(transfer) => assert!(self.transfers.remove(&transfer).is_some()),
                Event::ReleasedList(list) => assert!(self.lists.remove(&list).is_some()),
                Event::AddedAgent(agent) => {
                    self.agents.insert(agent.0);
                }
                Event::RemovedAgent(agent) => {
                    let live = |moving: &Moving| !moving.ended && moving.remote_agent == agent.0;
                    assert!(!self.transfers.values().any(live), "{} was removed under a transfer", agent.0);
                    assert!(self.agents.remove(&agent.0));
                }
                Event::Notified(..) | Event::Deregistered(_) => {}
            }
        }
    }
}

pub(super) struct Host {
    pub(super) engine_id: String,
    pub(super) scheduler: Scheduler,
    pub(super) ranks: Vec<Rank>,
    pub(super) handles: Vec<Handles>,
    aggregator: Aggregator,
    /// Requests whose lease has run out at some rank.
    overdue: BTreeSet<String>,
    free: BTreeSet<u64>,
    pub(super) requests: BTreeMap<String, Request>,
    pub(super) dead: bool,
}

impl Host {
    pub(super) fn new(fabric: &Fabric, engine_id: &str, port: u16, tp: u32, mode: TransferMode) -> Self {
        let mut config = SchedulerConfig::new(Generation::V14, engine_id, "127.0.0.1", port);
        (config.tp_size, config.mode) = (tp, mode);
        config.push_registration_timeout = at(60);
        let edit = |config: &mut WorkerConfig| {
            (config.mode, config.engine_ttl) = (mode, at(40));
            config.push_registration_timeout = at(60);
        };
        let ranks = Engine::new(fabric, engine_id).tp(tp, 2).edit(&edit).ranks();
        ranks.iter().for_each(|rank| rank.faults.record());
        // The lists prepared before the journal began are released at shutdown, too.
        let handles = ranks.iter().map(|_| {
            let mut handles = Handles::default();
            handles.lists.insert(ListId(2), None);
            handles
        });
        Self {
            engine_id: engine_id.to_owned(),
            scheduler: Scheduler::new(config),
            handles: handles.collect(),
            aggregator: Aggregator::new(tp as usize),
            overdue: BTreeSet::new(),
            free: (0..BLOCKS).collect(),
            requests: BTreeMap::new(),
            dead: false,
            ranks,
        }
    }

    pub(super) fn allocate(&mut self, count: usize) -> Option<Vec<u64>> {
        if self.free.len() < count {
            return None;
        }
        Some((0..count).map(|_| self.free.pop_first().unwrap()).collect())
    }

    pub(super) fn fill(&self, blocks: &[u64], value: u8) {
        for rank in &self.ranks {
            let len = rank.heads.1 * crate::support::HEAD;
            for (base, block) in rank
                .memory
                .base_addresses()
                .into_iter()
                .flat_map(|base| blocks.iter().map(move |block| (base, block)))
            {
                rank.memory.write(base + block * len, &vec![value; len as usize]).unwrap();
            }
        }
    }

    pub(super) fn holds(&self, blocks: &[u64], value: u8) -> bool {
        self.ranks.iter().all(|rank| {
            let len = rank.heads.1 * crate::support::HEAD;
            rank.memory.base_addresses().into_iter().all(|base| {
                blocks.iter().all(|block| {
                    rank.memory.read(base + block * len, len).unwrap().iter().all(|byte| *byte == value)
                })
            })
        })
    }

    /// Gives a request's blocks back; the caller has checked that nobody uses them.
    pub(super) fn release(&mut self, request: &str) -> Vec<u64> {
        let blocks =
            self.requests.remove(request).unwrap_or_else(|| panic!("{request} is freed twice")).blocks;
        for block in &blocks {
            assert!(self.free.insert(*block), "block {block} of {request} is freed twice");
        }
        blocks
    }

    pub(super) fn follow_journals(&mut self) {
        for (rank, handles) in self.ranks.iter().zip(&mut self.handles) {
            handles.follow(rank.faults.take_journal(), &self.requests, &self.free);
        }
    }

    /// True when a transfer of this host may still touch `blocks` of its own memory.
    pub(super) fn moves_locally(&self, blocks: &[u64]) -> bool {
        let touches =
            |moving: &Moving| !moving.ended && blocks.iter().any(|block| moving.local.contains(block));
        self.handles.iter().flat_map(|handles| handles.transfers.values()).any(touches)
    }

    /// True when a transfer of this host for `request` may still touch `blocks` of `engine`.
    pub(super) fn moves_remotely(&self, engine: &str, request: &str, blocks: &[u64]) -> bool {
        let touches = |moving: &Moving| {
            !moving.ended
                && engine_of(&moving.remote_agent) == engine
                && moving.remote_request == request
                && blocks.iter().any(|block| moving.remote.contains(block))
        };
        self.handles.iter().flat_map(|handles| handles.transfers.values()).any(touches)
    }

    /// One step of the engine: what came to an end at all workers.
    pub(super) fn step(&mut self, now: ClockTime) -> (TransferResults, BTreeSet<u64>) {
        let meta = self.scheduler.build_step(now).unwrap();
        let mut reports = Vec::new();
        for rank in &mut self.ranks {
            rank.worker.start_load(&meta, now).unwrap();
            let expired = rank.worker.leases().filter(|(_, deadline)| *deadline <= now);
            self.overdue.extend(expired.map(|(request, _)| request.to_owned()));
            reports.push(WorkerReport {
                results: rank.worker.poll(now).unwrap(),
                invalid_blocks: rank.worker.take_invalid_blocks(),
                stats: rank.worker.take_stats(),
            });
            assert_eq!(rank.faults.released_in_progress(), 0, "a live transfer was released");
        }
        self.follow_journals();
        let united = self.aggregator.combine(reports);
        (united.results, united.invalid_blocks)
    }

    /// True once the lease of a request has run out at some rank.
    pub(super) fn is_overdue(&self, request: &str) -> bool {
        self.overdue.contains(request)
    }

    pub(super) fn clear_faults(&self) {
        for rank in &self.ranks {
            for call in [
                Call::AddRemoteAgent,
                Call::PrepareLocal,
                Call::PrepareRemote,
                Call::MakeTransfer,
                Call::Post,
                Call::Poll,
                Call::ReleaseTransfer,
                Call::SendNotification,
            ] {
                rank.faults.fail_next(call, 0);
            }
            rank.faults.fail_next_transfers(0);
            rank.faults.hold_transfers(false);
            rank.faults.lose_agents(false);
        }
    }

    /// Ends the engine; nothing it was given may be left.
    pub(super) fn shutdown(&mut self) {
        self.clear_faults();
        for (rank, handles) in self.ranks.iter_mut().zip(&mut self.handles) {
            rank.worker.shutdown();
            rank.worker.shutdown();
            handles.follow(rank.faults.take_journal(), &self.requests, &self.free);
            assert!(handles.transfers.is_empty(), "transfers are left: {:?}", handles.transfers);
            assert!(handles.lists.is_empty(), "lists are left: {:?}", handles.lists);
            assert!(handles.agents.is_empty(), "agents are left: {:?}", handles.agents);
        }
        self.ranks.clear();
        self.handles.clear();
        self.requests.clear();
        self.dead = true;
    }

    pub(super) fn with_state(&self, state: State) -> Vec<String> {
        self.requests.iter().filter(|(_, request)| request.state == state).map(|(id, _)| id.clone()).collect()
    }
}

/// The parameters of the prefill leg.
pub(super) fn prefill_params() -> KvTransferParams {
    KvTransferParams { do_remote_decode: true, ..KvTransferParams::default() }
}

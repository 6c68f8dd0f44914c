//! A prefill and a decode engine's connector halves, wired together as an engine would wire them.

use std::time::{Duration, Instant};

use kv_connector::ClockTime;
use kv_connector::protocol::params::prefill_request_params;
use kv_connector::protocol::{Generation, HandOff, KvTransferParams, Presence};
use kv_connector::regions::Region;
use kv_connector::scheduler::{
    AllocOutcome, AllocatedBlocks, FinishStatus, Matched, Scheduler, SchedulerConfig,
};
use kv_connector::transport::loopback::LoopbackAgent;
use kv_connector::transport::{KvMemory, MemoryType};
use kv_connector::worker::{RankReply, TransferResults, Worker, WorkerConfig};

const BLOCK_LEN: u64 = 128;
const BLOCKS: u64 = 32;
const BLOCK_TOKENS: usize = 16;

fn at(seconds: u64) -> ClockTime {
    Duration::from_secs(seconds)
}

struct Engine {
    scheduler: Scheduler,
    worker: Worker<LoopbackAgent>,
    memory: KvMemory,
}

impl Engine {
    fn new(generation: Generation, name: &str) -> Self {
        let memory = KvMemory::allocate(&[(BLOCK_LEN * BLOCKS) as usize; 2]);
        let regions = memory.base_addresses().into_iter().enumerate().map(|(layer, base_address)| Region {
            name: format!("layers.{layer}"),
            base_address,
            block_len: BLOCK_LEN,
            block_stride: BLOCK_LEN,
            num_blocks: BLOCKS,
            memory: MemoryType::Dram,
            group: 0,
        });
        let agent = LoopbackAgent::new(name, memory.clone()).unwrap();
        let config = WorkerConfig::new(generation, name, "same".to_owned());
        let worker = Worker::new(config, agent, regions.collect()).unwrap();
        let scheduler = Scheduler::new(SchedulerConfig::new(generation, name, "127.0.0.1", 5600));
        Self { scheduler, worker, memory }
    }

    fn write(&self, block: u64, value: u8) {
        for base in self.memory.base_addresses() {
            self.memory.write(base + block * BLOCK_LEN, &[value; BLOCK_LEN as usize]).unwrap();
        }
    }

    fn read(&self, block: u64) -> [u8; 2] {
        let bases = self.memory.base_addresses();
        [0, 1].map(|layer| self.memory.read(bases[layer] + (block + 1) * BLOCK_LEN - 1, 1).unwrap()[0])
    }

    /// One engine step: scheduler to worker, then what the worker has to report.
    fn step(&mut self, now: ClockTime) -> TransferResults {
        let meta = self.scheduler.build_step(now).unwrap();
        self.worker.start_load(&meta, now).unwrap();
        let results = self.worker.poll(now).unwrap();
        for request in &results.finished_recving {
            self.scheduler.on_received(request);
        }
        results
    }

    fn step_until_reported(&mut self, now: ClockTime) -> TransferResults {
        let started = Instant::now();
        loop {
            let results = self.step(now);
            if !results.is_empty() {
                return results;
            }
            assert!(started.elapsed() < Duration::from_secs(5), "nothing was reported");
            std::thread::yield_now();
        }
    }

    fn answer_handshakes(&mut self, peer: &Self, now: ClockTime) -> usize {
        let jobs = self.worker.take_handshake_jobs();
        for job in &jobs {
            let [(pp_rank, tp_rank)] = job.ranks[..] else { panic!("one rank") };
            let payload = peer.worker.handshake_payload();
            let reply = RankReply { pp_rank, tp_rank, payload, clock: None };
            self.worker.complete_handshake(&job.engine_id, Ok(vec![reply]), now).unwrap();
        }
        jobs.len()
    }

    /// Prefills `tokens` into `blocks` and ends, as on the router's first leg.
    fn prefill(&mut self, request: &str, tokens: usize, blocks: &[u64], now: ClockTime) -> KvTransferParams {
        let params = serde_json::from_slice(prefill_request_params()).unwrap();
        self.scheduler.on_new_request(request, tokens, Some(params));
        assert_eq!(self.scheduler.matched_tokens(request, 0), Matched::default());
        let allocated = AllocatedBlocks { unhashed: vec![blocks.to_vec()], cached: vec![0] };
        let outcome = self.scheduler.update_after_alloc(request, &allocated, 0);
        assert_eq!(outcome, Ok(AllocOutcome::Producing));
        assert!(self.step(now).is_empty());
        let groups = [blocks.to_vec()];
        let status = FinishStatus::LengthCapped;
        let finished = self.scheduler.request_finished(request, status, &groups, tokens as u64, now);
        assert!(finished.delay_free);
        assert!(self.step(now).is_empty());
        finished.params.unwrap()
    }
}

/// What a router does between the legs: JSON out, checked, JSON in.
fn carry(params: &KvTransferParams) -> KvTransferParams {
    let json = serde_json::to_vec(params).unwrap();
    HandOff::parse(&json).unwrap();
    serde_json::from_slice(&json).unwrap()
}

#[test]
fn a_prompt_is_handed_off_in_both_generations() {
    for generation in [Generation::V2, Generation::V14] {
        let (mut p, mut d) = (Engine::new(generation, "p"), Engine::new(generation, "d"));
        for (block, value) in [(5, 50), (6, 60), (7, 70)] {
            p.write(block, value);
        }
        let params = carry(&p.prefill("cmpl-x-0", 40, &[5, 6, 7], at(100)));
        // The first block of the prompt is in D's own prefix cache.
        d.scheduler.on_new_request("d-request", 40, Some(params));
        let matched = d.scheduler.matched_tokens("d-request", BLOCK_TOKENS);
        assert_eq!(matched, Matched { tokens: 24, asynchronous: true });
        let allocated = AllocatedBlocks { unhashed: vec![vec![11, 12]], cached: vec![1] };
        let outcome = d.scheduler.update_after_alloc("d-request", &allocated, matched.tokens);
        assert_eq!(outcome, Ok(AllocOutcome::Receiving { awaiting_kvs: true }));
        assert!(d.step(at(1)).is_empty());
        assert_eq!(d.answer_handshakes(&p, at(1)), 1);
        let results = d.step_until_reported(at(1));
        assert_eq!(
            (results.finished_recving, results.failed_recving),
            (vec!["d-request".to_owned()], vec![])
        );
        assert_eq!((d.read(11), d.read(12), d.read(13)), ([60, 60], [70, 70], [0, 0]));
        assert_eq!(p.step_until_reported(at(101)).finished_sending, ["cmpl-x-0"]);
        assert_eq!(p.worker.leases().count(), 0);
        assert_eq!(d.scheduler.heartbeating(), 0);
        let end =
            d.scheduler.request_finished("d-request", FinishStatus::Stopped, &[vec![11, 12]], 50, at(2));
        assert_eq!(end.params, None);
    }
}

#[test]
fn a_decode_request_aborted_before_scheduling_frees_the_prefill_blocks() {
    for generation in [Generation::V2, Generation::V14] {
        let (mut p, mut d) = (Engine::new(generation, "p"), Engine::new(generation, "d"));
        let params = carry(&p.prefill("cmpl-x-0", 40, &[5, 6, 7], at(100)));
        d.scheduler.on_new_request("d-request", 40, Some(params));
        d.scheduler.request_finished("d-request", FinishStatus::Aborted, &[], 0, at(1));
        assert!(d.step(at(1)).is_empty());
        assert_eq!(d.answer_handshakes(&p, at(1)), 1);
        assert!(d.step(at(1)).is_empty(), "nobody waits for this receive");
        assert_eq!(p.step_until_reported(at(101)).finished_sending, ["cmpl-x-0"]);
        assert!(!d.worker.has_pending_receives());
    }
}

#[test]
fn a_queued_request_keeps_its_lease_alive_by_heartbeats_alone() {
    let (mut p, mut d) = (Engine::new(Generation::V14, "p"), Engine::new(Generation::V14, "d"));
    let params = carry(&p.prefill("cmpl-x-0", 40, &[5, 6, 7], at(100)));
    assert_eq!(params.remote_num_tokens, Presence::Value(40));
    d.scheduler.on_new_request("d-request", 40, Some(params));
    assert!(d.step(at(1)).is_empty());
    assert_eq!(d.answer_handshakes(&p, at(1)), 1);
    assert!(d.step(at(6)).is_empty());
    let started = Instant::now();
    let renewed = ("cmpl-x-0", at(145));
    // Set to end at 130; the heartbeat arrives at 125 and asks for 20 seconds more.
    while p.worker.leases().all(|lease| lease != renewed) {
        assert!(started.elapsed() < Duration::from_secs(5), "no heartbeat arrived");
        assert!(p.step(at(125)).is_empty());
        std::thread::yield_now();
    }
    assert!(p.step(at(144)).is_empty());
    assert_eq!(p.step(at(145)).finished_sending, ["cmpl-x-0"]);
}

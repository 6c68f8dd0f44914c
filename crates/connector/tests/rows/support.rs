//! Engines whose agents share a fabric: nothing happens between two calls.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_connector::ClockTime;
use kv_connector::protocol::{BlockIds, Generation};
use kv_connector::regions::Region;
use kv_connector::scheduler::{RecvRequest, RemoteSide, StepMeta};
use kv_connector::transport::loopback::{Event, Fabric, Faults, LoopbackAgent};
use kv_connector::transport::{KvMemory, MemoryType, TransferOp};
use kv_connector::worker::{
    HandshakeError, HandshakeFailure, HandshakeJob, RankReply, TransferResults, Worker, WorkerConfig,
};

pub(crate) const BLOCKS: u64 = 16;
pub(crate) const LAYERS: usize = 2;
/// Bytes of one head in a block.
pub(crate) const HEAD: u64 = 16;

pub(crate) fn at(seconds: u64) -> ClockTime {
    Duration::from_secs(seconds)
}

/// One rank of an engine.
pub(crate) struct Rank {
    pub(crate) worker: Worker<LoopbackAgent>,
    pub(crate) memory: KvMemory,
    pub(crate) faults: Faults,
    /// KV heads stored by this rank, as (first, number); one "head" for a latent.
    pub(crate) heads: (u64, u64),
}

/// How an engine is built.
pub(crate) struct Engine<'a> {
    pub(crate) fabric: &'a Fabric,
    pub(crate) name: &'a str,
    pub(crate) tp: u32,
    pub(crate) heads: u32,
    pub(crate) mla: bool,
    /// Tokens per block; a block has as many slices of its bytes.
    pub(crate) edit: &'a dyn Fn(&mut WorkerConfig),
}

impl<'a> Engine<'a> {
    pub(crate) fn new(fabric: &'a Fabric, name: &'a str) -> Self {
        Self { fabric, name, tp: 1, heads: 8, mla: false, edit: &|_| {} }
    }

    pub(crate) fn tp(self, tp: u32, heads: u32) -> Self {
        Self { tp, heads, ..self }
    }

    pub(crate) fn mla(self, tp: u32) -> Self {
        Self { tp, heads: 1, mla: true, ..self }
    }

    pub(crate) fn edit(self, edit: &'a dyn Fn(&mut WorkerConfig)) -> Self {
        Self { edit, ..self }
    }

    pub(crate) fn rank(&self, rank: u32) -> Rank {
        let per_rank = if self.mla { 1 } else { u64::from((self.heads / self.tp).max(1)) };
        let first = if self.mla { 0 } else { u64::from(rank) * u64::from(self.heads) / u64::from(self.tp) };
        let block_len = per_rank * HEAD;
        let memory = KvMemory::allocate(&[(block_len * BLOCKS) as usize; LAYERS]);
        let regions = memory.base_addresses().into_iter().enumerate().map(|(layer, base_address)| Region {
            name: format!("model.layers.{layer}"),
            base_address,
            block_len,
            block_stride: block_len,
            num_blocks: BLOCKS,
            memory: MemoryType::Dram,
            group: 0,
        });
        let mut config = WorkerConfig::new(Generation::V14, self.name, "hash".to_owned());
        (config.tp_rank, config.tp_size) = (rank, self.tp);
        (config.total_kv_heads, config.is_mla) = (self.heads, self.mla);
        (self.edit)(&mut config);
        let agent = LoopbackAgent::in_fabric(&format!("{}-{rank}", self.name), memory.clone(), self.fabric);
        let faults = agent.faults();
        let worker = Worker::new(config, agent, regions.collect()).unwrap();
        Rank { worker, memory, faults, heads: (first, per_rank) }
    }

    pub(crate) fn ranks(&self) -> Vec<Rank> {
        (0..self.tp).map(|rank| self.rank(rank)).collect()
    }
}

pub(crate) fn engine(fabric: &Fabric, name: &str) -> Rank {
    Engine::new(fabric, name).rank(0)
}

impl Rank {
    /// Fills a block so that its bytes tell head and block.
    pub(crate) fn fill(&self, block: u64) {
        for base in self.memory.base_addresses() {
            for head in 0..self.heads.1 {
                let value = pattern(block, self.heads.0 + head);
                let address = base + (block * self.heads.1 + head) * HEAD;
                self.memory.write(address, &[value; HEAD as usize]).unwrap();
            }
        }
    }

    /// Whether a block holds what `remote` holds for the same heads.
    pub(crate) fn holds(&self, block: u64, remote: u64) -> bool {
        self.memory.base_addresses().into_iter().all(|base| {
            (0..self.heads.1).all(|head| {
                let address = base + (block * self.heads.1 + head) * HEAD;
                let expected = [pattern(remote, self.heads.0 + head); HEAD as usize];
                self.memory.read(address, HEAD).unwrap() == expected
            })
        })
    }

    pub(crate) fn start(&mut self, recvs: &[(&str, RecvRequest)], now: ClockTime) {
        let reqs_to_recv = recvs.iter().map(|(id, recv)| ((*id).to_owned(), recv.clone())).collect();
        self.worker.start_load(&StepMeta { reqs_to_recv, ..StepMeta::default() }, now).unwrap();
    }

    pub(crate) fn step(&mut self, now: ClockTime) {
        self.start(&[], now);
    }

    pub(crate) fn poll(&mut self, now: ClockTime) -> TransferResults {
        self.worker.poll(now).unwrap()
    }

    pub(crate) fn job(&mut self) -> HandshakeJob {
        let [job] = <[HandshakeJob; 1]>::try_from(self.worker.take_handshake_jobs()).unwrap();
        job
    }

    pub(crate) fn answer(
        &mut self,
        job: &HandshakeJob,
        peer: &[Rank],
        now: ClockTime,
    ) -> Result<(), HandshakeError> {
        let reply = |&(pp_rank, tp_rank): &(u32, u32)| RankReply {
            pp_rank,
            tp_rank,
            payload: peer[tp_rank as usize].worker.handshake_payload(),
            clock: None,
        };
        let replies = job.ranks.iter().map(reply).collect();
        self.worker.complete_handshake(&job.engine_id, Ok(replies), now)
    }

    /// Carries out the one pending handshake and lets what waited for it start.
    pub(crate) fn connect(&mut self, peer: &[Rank], now: ClockTime) {
        let job = self.job();
        self.answer(&job, peer, now).unwrap();
        self.step(now);
    }

    pub(crate) fn fail_handshake(&mut self, now: ClockTime) {
        let job = self.job();
        let result = self.worker.complete_handshake(&job.engine_id, Err(HandshakeFailure::Timeout), now);
        assert_eq!(result, Err(HandshakeError::Failure(HandshakeFailure::Timeout)));
    }

    pub(crate) fn lease(&mut self, request: &str, deadline: ClockTime) {
        let meta = StepMeta {
            reqs_in_batch: BTreeSet::from([request.to_owned()]),
            reqs_to_send: vec![(request.to_owned(), deadline)],
            ..StepMeta::default()
        };
        self.worker.start_load(&meta, at(0)).unwrap();
    }

    pub(crate) fn connected(&self) -> Vec<&str> {
        let mut engines: Vec<&str> = self.worker.connected_engines().collect();
        engines.sort_unstable();
        engines
    }

    pub(crate) fn invalid_blocks(&mut self) -> Vec<u64> {
        self.worker.take_invalid_blocks().into_iter().collect()
    }
}

fn pattern(block: u64, head: u64) -> u8 {
    u8::try_from(1 + block * 12 + head).unwrap()
}

/// A receive of `local` blocks from `remote` ones of an engine with TP 1.
pub(crate) fn recv(engine_id: &str, local: &[u64], remote: &[u64], awaiting_kvs: bool) -> RecvRequest {
    RecvRequest {
        local_block_ids: if local.is_empty() { Vec::new() } else { vec![local.to_vec()] },
        local_cached_blocks: vec![0],
        remote: RemoteSide {
            block_ids: BlockIds::grouped(vec![remote.to_vec()]),
            engine_id: engine_id.to_owned(),
            request_id: format!("{engine_id}-request"),
            host: "127.0.0.1".to_owned(),
            port: 5600,
            blocks_expiry_time: None,
            num_tokens: None,
        },
        tp_size: 1,
        dcp_size: 1,
        pp_size: 1,
        awaiting_kvs,
    }
}

pub(crate) fn finished(request: &str) -> TransferResults {
    TransferResults { finished_recving: vec![request.to_owned()], ..TransferResults::default() }
}

pub(crate) fn failed(request: &str) -> TransferResults {
    TransferResults { failed_recving: vec![request.to_owned()], ..finished(request) }
}

/// Direction, local ids, remote ids and notification of a transfer.
pub(crate) type Made = (TransferOp, Vec<u64>, Vec<u64>, Option<String>);

/// Transfers made so far.
pub(crate) fn transfers(journal: &[Event]) -> Vec<Made> {
    let made = journal.iter().filter_map(|event| match event {
        Event::Made { op, local, remote, notification, .. } => {
            let text = notification.as_ref().map(|bytes| String::from_utf8(bytes.clone()).unwrap());
            Some((*op, local.1.clone(), remote.1.clone(), text))
        }
        _ => None,
    });
    made.collect()
}

/// Notifications sent on their own, as (first part of the agent's name, text).
pub(crate) fn notifications(journal: &[Event]) -> Vec<(String, String)> {
    let sent = journal.iter().filter_map(|event| match event {
        Event::Notified(agent, message) => {
            let name = agent.0.split('#').next().unwrap().to_owned();
            Some((name, String::from_utf8_lossy(message).into_owned()))
        }
        _ => None,
    });
    sent.collect()
}

pub(crate) fn releases(journal: &[Event]) -> usize {
    journal.iter().filter(|event| matches!(event, Event::Released(_))).count()
}

/// What is logged at warning level and above while `run` runs.
pub(crate) fn logged(run: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let sink = Sink::default();
    let writer = sink.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, run);
    let bytes = sink.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

/// A golden file.
pub(crate) fn vectors(name: &str) -> serde_json::Value {
    let path = format!("{}/../../tests/fixtures/vectors/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

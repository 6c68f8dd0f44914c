//! The tensor-parallel ranks of one engine: a KV memory and a worker half each, spoken for as one.
//!
//! All ranks see the same steps; a transfer counts when every rank has reported it.

use kv_connector::ClockTime;
use kv_connector::aggregate::{Aggregator, WorkerReport};
use kv_connector::compat::CompatFactors;
use kv_connector::error::EngineFatal;
use kv_connector::protocol::Generation;
use kv_connector::regions::{LocalGeometry, Region};
use kv_connector::scheduler::StepMeta;
use kv_connector::transport::loopback::Faults;
use kv_connector::transport::{Descriptor, MemoryType};
use kv_connector::worker::{
    HandshakeError, HandshakeFailure, HandshakeJob, RankReply, Worker, WorkerConfig, WorkerSetupError,
};
use thiserror::Error;

use crate::config::{Attention, EngineConfig};
use crate::error::EngineError;
use crate::geometry::Geometry;
use crate::kv::{KvCache, KvError};
use crate::transport::{Agent, RankAgent, Source};

/// Why the ranks could not be looked at.
#[derive(Debug, Error)]
pub(crate) enum PollError {
    /// The connector met a state that vLLM dies of.
    #[error(transparent)]
    Connector(#[from] EngineFatal),
    /// Received blocks could not be brought into order.
    #[error(transparent)]
    Kv(#[from] KvError),
}

/// The worker halves of one engine, by rank.
pub(crate) struct Ranks {
    workers: Vec<Worker<Agent>>,
    aggregator: Aggregator,
    /// Of the library that moves the blocks, where one does.
    nixl_version: Option<String>,
}

impl Ranks {
    /// Allocates the KV memory of every rank and registers it; also the cache over all of them and
    /// the faults of each rank's loopback transport. Blocks the thread when NIXL is the transport.
    ///
    /// # Errors
    /// No transport, or one that does not take the memory.
    pub(crate) fn build(
        config: &EngineConfig,
        engine_id: &str,
    ) -> Result<(Self, KvCache, Vec<Faults>), EngineError> {
        let geometry = Geometry::of(config);
        let (mut workers, mut memories, mut faults) = (Vec::new(), Vec::new(), Vec::new());
        let source = Source::open(&config.transport)?;
        for rank in 0..config.tp_size {
            let name = if config.tp_size == 1 { engine_id.to_owned() } else { format!("{engine_id}-{rank}") };
            let RankAgent { agent, memory, faults: scripted } =
                source.agent(&name, &vec![geometry.region_bytes(); geometry.regions])?;
            faults.extend(scripted);
            let regions = regions(config, geometry, &memory.base_addresses());
            workers.push(worker(config, engine_id, rank, agent, regions)?);
            memories.push(memory);
        }
        let aggregator = Aggregator::new(workers.len());
        let ranks = Self { workers, aggregator, nixl_version: source.nixl_version() };
        Ok((ranks, KvCache::new(memories, geometry), faults))
    }

    /// The version of NIXL, where it moves the blocks and tells its version.
    pub(crate) fn nixl_version(&self) -> Option<&str> {
        self.nixl_version.as_deref()
    }

    /// What each rank publishes.
    pub(crate) fn handshake_payloads(&self) -> Vec<Vec<u8>> {
        self.workers.iter().map(Worker::handshake_payload).collect()
    }

    /// Gives a step to every rank.
    ///
    /// # Errors
    /// The first rank's death; the others have begun the step all the same.
    pub(crate) fn start_load(&mut self, meta: &StepMeta, now: ClockTime) -> Result<(), EngineFatal> {
        self.workers.iter_mut().map(|worker| worker.start_load(meta, now)).fold(Ok(()), Result::and)
    }

    /// Handshakes to carry out, with the rank that wants each.
    pub(crate) fn take_handshake_jobs(&mut self) -> Vec<(usize, HandshakeJob)> {
        let jobs = self.workers.iter_mut().map(Worker::take_handshake_jobs).enumerate();
        jobs.flat_map(|(rank, jobs)| jobs.into_iter().map(move |job| (rank, job))).collect()
    }

    /// Answers one rank's handshake.
    ///
    /// # Errors
    /// Whatever kept the rank from connecting.
    pub(crate) fn complete_handshake(
        &mut self,
        rank: usize,
        engine_id: &str,
        replies: Result<Vec<RankReply>, HandshakeFailure>,
        now: ClockTime,
    ) -> Result<(), HandshakeError> {
        match self.workers.get_mut(rank) {
            Some(worker) => worker.complete_handshake(engine_id, replies, now),
            None => Err(HandshakeError::NotPending(engine_id.to_owned())),
        }
    }

    /// Whether any rank waits for a handshake or a transfer.
    pub(crate) fn has_pending_receives(&self) -> bool {
        self.workers.iter().any(Worker::has_pending_receives)
    }

    /// What came to an end at all ranks; blocks that a rank has received are made usable at once.
    ///
    /// # Errors
    /// A rank's death, or blocks that do not fit the memory.
    pub(crate) fn poll(&mut self, now: ClockTime, kv: &KvCache) -> Result<WorkerReport, PollError> {
        let mut reports = Vec::with_capacity(self.workers.len());
        for (rank, worker) in self.workers.iter_mut().enumerate() {
            let results = worker.poll(now)?;
            for received in &results.received {
                kv.finish_received(rank, received)?;
            }
            let (invalid_blocks, stats) = (worker.take_invalid_blocks(), worker.take_stats());
            reports.push(WorkerReport { results, invalid_blocks, stats });
        }
        Ok(self.aggregator.combine(reports))
    }

    /// Releases everything; calling it again does nothing.
    pub(crate) fn shutdown(&mut self) {
        self.workers.iter_mut().for_each(Worker::shutdown);
    }
}

fn worker(
    config: &EngineConfig,
    engine_id: &str,
    rank: u32,
    agent: Agent,
    regions: Vec<Region>,
) -> Result<Worker<Agent>, WorkerSetupError> {
    let settings = worker_config(config, engine_id, rank);
    let geometry = LocalGeometry { permute_received: config.permute_received, ..settings.geometry(regions)? };
    let ranges = geometry.regions.iter().map(|region| {
        let range = Descriptor { address: region.base_address, len: region.span(), device: geometry.device };
        (region.memory, range)
    });
    let ranges = ranges.collect();
    Worker::with_geometry(settings, agent, geometry, ranges)
}

fn regions(config: &EngineConfig, geometry: Geometry, bases: &[u64]) -> Vec<Region> {
    let per_layer = geometry.regions / config.layers;
    let block_len = geometry.block_bytes() as u64;
    bases
        .iter()
        .enumerate()
        .map(|(index, base)| Region {
            name: format!("model.layers.{}.self_attn.attn", index / per_layer),
            base_address: *base,
            block_len,
            block_stride: block_len,
            num_blocks: geometry.blocks as u64,
            memory: MemoryType::Dram,
            group: 0,
        })
        .collect()
}

fn compatibility_hash(config: &EngineConfig) -> String {
    let dtype = match config.dtype {
        1 => "torch.float8_e4m3fn",
        2 => "torch.bfloat16",
        _ => "torch.float32",
    };
    CompatFactors {
        generation: config.generation,
        connector_version: config.generation.connector_version(),
        vllm_version: config.version().to_owned(),
        model: config.model.clone(),
        dtype: dtype.to_owned(),
        num_kv_heads: config.total_kv_heads() as u64,
        head_size: config.head_dim as u64,
        num_hidden_layers: config.layers as u64,
        attn_backend_name: "CPU_ATTN".to_owned(),
        cache_dtype: "auto".to_owned(),
        is_hma_enabled: true,
        speculative_config: None,
        transfer_mode: config.transfer_mode,
    }
    .digest()
}

fn worker_config(config: &EngineConfig, engine_id: &str, rank: u32) -> WorkerConfig {
    let mut worker = WorkerConfig::new(config.generation, engine_id, compatibility_hash(config));
    worker.block_size = u32::try_from(config.block_size).unwrap_or(u32::MAX);
    (worker.tp_rank, worker.tp_size) = (rank, config.tp_size);
    worker.total_kv_heads = u32::try_from(config.total_kv_heads()).unwrap_or(u32::MAX);
    worker.is_mla = config.attention == Attention::Mla;
    worker.kv_cache_layout = config.layout().as_str().to_owned();
    worker.enforce_compatibility = config.enforce_compat;
    (worker.mode, worker.push_registration_timeout) = (config.transfer_mode, config.push_timeout);
    worker.lease = config.lease;
    worker.v2_dies_on_failed_handshake = config.generation == Generation::V2;
    worker
}

//! The child's side: scheduler and worker of one engine over NIXL, wired as an engine wires them.

use std::time::{Duration, Instant, SystemTime};

use kv_connector::ClockTime;
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::{AgentMetadataV14, NixlAgentMetadata};
use kv_connector::protocol::params::prefill_request_params;
use kv_connector::protocol::{Generation, HandOff, KvTransferParams};
use kv_connector::regions::Region;
use kv_connector::scheduler::{AllocatedBlocks, FinishStatus, Scheduler, SchedulerConfig};
use kv_connector::transport::nixl::{NixlAgent, NixlMemory, NixlVersion};
use kv_connector::transport::{KvMemory, MemoryType};
use kv_connector::worker::{RankReply, TransferResults, Worker, WorkerConfig};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::peer::{PAUSE, config, hex, library, number, numbers, pattern, resident, unhex};

type Answer = Result<Value, Box<dyn std::error::Error>>;

const BLOCK_TOKENS: u64 = 16;

/// One clock for all processes of this machine.
fn now() -> ClockTime {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap()
}

pub(crate) struct Engine {
    scheduler: Scheduler,
    worker: Worker<NixlAgent>,
    memory: KvMemory,
    /// Per region: from block to block, and how much of that is the block.
    strides: Vec<(u64, u64)>,
}

fn plain_region(layer: u64, num_blocks: u64, ask: &Value) -> Region {
    let block_len = number(ask, "block_len");
    Region {
        name: format!("layers.{layer}"),
        base_address: 0,
        block_len,
        block_stride: block_len,
        num_blocks,
        memory: MemoryType::Dram,
        group: 0,
    }
}

/// A region shaped like one of a peer's.
fn region_like(metadata: &AgentMetadataV14, index: usize, num_blocks: u64) -> Region {
    Region {
        name: metadata.region_names.as_ref().unwrap()[index].clone(),
        base_address: 0,
        block_len: metadata.block_lens[index] as u64,
        block_stride: metadata.block_strides[index] as u64,
        num_blocks,
        memory: MemoryType::Dram,
        group: metadata.region_group_ids.as_ref().unwrap()[index],
    }
}

impl Engine {
    pub(crate) fn start(ask: &Value) -> Result<(Self, Value), Box<dyn std::error::Error>> {
        let name = ask["name"].as_str().ok_or("no name")?;
        let generation = if ask["generation"] == "v2" { Generation::V2 } else { Generation::V14 };
        let mut settings = WorkerConfig::new(generation, name, "same".to_owned());
        let transport = config(ask);
        let mut like = None;
        if ask["like"].is_string() {
            let payload = NixlHandshakePayload::decode(&unhex(&ask["like"]))?;
            let NixlAgentMetadata::V14(metadata) =
                NixlAgentMetadata::decode(generation, &payload.agent_metadata_bytes)?
            else {
                return Err("not of v14".into());
            };
            let version = NixlVersion::parse(ask["version"].as_str().ok_or("no version")?);
            transport.peers.announce(&metadata.agent_metadata, version.ok_or("no version")?)?;
            settings.compatibility_hash = ask["hash"].as_str().ok_or("no hash")?.to_owned();
            settings.total_kv_heads = number(ask, "heads") as u32;
            settings.block_size = metadata.block_size as u32;
            settings.kv_cache_layout.clone_from(&metadata.kv_cache_layout);
            settings.attn_backend_name.clone_from(&metadata.attn_backend_name);
            settings.physical_blocks_per_logical = metadata.physical_blocks_per_logical_kv_block as u32;
            settings.region_members.clone_from(&metadata.region_members);
            like = Some(metadata);
        }
        let blocks = number(ask, "blocks");
        let shapes: Vec<Region> = match &like {
            None => (0..number(ask, "layers")).map(|layer| plain_region(layer, blocks, ask)).collect(),
            Some(metadata) => {
                (0..metadata.block_lens.len()).map(|i| region_like(metadata, i, blocks)).collect()
            }
        };
        let lens: Vec<usize> = shapes.iter().map(|region| (blocks * region.block_stride) as usize).collect();
        let memory = KvMemory::allocate_addressable(&lens)?;
        let bases = memory.base_addresses();
        let regions: Vec<Region> = shapes
            .into_iter()
            .zip(bases)
            .map(|(region, base_address)| Region { base_address, ..region })
            .collect();
        let strides = regions.iter().map(|region| (region.block_stride, region.block_len)).collect();
        let agent = NixlAgent::new(transport, &library()?, NixlMemory::of(&memory)?)?;
        if let Some(seconds) = ask["lease"].as_u64() {
            settings.lease = Duration::from_secs(seconds);
        }
        let mut scheduling = SchedulerConfig::new(generation, name, "127.0.0.1", 5600);
        scheduling.lease = settings.lease;
        let worker = Worker::new(settings, agent, regions)?;
        let answer = json!({"payload": hex(&worker.handshake_payload())});
        Ok((Self { scheduler: Scheduler::new(scheduling), worker, memory, strides }, answer))
    }

    pub(crate) fn carry_out(&mut self, word: &str, ask: &Value) -> Answer {
        match word {
            "fill" => {
                for (layer, base) in self.memory.base_addresses().into_iter().enumerate() {
                    let (stride, len) = self.strides[layer];
                    for block in numbers(ask, "blocks") {
                        let bytes = pattern(number(ask, "seed") + layer as u64, len as usize);
                        self.memory.write(base + block * stride, &bytes)?;
                    }
                }
                Ok(json!({}))
            }
            "digest" => {
                let mut digest = Sha256::new();
                let mut zeros = 0_usize;
                for (base, (stride, len)) in self.memory.base_addresses().into_iter().zip(&self.strides) {
                    for block in numbers(ask, "blocks") {
                        let bytes = self.memory.read(base + block * stride, *len)?;
                        zeros += bytes.iter().filter(|byte| **byte == 0).count();
                        digest.update(bytes);
                    }
                }
                Ok(json!({"sha256": hex(&digest.finalize()), "zeros": zeros}))
            }
            "produce" => self.produce(ask["request"].as_str().ok_or("no request")?, &numbers(ask, "blocks")),
            "consume" => self.consume(ask),
            "serve" => {
                let (started, mut sent) = (Instant::now(), Vec::new());
                while sent.len() < number(ask, "count") as usize
                    && started.elapsed() < Duration::from_secs(number(ask, "seconds"))
                {
                    sent.extend(self.step()?.finished_sending);
                    std::thread::sleep(PAUSE);
                }
                Ok(json!({"sent": sent, "leases": self.worker.leases().count()}))
            }
            "resident" => Ok(json!({"bytes": resident()?})),
            _ => Err(format!("unknown word {word}").into()),
        }
    }

    /// One engine step: scheduler to worker, then what the worker has to report.
    fn step(&mut self) -> Result<TransferResults, Box<dyn std::error::Error>> {
        let meta = self.scheduler.build_step(now())?;
        self.worker.start_load(&meta, now())?;
        let results = self.worker.poll(now())?;
        for request in &results.finished_recving {
            self.scheduler.on_received(request);
        }
        for request in &results.finished_sending {
            self.scheduler.on_sent(request);
        }
        Ok(results)
    }

    /// Prefills `blocks` and ends, as on the router's first leg.
    fn produce(&mut self, request: &str, blocks: &[u64]) -> Answer {
        let tokens = blocks.len() as u64 * BLOCK_TOKENS;
        let params = serde_json::from_slice(prefill_request_params())?;
        self.scheduler.on_new_request(request, tokens as usize, Some(params));
        let allocated = AllocatedBlocks { unhashed: vec![blocks.to_vec()], cached: vec![0] };
        self.scheduler.update_after_alloc(request, &allocated, 0)?;
        self.step()?;
        let groups = [blocks.to_vec()];
        let finished =
            self.scheduler.request_finished(request, FinishStatus::LengthCapped, &groups, tokens, now());
        self.step()?;
        Ok(json!({"params": finished.params.ok_or("no hand-off")?, "leases": self.worker.leases().count()}))
    }

    /// Reads a hand-off's blocks into local ones; times it from the hand-off to its report.
    fn consume(&mut self, ask: &Value) -> Answer {
        let request = ask["request"].as_str().ok_or("no request")?;
        let blocks = numbers(ask, "blocks");
        // What a router does between the legs.
        HandOff::parse(&serde_json::to_vec(&ask["params"])?)?;
        let params: KvTransferParams = serde_json::from_value(ask["params"].clone())?;
        let started = Instant::now();
        let tokens = ask["tokens"].as_u64().unwrap_or(blocks.len() as u64 * BLOCK_TOKENS) as usize;
        self.scheduler.on_new_request(request, tokens, Some(params));
        let matched = self.scheduler.matched_tokens(request, 0);
        let allocated = AllocatedBlocks { unhashed: vec![blocks.clone()], cached: vec![0] };
        self.scheduler.update_after_alloc(request, &allocated, matched.tokens)?;
        let limit = Duration::from_secs(number(ask, "seconds"));
        let mut handshakes = 0;
        let results = loop {
            let results = self.step()?;
            for job in self.worker.take_handshake_jobs() {
                handshakes += 1;
                let payload = unhex(&ask["payload"]);
                let reply = RankReply { pp_rank: 0, tp_rank: 0, payload, clock: None };
                self.worker.complete_handshake(&job.engine_id, Ok(vec![reply]), now())?;
            }
            if !results.is_empty() {
                break results;
            }
            if started.elapsed() > limit {
                return Err("nothing was reported in time".into());
            }
            std::thread::sleep(PAUSE);
        };
        let micros = started.elapsed().as_secs_f64() * 1e6;
        let stats = self.worker.take_stats().unwrap_or_default();
        let inside = stats.transfer_duration.first().map(|seconds| seconds * 1e6);
        let invalid: Vec<u64> = self.worker.take_invalid_blocks().into_iter().collect();
        let status = FinishStatus::Stopped;
        self.scheduler.request_finished(request, status, &[blocks], tokens as u64, now());
        Ok(json!({"micros": micros, "handshakes": handshakes, "finished": results.finished_recving,
            "failed": results.failed_recving, "invalid": invalid, "inside": inside}))
    }
}

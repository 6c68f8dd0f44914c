//! Peers of a worker: handshakes, validation, replacement and eviction.
//!
//! A peer is checked completely before anything of it is kept, so a failed handshake leaves no
//! trace and the next attempt starts afresh.

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::handshake::NixlHandshakePayload;
use crate::protocol::metadata::{AgentMetadataV14, NixlAgentMetadata};
use crate::protocol::params::Generation;
use crate::scheduler::RecvRequest;
use crate::transport::{AgentName, Descriptor, ListId, Transport};

use super::config::{ClockSample, HandshakeError, HandshakeFailure, HandshakeJob, RankReply};
use super::{PendingHandshake, Worker, log_failed};

/// A connected engine.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) agent: AgentName,
    pub(super) list: ListId,
    /// Kernel blocks per region.
    pub(super) region_blocks: Vec<u64>,
    pub(super) region_groups: Vec<i64>,
    pub(super) blocks_per_logical: u64,
    /// The peer's clock minus ours, in seconds.
    pub(super) clock_offset: f64,
    pub(super) last_active: ClockTime,
}

/// What validation leaves of a peer's metadata.
struct Geometry {
    agent_metadata: Vec<u8>,
    descriptors: Vec<Descriptor>,
    region_blocks: Vec<u64>,
    region_groups: Vec<i64>,
    blocks_per_logical: u64,
}

impl<T: Transport> Worker<T> {
    /// Answers a handshake job; requests that waited for it are started by the next step.
    ///
    /// # Errors
    /// Why the peer is not connected; the requests that waited are reported as failed.
    pub fn complete_handshake(
        &mut self,
        engine_id: &str,
        replies: Result<Vec<RankReply>, HandshakeFailure>,
        now: ClockTime,
    ) -> Result<(), HandshakeError> {
        let Some(pending) = self.handshakes.remove(engine_id) else {
            return Err(HandshakeError::NotPending(engine_id.to_owned()));
        };
        let PendingHandshake { job, waiting } = pending;
        let connected =
            replies.map_err(HandshakeError::Failure).and_then(|replies| self.connect(&job, &replies, now));
        match connected {
            Ok(peer) => {
                self.engine_by_address.insert((job.host, job.port), engine_id.to_owned());
                self.peers.insert(engine_id.to_owned(), peer);
                self.ready.extend(waiting);
                Ok(())
            }
            Err(error) => {
                self.fail_handshake(engine_id, &error, &waiting);
                Err(error)
            }
        }
    }

    /// Makes sure that a handshake for the receive's engine is under way and queues it there.
    pub(super) fn await_handshake(&mut self, request: &str, recv: RecvRequest, now: ClockTime) {
        let remote = &recv.remote;
        let job =
            self.handshake_job(&remote.engine_id, &remote.host, remote.port, recv.tp_size, recv.pp_size);
        if let Err(error) = self.check_sizes(recv.tp_size, recv.dcp_size, recv.pp_size) {
            let engine_id = remote.engine_id.clone();
            self.fail_handshake(&engine_id, &error, &[(request.to_owned(), recv)]);
            return;
        }
        self.begin_handshake(job, now).waiting.push((request.to_owned(), recv));
    }

    pub(super) fn handshake_job(
        &self,
        engine_id: &str,
        host: &str,
        port: i64,
        tp_size: u32,
        pp_size: u32,
    ) -> HandshakeJob {
        HandshakeJob {
            engine_id: engine_id.to_owned(),
            host: host.to_owned(),
            port,
            generation: self.config.generation,
            tp_size,
            pp_size,
            ranks: vec![(0, self.config.tp_rank)],
        }
    }

    /// One handshake per engine, shared by everything that waits for it.
    pub(super) fn begin_handshake(&mut self, job: HandshakeJob, now: ClockTime) -> &mut PendingHandshake {
        self.evict_idle_peers(now);
        let new_jobs = &mut self.new_jobs;
        self.handshakes.entry(job.engine_id.clone()).or_insert_with(|| {
            new_jobs.push(job.clone());
            PendingHandshake { job, waiting: Vec::new() }
        })
    }

    /// The only topology of this version: equal sizes without context or pipeline parallelism.
    pub(super) fn check_sizes(&self, tp: u32, dcp: u32, pp: u32) -> Result<(), HandshakeError> {
        let sizes = [("tp_size", self.config.tp_size, tp), ("dcp_size", 1, dcp), ("pp_size", 1, pp)];
        match sizes.into_iter().find(|(_, local, remote)| local != remote) {
            None => Ok(()),
            Some((what, local, remote)) => Err(HandshakeError::UnsupportedTopology {
                what,
                local: i64::from(local),
                remote: i64::from(remote),
            }),
        }
    }

    fn fail_handshake(&mut self, engine_id: &str, error: &HandshakeError, waiting: &[(String, RecvRequest)]) {
        tracing::error!(engine_id, %error, failure_type = "handshake_setup_failed", "NIXL transfer failure");
        self.stats.num_failed_handshakes.push(1);
        for (request, recv) in waiting {
            self.log_failure("handshake_failed", request, recv, None);
            self.failed_outside_poll.push(request.clone());
        }
        let dies = self.config.generation == Generation::V2 && self.config.v2_dies_on_failed_handshake;
        if dies && let Some((request, _)) = waiting.first() {
            let (request, engine_id) = (request.clone(), engine_id.to_owned());
            self.pending_fatal = Some(EngineFatal::PeerNeverRegistered { request, engine_id });
        }
    }

    fn connect(
        &mut self,
        job: &HandshakeJob,
        replies: &[RankReply],
        now: ClockTime,
    ) -> Result<Peer, HandshakeError> {
        let mut geometry = None;
        for &(pp_rank, tp_rank) in &job.ranks {
            let reply = replies
                .iter()
                .find(|reply| (reply.pp_rank, reply.tp_rank) == (pp_rank, tp_rank))
                .ok_or(HandshakeError::MissingRank { pp_rank, tp_rank })?;
            geometry = Some(self.validate(&job.engine_id, &reply.payload)?);
        }
        let geometry = geometry.ok_or(HandshakeError::MissingRank { pp_rank: 0, tp_rank: 0 })?;
        let agent = self.transport.add_remote_agent(&geometry.agent_metadata)?;
        let list = match self.transport.prepare_remote(&agent, &geometry.descriptors) {
            Ok(list) => list,
            Err(error) => {
                log_failed("remove a refused peer", self.transport.remove_remote_agent(&agent));
                return Err(error.into());
            }
        };
        Ok(Peer {
            agent,
            list,
            region_blocks: geometry.region_blocks,
            region_groups: geometry.region_groups,
            blocks_per_logical: geometry.blocks_per_logical,
            clock_offset: clock_offset(replies),
            last_active: now,
        })
    }

    /// Every check on one rank's payload, in the order in which vLLM makes them.
    fn validate(&self, engine_id: &str, payload: &[u8]) -> Result<Geometry, HandshakeError> {
        let payload = NixlHandshakePayload::decode(payload).map_err(HandshakeError::Payload)?;
        let local_hash = &self.config.compatibility_hash;
        if self.config.enforce_compatibility && payload.compatibility_hash != *local_hash {
            return Err(HandshakeError::HashMismatch {
                local: local_hash.clone(),
                remote: payload.compatibility_hash,
            });
        }
        let metadata = NixlAgentMetadata::decode(self.config.generation, &payload.agent_metadata_bytes)
            .map_err(HandshakeError::Metadata)?;
        if metadata.engine_id() != engine_id {
            return Err(HandshakeError::EngineIdMismatch {
                expected: engine_id.to_owned(),
                got: metadata.engine_id().to_owned(),
            });
        }
        if engine_id == self.config.engine_id {
            return Err(HandshakeError::SelfHandshake);
        }
        // In v2 a block's stride is its length and one block is one kernel block.
        let metadata = match metadata {
            NixlAgentMetadata::V14(metadata) => *metadata,
            NixlAgentMetadata::V2(metadata) => AgentMetadataV14 {
                engine_id: metadata.engine_id,
                agent_metadata: metadata.agent_metadata,
                kv_caches_base_addr: metadata.kv_caches_base_addr,
                device_id: metadata.device_id,
                num_blocks: metadata.num_blocks,
                block_strides: metadata.block_lens.clone(),
                block_lens: metadata.block_lens,
                kv_cache_layout: metadata.kv_cache_layout,
                block_size: metadata.block_size,
                ..AgentMetadataV14::default()
            },
        };
        self.geometry(metadata)
    }

    fn geometry(&self, metadata: AgentMetadataV14) -> Result<Geometry, HandshakeError> {
        let config = &self.config;
        let equal = |what, local: u32, remote: i64| match i64::from(local) == remote {
            true => Ok(()),
            false => Err(HandshakeError::UnsupportedTopology { what, local: i64::from(local), remote }),
        };
        equal("pcp_size", 1, metadata.pcp_size)?;
        equal("dcp_size", 1, metadata.dcp_size)?;
        equal("block_size", config.block_size, metadata.block_size)?;
        if metadata.kv_cache_layout != config.kv_cache_layout {
            return Err(HandshakeError::LayoutMismatch {
                local: config.kv_cache_layout.clone(),
                remote: metadata.kv_cache_layout,
            });
        }
        let regions = self.regions.len();
        let region_blocks =
            metadata.region_num_blocks.clone().unwrap_or_else(|| vec![metadata.num_blocks; regions]);
        let region_groups = metadata
            .region_group_ids
            .clone()
            .unwrap_or_else(|| self.regions.iter().map(|region| region.group).collect());
        let lists = [
            ("number of block lengths", metadata.block_lens.len()),
            ("number of base addresses", metadata.kv_caches_base_addr.len()),
            ("number of block strides", metadata.block_strides.len()),
            ("number of block counts", region_blocks.len()),
            ("number of cache groups", region_groups.len()),
            ("number of memory types", metadata.region_mem_types.as_ref().map_or(regions, Vec::len)),
            ("number of region names", metadata.region_names.as_ref().map_or(regions, Vec::len)),
        ];
        for (what, len) in lists {
            check_region(what, regions, count(regions), count(len))?;
        }
        self.check_region_contents(&metadata, &region_blocks)?;
        let blocks_per_logical = u64::try_from(metadata.physical_blocks_per_logical_kv_block)
            .ok()
            .filter(|blocks| *blocks > 0)
            .ok_or(HandshakeError::UnsupportedTopology {
                what: "physical_blocks_per_logical_kv_block",
                local: i64::from(config.physical_blocks_per_logical),
                remote: metadata.physical_blocks_per_logical_kv_block,
            })?;
        Ok(Geometry {
            descriptors: remote_descriptors(&metadata, &region_blocks),
            region_blocks: region_blocks.iter().map(|blocks| blocks.unsigned_abs()).collect(),
            agent_metadata: metadata.agent_metadata,
            region_groups,
            blocks_per_logical,
        })
    }

    fn check_region_contents(
        &self,
        metadata: &AgentMetadataV14,
        region_blocks: &[i64],
    ) -> Result<(), HandshakeError> {
        for (index, region) in self.regions.iter().enumerate() {
            let len = i64::try_from(region.block_len).unwrap_or(i64::MAX);
            check_region("block length", index, len, metadata.block_lens[index])?;
            if metadata.block_strides[index] < len {
                check_region("block stride", index, len, metadata.block_strides[index])?;
            }
            // A descriptor per block is built, so the claim has to be one a machine can hold.
            let blocks = region_blocks[index];
            if !(0..=MAX_REGION_BLOCKS).contains(&blocks) {
                check_region("block count", index, MAX_REGION_BLOCKS, blocks)?;
            }
        }
        let Some(names) = &metadata.region_names else { return Ok(()) };
        match self.regions.iter().zip(names).position(|(region, name)| region.name != *name) {
            Some(region) => Err(HandshakeError::RegionNameMismatch { region }),
            None => Ok(()),
        }
    }

    fn evict_idle_peers(&mut self, now: ClockTime) {
        if self.config.engine_ttl.is_zero() {
            return;
        }
        let idle: Vec<String> = self
            .peers
            .iter()
            .filter(|(engine, peer)| {
                now.saturating_sub(peer.last_active) > self.config.engine_ttl
                    && !self.has_transfers_from(engine)
            })
            .map(|(engine, _)| engine.clone())
            .collect();
        for engine in idle {
            self.release_peer(&engine);
        }
    }

    fn has_transfers_from(&self, engine_id: &str) -> bool {
        self.transfers
            .keys()
            .filter_map(|request| self.recving.get(request))
            .any(|recv| recv.remote.engine_id == engine_id)
    }

    /// Releases engines whose address now belongs to another one, once nothing refers to them.
    pub(super) fn release_replaced_peers(&mut self) {
        if !self.handshakes.is_empty() {
            return;
        }
        let replaced: Vec<String> = self
            .peers
            .keys()
            .filter(|engine| !self.engine_by_address.values().any(|current| current == *engine))
            .filter(|engine| !self.recving.values().any(|recv| recv.remote.engine_id == **engine))
            .cloned()
            .collect();
        for engine in replaced {
            self.release_peer(&engine);
        }
    }

    pub(super) fn release_peer(&mut self, engine_id: &str) {
        let Some(peer) = self.peers.remove(engine_id) else { return };
        self.engine_by_address.retain(|_, engine| engine != engine_id);
        log_failed("release a peer's descriptors", self.transport.release_list(peer.list));
        log_failed("remove a peer's agent", self.transport.remove_remote_agent(&peer.agent));
    }
}

/// Blocks per region beyond which a peer's claim is not believed.
const MAX_REGION_BLOCKS: i64 = 1 << 24;

fn check_region(what: &'static str, region: usize, expected: i64, remote: i64) -> Result<(), HandshakeError> {
    if expected == remote {
        return Ok(());
    }
    Err(HandshakeError::RegionMismatch { what, region, expected, remote })
}

fn count(len: usize) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

/// One descriptor per block of each remote region; the sizes were checked before.
fn remote_descriptors(metadata: &AgentMetadataV14, region_blocks: &[i64]) -> Vec<Descriptor> {
    let device = metadata.device_id.unsigned_abs();
    let mut descriptors = Vec::new();
    for (index, &base) in metadata.kv_caches_base_addr.iter().enumerate() {
        let len = metadata.block_lens[index].unsigned_abs();
        let stride = metadata.block_strides[index].unsigned_abs();
        descriptors.extend((0..region_blocks[index].unsigned_abs()).map(|block| Descriptor {
            address: base.wrapping_add(block.wrapping_mul(stride)),
            len,
            device,
        }));
    }
    descriptors
}

/// The offset from the exchange with the smallest round trip.
fn clock_offset(replies: &[RankReply]) -> f64 {
    let round_trip = |sample: &ClockSample| sample.received.saturating_sub(sample.sent);
    replies.iter().filter_map(|reply| reply.clock).min_by_key(round_trip).map_or(0.0, |sample| {
        sample.remote_seconds - (sample.sent.as_secs_f64() + sample.received.as_secs_f64()) / 2.0
    })
}

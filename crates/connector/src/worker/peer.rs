//! Connected engines and the handshakes under way: one per engine, shared by all who wait.

use std::collections::BTreeMap;

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::params::{Generation, TransferMode};
use crate::protocol::registration::PushRegistration;
use crate::push::Push;
use crate::regions::{DescriptorIndex, PeerGeometry};
use crate::scheduler::RecvRequest;
use crate::topology::{ParallelSizes, handshake_ranks};
use crate::transport::{AgentName, ListId, Transport};

use super::Worker;
use super::config::{HandshakeError, HandshakeFailure, HandshakeJob, RankReply};
use super::failure::FailureContext;

/// One rank of a connected engine.
#[derive(Debug)]
pub(super) struct PeerRank {
    pub(super) agent: AgentName,
    /// None when the rank is only notified.
    pub(super) memory: Option<PeerMemory>,
}

/// What transfers with one remote rank need.
#[derive(Debug)]
pub(super) struct PeerMemory {
    pub(super) list: ListId,
    pub(super) index: DescriptorIndex,
    pub(super) geometry: PeerGeometry,
}

/// A connected engine.
#[derive(Debug)]
pub(super) struct Peer {
    /// By (pipeline rank, transfer rank).
    pub(super) ranks: BTreeMap<(u32, u32), PeerRank>,
    /// The peer's clock minus ours, in seconds.
    pub(super) clock_offset: f64,
    pub(super) last_active: ClockTime,
}

impl Peer {
    /// The geometry that all ranks share; none when the engine is only notified.
    pub(super) fn geometry(&self) -> Option<&PeerGeometry> {
        self.ranks.values().find_map(|rank| rank.memory.as_ref()).map(|memory| &memory.geometry)
    }

    pub(super) fn agents(&self) -> impl Iterator<Item = (u32, &AgentName)> {
        self.ranks.iter().map(|((_, rank), peer)| (*rank, &peer.agent))
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Purpose {
    /// Notifications only: the peer's memory is not looked at.
    Notify,
    /// Transfers too.
    Transfer,
}

/// Something that goes on when its engine is connected.
#[derive(Debug, Clone)]
pub(super) enum Waiting {
    Read(String, RecvRequest),
    Register(String, PushRegistration),
    Write(Push),
}

/// A handshake that has not been answered yet, and what waits for it.
#[derive(Debug)]
pub(super) struct PendingHandshake {
    pub(super) job: HandshakeJob,
    pub(super) purpose: Purpose,
    pub(super) sizes: ParallelSizes,
    pub(super) waiting: Vec<Waiting>,
}

/// Where an engine is reached and how large it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct EngineAddress<'a> {
    pub(super) engine_id: &'a str,
    pub(super) host: &'a str,
    pub(super) port: i64,
    pub(super) sizes: ParallelSizes,
    pub(super) pp_size: u32,
}

/// Pipeline stages a peer may claim; every one of them is asked.
const MAX_PIPELINE_STAGES: u32 = 1024;

impl<T: Transport> Worker<T> {
    /// Answers a handshake job; what waited for it is started by the next step.
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
        let connected = replies
            .map_err(HandshakeError::Failure)
            .and_then(|replies| self.connect(&pending, &replies, now));
        match connected {
            Ok(peer) => {
                if self.config.mode == TransferMode::Pull {
                    let address = (pending.job.host, pending.job.port);
                    self.engine_by_address.insert(address, engine_id.to_owned());
                }
                self.replace_peer(engine_id, peer);
                self.ready.extend(pending.waiting);
                Ok(())
            }
            Err(error) => {
                self.fail_handshake(engine_id, &error, pending.waiting);
                Err(error)
            }
        }
    }

    /// A connection for notifications gives way to one for transfers; shared agents stay.
    fn replace_peer(&mut self, engine_id: &str, peer: Peer) {
        let Some(earlier) = self.peers.insert(engine_id.to_owned(), peer) else { return };
        let kept: Vec<AgentName> = self
            .peers
            .get(engine_id)
            .map(|peer| peer.agents().map(|(_, agent)| agent.clone()).collect())
            .unwrap_or_default();
        self.release_ranks(earlier, &kept);
    }

    /// True when the engine is connected for `purpose`; otherwise a handshake is under way, which
    /// `waiting` joins, or has failed at once.
    pub(super) fn ensure_connected(
        &mut self,
        address: EngineAddress<'_>,
        purpose: Purpose,
        waiting: Option<Waiting>,
        now: ClockTime,
    ) -> bool {
        let connected = self.peers.get(address.engine_id);
        if connected.is_some_and(|peer| purpose == Purpose::Notify || peer.geometry().is_some()) {
            return true;
        }
        self.evict_idle_peers(now);
        let job = match self.handshake_job(address, purpose) {
            Ok(job) => job,
            Err(error) => {
                self.fail_handshake(address.engine_id, &error, waiting.into_iter().collect());
                return false;
            }
        };
        let new_jobs = &mut self.new_jobs;
        let pending = self.handshakes.entry(job.engine_id.clone()).or_insert_with(|| {
            new_jobs.push(job.clone());
            PendingHandshake { job, purpose, sizes: address.sizes, waiting: Vec::new() }
        });
        pending.purpose = pending.purpose.max(purpose);
        pending.waiting.extend(waiting);
        false
    }

    fn handshake_job(
        &self,
        address: EngineAddress<'_>,
        purpose: Purpose,
    ) -> Result<HandshakeJob, HandshakeError> {
        let stages = address.pp_size.max(1);
        if stages > MAX_PIPELINE_STAGES || (stages > 1 && purpose == Purpose::Transfer) {
            return Err(HandshakeError::PipelineStages(stages));
        }
        let topology = &self.geometry.topology;
        let ranks = handshake_ranks(topology.rank, topology.sizes, address.sizes)?;
        Ok(HandshakeJob {
            engine_id: address.engine_id.to_owned(),
            host: address.host.to_owned(),
            port: address.port,
            generation: self.config.generation,
            tp_size: address.sizes.tp,
            pp_size: stages,
            ranks: (0..stages).flat_map(|pp| ranks.iter().map(move |rank| (pp, *rank))).collect(),
        })
    }

    fn fail_handshake(&mut self, engine_id: &str, error: &HandshakeError, waiting: Vec<Waiting>) {
        let context = FailureContext { remote_engine_id: Some(engine_id), ..FailureContext::default() };
        self.log_failure("handshake_setup_failed", &context, Some(error));
        self.stats.num_failed_handshakes.push(1);
        let dies = self.config.generation == Generation::V2 && self.config.v2_dies_on_failed_handshake;
        if dies && let Some(Waiting::Read(request, _)) = waiting.first() {
            let (request, engine_id) = (request.clone(), engine_id.to_owned());
            self.pending_fatal = Some(EngineFatal::PeerNeverRegistered { request, engine_id });
        }
        for waiting in waiting {
            match waiting {
                Waiting::Read(request, recv) => {
                    let context = FailureContext::of_recv(&request, &recv);
                    self.log_failure("handshake_failed", &context, Some(error));
                    self.failed_outside_poll.push(request);
                }
                Waiting::Register(request, _) => {
                    self.log_request_failure("push_reg_handshake_failed", &request, Some(error));
                    self.failed_outside_poll.push(request);
                }
                // The lease frees the blocks.
                Waiting::Write(push) => {
                    self.log_request_failure("push_handshake_failed", &push.request, Some(error));
                }
            }
        }
    }
}

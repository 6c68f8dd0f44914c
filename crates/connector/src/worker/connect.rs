//! From the replies of a handshake to a connected engine.
//!
//! Every rank is checked completely before anything of the engine is kept, so a failed handshake
//! leaves no trace and the next attempt starts afresh.

use std::collections::BTreeMap;

use crate::ClockTime;
use crate::protocol::handshake::NixlHandshakePayload;
use crate::protocol::metadata::NixlAgentMetadata;
use crate::regions::descriptors::remote_descriptors;
use crate::regions::{DescriptorIndex, PeerGeometry, PeerRequest, validate_peer};
use crate::transport::Transport;

use super::config::{ClockSample, HandshakeError, RankReply};
use super::peer::{Peer, PeerMemory, PeerRank, PendingHandshake, Purpose};
use super::{Worker, log_failed};

/// One rank's reply after every check.
struct CheckedRank {
    rank: (u32, u32),
    agent_metadata: Vec<u8>,
    geometry: Option<PeerGeometry>,
}

impl<T: Transport> Worker<T> {
    pub(super) fn connect(
        &mut self,
        pending: &PendingHandshake,
        replies: &[RankReply],
        now: ClockTime,
    ) -> Result<Peer, HandshakeError> {
        let mut checked: Vec<CheckedRank> = Vec::new();
        for &rank in &pending.job.ranks {
            let reply = replies
                .iter()
                .find(|reply| (reply.pp_rank, reply.tp_rank) == rank)
                .ok_or(HandshakeError::MissingRank { pp_rank: rank.0, tp_rank: rank.1 })?;
            let known = checked.first().and_then(|first| first.geometry.as_ref());
            let next = self.check_rank(pending, rank, known, &reply.payload)?;
            checked.push(next);
        }
        let mut ranks = BTreeMap::new();
        for checked in checked {
            let rank = checked.rank;
            match self.add_rank(checked) {
                Ok(peer_rank) => {
                    ranks.insert(rank, peer_rank);
                }
                Err(error) => {
                    let kept = self.agents_of(&pending.job.engine_id);
                    self.release_ranks(Peer { ranks, clock_offset: 0.0, last_active: now }, &kept);
                    return Err(error);
                }
            }
        }
        Ok(Peer { ranks, clock_offset: clock_offset(replies), last_active: now })
    }

    /// Both phases of decoding and every check, in the order in which vLLM makes them.
    fn check_rank(
        &self,
        pending: &PendingHandshake,
        rank: (u32, u32),
        known: Option<&PeerGeometry>,
        payload: &[u8],
    ) -> Result<CheckedRank, HandshakeError> {
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
        let engine_id = &pending.job.engine_id;
        let geometry = match pending.purpose {
            Purpose::Notify if metadata.engine_id() != engine_id => {
                return Err(HandshakeError::EngineIdMismatch {
                    expected: engine_id.clone(),
                    got: metadata.engine_id().to_owned(),
                });
            }
            Purpose::Notify => None,
            Purpose::Transfer => {
                let request = PeerRequest { engine_id, sizes: pending.sizes, known };
                Some(validate_peer(&self.geometry, &request, &metadata)?)
            }
        };
        let agent_metadata = match metadata {
            NixlAgentMetadata::V2(metadata) => metadata.agent_metadata,
            NixlAgentMetadata::V14(metadata) => metadata.agent_metadata,
        };
        Ok(CheckedRank { rank, agent_metadata, geometry })
    }

    fn add_rank(&mut self, checked: CheckedRank) -> Result<PeerRank, HandshakeError> {
        let Some(geometry) = checked.geometry else {
            let agent = self.transport.add_remote_agent(&checked.agent_metadata)?;
            return Ok(PeerRank { agent, memory: None });
        };
        let descriptors = remote_descriptors(&self.geometry, &geometry)?;
        let index = DescriptorIndex::remote(&self.geometry, &geometry)?;
        self.lists.prepare_for(&mut self.transport, &self.geometry, &geometry)?;
        let agent = self.transport.add_remote_agent(&checked.agent_metadata)?;
        match self.transport.prepare_remote(&agent, geometry.memory, &descriptors) {
            Ok(list) => Ok(PeerRank { agent, memory: Some(PeerMemory { list, index, geometry }) }),
            Err(error) => {
                log_failed("remove a refused peer", self.transport.remove_remote_agent(&agent));
                Err(error.into())
            }
        }
    }
}

/// The offset from the exchange with the smallest round trip.
fn clock_offset(replies: &[RankReply]) -> f64 {
    let round_trip = |sample: &ClockSample| sample.received.saturating_sub(sample.sent);
    replies.iter().filter_map(|reply| reply.clock).min_by_key(round_trip).map_or(0.0, |sample| {
        sample.remote_seconds - (sample.sent.as_secs_f64() + sample.received.as_secs_f64()) / 2.0
    })
}

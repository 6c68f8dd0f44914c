//! What the scheduler half hands to the worker half once per step.

use std::collections::BTreeSet;

use crate::ClockTime;
use crate::protocol::params::BlockIds;
use crate::protocol::registration::PushRegistration;

/// The remote side of one receive, as named by the transfer parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct RemoteSide {
    /// Logical block ids on the remote side; empty when the parameters held null.
    pub block_ids: BlockIds,
    /// The remote engine; empty when the parameters held null, and then no handshake can succeed.
    pub engine_id: String,
    /// The remote engine's internal request id, the key of notifications.
    pub request_id: String,
    /// Side channel host.
    pub host: String,
    /// Side channel port, unchecked.
    pub port: i64,
    /// Deadline on the remote scheduler's clock in seconds, for reads from a decode engine.
    pub blocks_expiry_time: Option<f64>,
    /// Tokens the remote side computed.
    pub num_tokens: Option<u64>,
}

/// One receive for the worker: blocks to fill, or only a notification to send.
#[derive(Debug, Clone, PartialEq)]
pub struct RecvRequest {
    /// Logical ids of the local blocks to fill, per cache group; empty for a notification alone.
    pub local_block_ids: Vec<Vec<u64>>,
    /// Blocks already covered by the local prefix cache, per cache group.
    pub local_cached_blocks: Vec<usize>,
    /// Where the blocks come from.
    pub remote: RemoteSide,
    /// Transfer tensor-parallel size of the remote engine.
    pub tp_size: u32,
    /// Decode-context-parallel size of the remote engine.
    pub dcp_size: u32,
    /// Pipeline stages of the remote engine.
    pub pp_size: u32,
    /// True when the host parked the request until the worker reports it.
    pub awaiting_kvs: bool,
}

/// The remote requests of one engine whose leases have to be renewed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heartbeat {
    /// The engine that holds the leases.
    pub engine_id: String,
    /// Side channel host, from the engine's first request.
    pub host: String,
    /// Side channel port, from the engine's first request.
    pub port: i64,
    /// Transfer tensor-parallel size, from the engine's first request.
    pub tp_size: u32,
    /// Decode-context-parallel size, from the engine's first request.
    pub dcp_size: u32,
    /// Pipeline stages, from the engine's first request.
    pub pp_size: u32,
    /// Request ids of the remote engine.
    pub request_ids: BTreeSet<String>,
}

/// Everything the worker needs to know for one step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepMeta {
    /// Receives to start, as (local request, receive), in the order they were enqueued.
    pub reqs_to_recv: Vec<(String, RecvRequest)>,
    /// Leases to set, as (local request, deadline on the scheduler's clock).
    pub reqs_to_send: Vec<(String, ClockTime)>,
    /// The scheduler's clock when this was built; none means deadlines need no rebasing.
    pub scheduler_clock: Option<ClockTime>,
    /// Requests of this engine that may be read by others.
    pub reqs_in_batch: BTreeSet<String>,
    /// Requests that ended without a hand-off.
    pub reqs_not_processed: BTreeSet<String>,
    /// Leases to renew elsewhere; empty while the heartbeat interval has not passed.
    pub heartbeats: Vec<Heartbeat>,
    /// Blocks to copy to host memory before peers may read them, as (local request, logical ids).
    pub reqs_to_save: Vec<(String, Vec<Vec<u64>>)>,
    /// Receives to announce to prefill engines (push mode), as (local request, registration).
    pub push_registrations: Vec<(String, PushRegistration)>,
    /// Finished prefills to be written to decode engines (push mode), as (local request, logical ids).
    pub push_finished: Vec<(String, Vec<Vec<u64>>)>,
}

impl StepMeta {
    /// True when the worker has nothing new to do.
    pub fn is_empty(&self) -> bool {
        self.reqs_to_recv.is_empty()
            && self.reqs_to_send.is_empty()
            && self.reqs_in_batch.is_empty()
            && self.reqs_not_processed.is_empty()
            && self.heartbeats.is_empty()
            && self.reqs_to_save.is_empty()
            && self.push_registrations.is_empty()
            && self.push_finished.is_empty()
    }
}

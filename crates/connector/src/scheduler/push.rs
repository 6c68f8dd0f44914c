//! Push mode: receives are announced to the prefill engine, which writes when it has finished.

use std::collections::{BTreeMap, BTreeSet};

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::params::{BlockIds, KvTransferParams, Presence};
use crate::protocol::registration::PushRegistration;

use super::{AllocOutcome, AllocatedBlocks, PendingRecv, Scheduler, clip, push_or_replace};

#[derive(Debug, Default)]
pub(super) struct PushState {
    /// Announcements for the next step.
    pub(super) pending: Vec<(String, PushRegistration)>,
    /// When an announced receive is given up, per local request.
    pub(super) deadlines: BTreeMap<String, ClockTime>,
    /// Finished prefills that have not been written or given up yet.
    pub(super) finished: BTreeSet<String>,
    /// Finished prefills for the next step.
    pub(super) newly_finished: Vec<(String, Vec<Vec<u64>>)>,
    overdue: Vec<String>,
}

/// True when the parameters come from a prefill that has ended: only then may it be told to free.
pub(super) fn is_finished_prefill(params: &KvTransferParams) -> bool {
    params.names_remote_blocks() && params.first_missing_remote_key().is_none()
}

impl Scheduler {
    /// True while pushes are under way, so the host keeps stepping although nothing is scheduled.
    pub fn has_pending_push_work(&self) -> bool {
        !self.push.finished.is_empty() || !self.push.pending.is_empty()
    }

    /// Requests announced to a prefill engine that has not written in time. vLLM only forgets the
    /// announcement; the host decides what becomes of the parked request.
    pub fn take_overdue_registrations(&mut self) -> Vec<String> {
        std::mem::take(&mut self.push.overdue)
    }

    pub(super) fn update_after_push_alloc(
        &mut self,
        request: &str,
        blocks: &AllocatedBlocks,
        external_tokens: usize,
    ) -> Result<AllocOutcome, EngineFatal> {
        let Some(tracked) = self.requests.get_mut(request) else { return Ok(AllocOutcome::NoTransfer) };
        if tracked.params.do_remote_decode {
            self.in_batch.insert(request.to_owned());
            if self.config.host_buffer {
                self.need_save.insert(request.to_owned());
            }
            return Ok(AllocOutcome::Producing);
        }
        if !tracked.params.do_remote_prefill {
            return Ok(AllocOutcome::NoTransfer);
        }
        if external_tokens == 0 {
            tracked.params.do_remote_prefill = false;
            // Nothing will be written here, so nothing may keep the prefill's blocks.
            self.heartbeats.stop(request);
            if !is_finished_prefill(&tracked.params) {
                return Ok(AllocOutcome::NoTransfer);
            }
            let pending = notify_only(tracked.params.clone());
            push_or_replace(&mut self.need_recv, request, pending);
            return Ok(AllocOutcome::Receiving { awaiting_kvs: false });
        }
        let local_block_ids = clip(&self.config, request, blocks.unhashed.clone())?;
        let registration = registration(&self.config, request, &tracked.params, local_block_ids.clone())?;
        let mut params = tracked.params.clone();
        params.remote_block_ids = Presence::Value(BlockIds::default());
        let pending =
            PendingRecv { params, local_block_ids, local_cached_blocks: Vec::new(), awaiting_kvs: false };
        push_or_replace(&mut self.need_recv, request, pending);
        self.push.pending.push((request.to_owned(), registration));
        self.push.unarmed(request);
        tracked.params.do_remote_prefill = false;
        Ok(AllocOutcome::Receiving { awaiting_kvs: true })
    }

    pub(super) fn drop_overdue_registrations(&mut self, now: ClockTime) {
        let timeout = self.config.push_registration_timeout;
        let state = &mut self.push;
        for deadline in state.deadlines.values_mut().filter(|deadline| **deadline == UNARMED) {
            *deadline = now + timeout;
        }
        let overdue: Vec<String> = state
            .deadlines
            .iter()
            .filter(|(_, deadline)| **deadline <= now)
            .map(|(request, _)| request.clone())
            .collect();
        for request in overdue {
            tracing::warn!(request, "no push has arrived in time for an announced receive");
            state.deadlines.remove(&request);
            // A push that failed would otherwise hold the prefill's blocks for as long as this waits.
            self.heartbeats.stop(&request);
            state.pending.retain(|(id, _)| *id != request);
            state.overdue.push(request);
        }
    }
}

/// A deadline that the next step sets: an allocation carries no clock.
const UNARMED: ClockTime = ClockTime::MAX;

impl PushState {
    fn unarmed(&mut self, request: &str) {
        self.deadlines.insert(request.to_owned(), UNARMED);
    }
}

pub(super) fn notify_only(params: KvTransferParams) -> PendingRecv {
    PendingRecv { params, local_block_ids: Vec::new(), local_cached_blocks: Vec::new(), awaiting_kvs: false }
}

fn registration(
    config: &super::SchedulerConfig,
    request: &str,
    params: &KvTransferParams,
    local_block_ids: Vec<Vec<u64>>,
) -> Result<PushRegistration, EngineFatal> {
    let missing = |key| EngineFatal::MissingKey { request: request.to_owned(), key };
    let text = |field: &Presence<String>, key| field.value().cloned().ok_or(missing(key));
    // The receive itself is keyed by it.
    text(&params.remote_request_id, "remote_request_id")?;
    Ok(PushRegistration {
        request_id: request.to_owned(),
        decode_engine_id: config.engine_id.clone(),
        decode_host: config.side_channel_host.clone(),
        decode_port: i64::from(config.side_channel_port),
        decode_tp_size: config.tp_size,
        local_block_ids,
        remote_engine_id: text(&params.remote_engine_id, "remote_engine_id")?,
        remote_host: text(&params.remote_host, "remote_host")?,
        remote_port: *params.remote_port.value().ok_or(missing("remote_port"))?,
        remote_tp_size: *params.tp_size.value().ok_or(missing("tp_size"))?,
        remote_pp_size: params.pp_size.value().copied().unwrap_or(1),
    })
}

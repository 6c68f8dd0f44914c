//! The end of a request: leases, hand-offs, and telling the remote side that nothing is read.

use crate::ClockTime;
use crate::protocol::params::{BlockIds, Generation, KvTransferParams, Presence, TransferMode};

use super::clip::clip_groups;
use super::{FinishStatus, Finished, Scheduler, push, push_or_replace};

impl Scheduler {
    /// Called when `request` ends, with its blocks per cache group and its computed tokens.
    ///
    /// A request that never reached allocation still notifies the remote side in the next step.
    pub fn request_finished(
        &mut self,
        request: &str,
        status: FinishStatus,
        block_ids: &[Vec<u64>],
        computed_tokens: u64,
        now: ClockTime,
    ) -> Finished {
        let Some(mut tracked) = self.requests.remove(request) else { return Finished::default() };
        let is_prefill = tracked.params.do_remote_decode;
        self.heartbeats.stop(request);
        match self.push.deadlines.get_mut(request) {
            // The prefill engine may still write what was announced, or have ended before it could: the blocks are
            // free when it has, or when it must have forgotten the announcement.
            Some(deadline) if status == FinishStatus::Aborted => {
                *deadline = now + 2 * self.config.push_registration_timeout;
            }
            _ => {
                self.push.deadlines.remove(request);
            }
        }
        if tracked.params.do_remote_prefill {
            tracked.params.do_remote_prefill = false;
            if self.config.mode == TransferMode::Push && !push::is_finished_prefill(&tracked.params) {
                return Finished::default();
            }
            let pending = push::notify_only(tracked.params);
            push_or_replace(&mut self.need_recv, request, pending);
            return Finished::default();
        }
        if !is_prefill && !self.bidirectional() {
            return Finished::default();
        }
        let hands_off = match self.config.generation {
            Generation::V2 => status == FinishStatus::LengthCapped,
            Generation::V14 => matches!(status, FinishStatus::LengthCapped | FinishStatus::Stopped),
        };
        if !hands_off {
            self.not_processed.insert(request.to_owned());
            self.need_save.remove(request);
            return Finished::default();
        }
        self.hand_off(request, is_prefill, block_ids, computed_tokens, now)
    }

    fn hand_off(
        &mut self,
        request: &str,
        is_prefill: bool,
        block_ids: &[Vec<u64>],
        computed_tokens: u64,
        now: ClockTime,
    ) -> Finished {
        let delay_free = block_ids.iter().any(|group| !group.is_empty());
        let mut groups = block_ids.to_vec();
        let mut expiry = Presence::Null;
        let mut remote_num_tokens = 0;
        if delay_free {
            let ttl = if is_prefill { self.config.lease } else { self.config.decoder_blocks_ttl };
            let deadline = now + ttl;
            self.need_send.push((request.to_owned(), deadline));
            if !is_prefill {
                expiry = Presence::Value(deadline.as_secs_f64());
            }
            if groups.len() == self.config.groups.len() {
                groups = clip_groups(&self.config, groups);
            }
            remote_num_tokens = computed_tokens;
            if self.config.mode == TransferMode::Push {
                self.push.finished.insert(request.to_owned());
                self.push.newly_finished.push((request.to_owned(), groups.clone()));
            }
        }
        let generation = self.config.generation;
        let mut params = KvTransferParams {
            do_remote_prefill: is_prefill,
            do_remote_decode: !is_prefill,
            remote_block_ids: BlockIds::for_generation(generation, groups).into(),
            remote_engine_id: self.config.engine_id.clone().into(),
            remote_request_id: request.to_owned().into(),
            remote_host: self.config.side_channel_host.clone().into(),
            remote_port: i64::from(self.config.side_channel_port).into(),
            tp_size: self.config.transfer_tp_size().into(),
            ..KvTransferParams::default()
        };
        if generation == Generation::V14 {
            params.dcp_size = self.config.dcp_size.into();
            params.pp_size = self.config.pp_size.into();
            params.remote_num_tokens = remote_num_tokens.into();
            if self.config.mode == TransferMode::Pull {
                params.remote_blocks_expiry_time = expiry;
            }
            params.transfer_mode = self.config.mode.into();
        }
        Finished { delay_free, params: Some(params) }
    }
}

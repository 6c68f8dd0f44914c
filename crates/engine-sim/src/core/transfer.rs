//! The core's side of transfers: handshakes over the registry, and what came to an end.

use std::sync::Arc;

use kv_connector::aggregate::WorkerReport;
use kv_connector::handshake::RegistryClient;
use kv_connector::scheduler::FinishStatus;
use kv_connector::side_channel;
use kv_connector::worker::{ClockSample, HandshakeFailure, HandshakeJob, RankReply};
use tokio::time::Instant;

use super::request::{Output, State};
use super::{Core, CoreDeath};
use crate::config::LoadFailurePolicy;
use crate::faults::Corrupt;
use crate::metrics::Outcome;

/// What a handshake's task brought back.
pub(crate) struct HandshakeOutcome {
    /// The rank that asked.
    rank: usize,
    engine_id: String,
    replies: Result<Vec<RankReply>, HandshakeFailure>,
}

impl Core {
    /// Starts a tracked task for every handshake that a rank wants.
    pub(super) fn start_handshakes(&mut self) {
        for (rank, job) in self.ranks.take_handshake_jobs() {
            let registry = self.registry.clone();
            let over_zmq = self.shared.config.side_channel.is_some();
            let sender = self.handshake_sender.clone();
            let stop = self.stop.clone();
            let started = self.started;
            self.tracker.spawn(async move {
                let engine_id = job.engine_id.clone();
                let shaken = async {
                    match over_zmq {
                        true => side_channel::shake_hands(&job, || started.elapsed()).await,
                        false => shake_hands(job, registry, started).await,
                    }
                };
                let replies = tokio::select! {
                    () = stop.cancelled() => return,
                    replies = shaken => replies,
                };
                // A core that has ended needs no answer.
                let _ = sender.send(HandshakeOutcome { rank, engine_id, replies }).await;
            });
        }
    }

    pub(super) fn finish_handshake(&mut self, outcome: HandshakeOutcome) {
        let now = self.now();
        let HandshakeOutcome { rank, engine_id, replies } = outcome;
        if let Err(error) = self.ranks.complete_handshake(rank, &engine_id, replies, now) {
            tracing::warn!(peer = engine_id, rank, %error, "handshake failed");
        }
    }

    pub(super) fn apply_transfers(&mut self, report: WorkerReport) -> Result<(), CoreDeath> {
        if let Some(stats) = &report.stats {
            self.shared.metrics.lock().add_transfers(stats);
        }
        // Invalid blocks need no look: they are known from the requests, which fail as a whole.
        let results = report.results;
        for id in &results.finished_sending {
            match self.requests.get(id).map(|request| request.state) {
                Some(State::Finished) => self.forget(id),
                Some(_) => return Err(CoreDeath::ReleasedWhileRunning(id.clone())),
                None => tracing::debug!(id, "blocks of an unknown request were read"),
            }
        }
        for id in &results.finished_recving {
            self.scheduler.on_received(id);
            let failed = results.failed_recving.contains(id);
            match self.requests.get(id).map(|request| request.state) {
                Some(State::WaitingForRemoteKv) if failed => self.load_failed(id),
                Some(State::WaitingForRemoteKv) => self.load_arrived(id)?,
                Some(State::Finished) => self.forget(id),
                _ => tracing::debug!(id, "blocks of an unknown request have arrived"),
            }
        }
        Ok(())
    }

    /// Nobody has written in time what was announced, nor will: the prefill engine has forgotten it too.
    pub(super) fn give_up_overdue(&mut self) {
        for id in self.scheduler.take_overdue_registrations() {
            match self.requests.get(&id).map(|request| request.state) {
                Some(State::WaitingForRemoteKv) => self.load_failed(&id),
                Some(State::Finished) => self.forget(&id),
                _ => {}
            }
        }
    }

    fn load_arrived(&mut self, id: &str) -> Result<(), CoreDeath> {
        let Some(request) = self.requests.get_mut(id) else { return Ok(()) };
        match request.corrupt {
            Some(Corrupt::Pulled) => self.kv.corrupt(&request.blocks[request.first_pulled_block..])?,
            Some(Corrupt::Written) => {}
            None => {
                let size = self.shared.config.block_size;
                let hashes = &request.hashes[..request.computed / size];
                let first = self.pool.publish(&request.blocks[..hashes.len()], hashes);
                if let Some(events) = &mut self.events {
                    events.removed(self.pool.take_evicted());
                    events.stored(hashes, first, &request.tokens, size, &request.sampling.cache_salt);
                }
            }
        }
        if request.computed == request.tokens.len() {
            request.computed -= 1;
        }
        request.state = State::Waiting;
        let mut metrics = self.shared.metrics.lock();
        metrics.local_hit_tokens += request.local_hit as u64;
        metrics.external_tokens += request.external_tokens as u64;
        Ok(())
    }

    fn load_failed(&mut self, id: &str) {
        if self.shared.config.load_failure_policy == LoadFailurePolicy::Fail {
            if let Some(request) = self.requests.get(id) {
                // A receiver that is gone needs no news.
                let _ = request.outputs.try_send(Output::LoadFailed);
            }
            self.end_early(id, FinishStatus::Failed);
            self.shared.metrics.lock().count_outcome(Outcome::Error);
            return;
        }
        let Some(request) = self.requests.get_mut(id) else { return };
        let blocks = std::mem::take(&mut request.blocks);
        request.state = State::Waiting;
        request.computed = 0;
        request.external_tokens = 0;
        request.remote_cached = None;
        request.load_failed = true;
        self.pool.release(&blocks);
    }
}

async fn shake_hands(
    job: HandshakeJob,
    registry: Option<Arc<RegistryClient>>,
    started: Instant,
) -> Result<Vec<RankReply>, HandshakeFailure> {
    let registry = registry.ok_or(HandshakeFailure::UnknownEngine)?;
    let mut replies = Vec::with_capacity(job.ranks.len());
    for (pp_rank, tp_rank) in job.ranks {
        let sent = started.elapsed();
        let fetched = registry.fetch(&job.engine_id, pp_rank, tp_rank).await.inspect_err(|error| {
            tracing::warn!(peer = job.engine_id, tp_rank, %error, "handshake payload not available");
        })?;
        let received = started.elapsed();
        let clock = fetched.clock.map(|clock| ClockSample { sent, received, remote_seconds: clock.seconds });
        replies.push(RankReply { pp_rank, tp_rank, payload: fetched.payload, clock });
    }
    Ok(replies)
}

//! What runs in a step: running requests first, then waiting ones in order, as far as blocks,
//! batch size and token budget go.

use std::time::Duration;

use kv_connector::scheduler::{AllocatedBlocks, Matched};

use super::request::{Request, State};
use super::{Core, CoreDeath};
use crate::blocks::{BlockId, chain_hashes};
use crate::kv::ContextDigest;

/// Prompt tokens of one step may take this long, so that aborts are noticed in time.
const STEP_LIMIT: Duration = Duration::from_millis(50);

/// One request's part of a step.
pub(super) struct Work {
    pub(super) id: String,
    pub(super) tokens: usize,
    /// Only the newest token is computed, to sample the next one.
    decodes: bool,
}

/// What became of a waiting request.
enum Admission {
    Runs(usize),
    Parked,
    NoRoom,
}

impl Core {
    pub(super) fn schedule(&mut self) -> Result<Vec<Work>, CoreDeath> {
        let mut budget = self.token_budget();
        let mut plan = Vec::new();
        let mut index = 0;
        while index < self.running.len() && budget > 0 {
            let id = self.running[index].clone();
            match self.extend(&id, budget) {
                Some(tokens) => {
                    budget -= tokens;
                    plan.push(self.enter(id, tokens));
                    index += 1;
                }
                // Blocks ran out: the newest request gives its own back and starts over later.
                None => {
                    let Some(victim) = self.running.pop() else { break };
                    self.preempt(&victim);
                }
            }
        }
        self.admit_waiting(&mut budget, &mut plan)?;
        Ok(plan)
    }

    /// Enters a request's share into the plan. Its full blocks can be shared from now on, because
    /// the plan is carried out in order.
    fn enter(&mut self, id: String, tokens: usize) -> Work {
        let size = self.shared.config.block_size;
        let mut decodes = false;
        if let Some(request) = self.requests.get_mut(&id) {
            let end = request.computed + tokens;
            decodes = tokens == 1 && end == request.tokens.len();
            let full = end / size;
            if full > request.hashes.len() {
                request.hashes = chain_hashes(&request.tokens, size, &request.sampling.cache_salt);
            }
            // Falsified blocks must spoil the request that asked for it and no other.
            if request.corrupt.is_none() {
                let hashes = &request.hashes[..full];
                let first = self.pool.publish(&request.blocks[..full], hashes);
                if let Some(events) = &mut self.events {
                    events.removed(self.pool.take_evicted());
                    events.stored(hashes, first, &request.tokens, size, &request.sampling.cache_salt);
                }
            }
        }
        Work { id, tokens, decodes }
    }

    fn token_budget(&self) -> usize {
        let config = &self.shared.config;
        let per_token = config.prefill_time_per_token;
        if per_token.is_zero() {
            return config.max_num_batched_tokens;
        }
        let in_time = usize::try_from(STEP_LIMIT.as_nanos() / per_token.as_nanos()).unwrap_or(usize::MAX);
        config.max_num_batched_tokens.min(in_time.max(1))
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.shared.config.block_size)
    }

    /// Makes room for the next tokens of a request that has blocks; `None` when there is none.
    fn extend(&mut self, id: &str, budget: usize) -> Option<usize> {
        let request = self.requests.get(id)?;
        let tokens = (request.tokens.len() - request.computed).min(budget);
        let missing = self.blocks_for(request.computed + tokens).saturating_sub(request.blocks.len());
        let new = self.pool.allocate(missing)?;
        self.requests.get_mut(id)?.blocks.extend(new);
        Some(tokens)
    }

    fn preempt(&mut self, id: &str) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let blocks = std::mem::take(&mut request.blocks);
        request.state = State::Waiting;
        request.computed = 0;
        self.pool.release(&blocks);
        self.waiting.push_front(id.to_owned());
        self.shared.metrics.lock().preemptions += 1;
    }

    fn admit_waiting(&mut self, budget: &mut usize, plan: &mut Vec<Work>) -> Result<(), CoreDeath> {
        let mut index = 0;
        while index < self.waiting.len()
            && *budget > 0
            && self.running.len() < self.shared.config.max_num_seqs
        {
            let id = self.waiting[index].clone();
            if self.requests.get(&id).is_some_and(|request| request.state == State::WaitingForRemoteKv) {
                index += 1;
                continue;
            }
            match self.admit(&id, *budget)? {
                Admission::Runs(tokens) => {
                    self.waiting.remove(index);
                    self.running.push(id.clone());
                    *budget -= tokens;
                    plan.push(self.enter(id, tokens));
                }
                Admission::Parked => index += 1,
                Admission::NoRoom => break,
            }
        }
        Ok(())
    }

    fn admit(&mut self, id: &str, budget: usize) -> Result<Admission, CoreDeath> {
        let Some(request) = self.requests.get(id) else { return Ok(Admission::NoRoom) };
        if !request.blocks.is_empty() {
            return self.resume(id, budget);
        }
        // The last token is always computed, so that there is something to sample from.
        let reusable = match request.corrupt {
            None => (request.tokens.len() - 1) / self.shared.config.block_size,
            // Bytes that are to be falsified must be the request's own.
            Some(_) => 0,
        };
        let hits = self.pool.lookup(&request.hashes[..reusable.min(request.hashes.len())]);
        let local = hits.len() * self.shared.config.block_size;
        let total = request.tokens.len();
        let matched = self.scheduler.matched_tokens(id, local);
        let tokens = if matched.asynchronous { matched.tokens } else { (total - local).min(budget) };
        let new_blocks = self.blocks_for(local + tokens) - hits.len();
        if self.pool.available() < new_blocks + self.pool.idle_among(&hits) {
            return Ok(Admission::NoRoom);
        }
        self.pool.touch(&hits);
        let new = self.pool.allocate(new_blocks).unwrap_or_default();
        self.count_lookup(id, local, matched);
        self.tell_connector(id, &hits, &new, matched.tokens)?;
        let Some(request) = self.requests.get_mut(id) else { return Ok(Admission::NoRoom) };
        request.first_pulled_block = hits.len();
        request.blocks = hits;
        request.blocks.extend(new);
        request.digest = ContextDigest::default();
        request.computed = local;
        request.local_hit = local;
        if matched.asynchronous {
            request.computed += matched.tokens;
            request.external_tokens = matched.tokens;
            request.state = State::WaitingForRemoteKv;
            return Ok(Admission::Parked);
        }
        start_running(request);
        Ok(Admission::Runs(tokens))
    }

    /// A request whose blocks have been filled from elsewhere.
    fn resume(&mut self, id: &str, budget: usize) -> Result<Admission, CoreDeath> {
        let Some(tokens) = self.extend(id, budget) else { return Ok(Admission::NoRoom) };
        self.tell_connector(id, &[], &[], 0)?;
        let Some(request) = self.requests.get_mut(id) else { return Ok(Admission::NoRoom) };
        request.digest = ContextDigest::default();
        start_running(request);
        Ok(Admission::Runs(tokens))
    }

    fn tell_connector(
        &mut self,
        id: &str,
        hits: &[BlockId],
        new: &[BlockId],
        external: usize,
    ) -> Result<(), CoreDeath> {
        let blocks = AllocatedBlocks {
            unhashed: vec![new.iter().map(|block| u64::from(*block)).collect()],
            cached: vec![hits.len()],
        };
        self.scheduler.update_after_alloc(id, &blocks, external)?;
        Ok(())
    }

    fn count_lookup(&self, id: &str, local: usize, matched: Matched) {
        let Some(request) = self.requests.get(id) else { return };
        let mut metrics = self.shared.metrics.lock();
        metrics.prefix_queries += request.tokens.len() as u64;
        metrics.external_queries += (request.tokens.len() - local) as u64;
        if request.cached_tokens.is_none() && !request.load_failed && !matched.asynchronous {
            metrics.local_hit_tokens += local as u64;
        }
    }

    pub(super) fn forward_time(&self, plan: &[Work]) -> Duration {
        let config = &self.shared.config;
        let prefill: usize = plan.iter().filter(|work| !work.decodes).map(|work| work.tokens).sum();
        let decodes = plan.iter().any(|work| work.decodes);
        let decode = if decodes { config.decode_time_per_token } else { Duration::ZERO };
        config.prefill_time_per_token * u32::try_from(prefill).unwrap_or(u32::MAX) + decode
    }
}

fn start_running(request: &mut Request) {
    request.state = State::Running;
    let cached = request.remote_cached.unwrap_or(request.computed);
    request.cached_tokens.get_or_insert(cached);
}

//! A step's computation: KV for the scheduled tokens, then one new token per complete request.

use kv_connector::scheduler::FinishStatus;

use super::request::{Finish, FinishReason, Generated, Output, Request, Sampling, State};
use super::schedule::Work;
use super::{Core, CoreDeath};
use crate::faults::Corrupt;
use crate::kv::{ContextDigest, mix};
use crate::metrics::Outcome;
use crate::tokens::{self, EOS, Token};

/// Every so many tokens the whole context is read again, so that late damage shows too.
const REREAD_INTERVAL: usize = 16;

impl Core {
    pub(super) fn execute(&mut self, plan: Vec<Work>) -> Result<(), CoreDeath> {
        for Work { id, tokens, .. } in plan {
            self.compute(&id, tokens)?;
            let complete =
                self.requests.get(&id).is_some_and(|request| request.computed == request.tokens.len());
            if complete {
                self.sample(&id)?;
            }
        }
        Ok(())
    }

    fn compute(&mut self, id: &str, tokens: usize) -> Result<(), CoreDeath> {
        let Some(request) = self.requests.get_mut(id) else { return Ok(()) };
        let start = request.computed;
        let end = start + tokens;
        self.kv.compute(&request.blocks, start, &request.tokens[start..end])?;
        request.computed = end;
        if end >= request.prompt_len
            && start < request.prompt_len
            && request.corrupt == Some(Corrupt::Written)
        {
            self.kv.corrupt(&request.blocks)?;
        }
        // A pulled prompt counts as such; its last token is computed again without being counted.
        let pulled = request.local_hit + request.external_tokens;
        let from = if request.external_tokens > 0 { start.max(pulled) } else { start };
        let prompt_part = end.min(request.prompt_len).saturating_sub(from);
        self.shared.metrics.lock().computed_tokens += prompt_part as u64;
        Ok(())
    }

    fn sample(&mut self, id: &str) -> Result<(), CoreDeath> {
        let eos_every = self.shared.config.eos_every;
        let max_model_len = self.shared.config.max_model_len;
        let size = self.shared.config.block_size;
        let Some(request) = self.requests.get_mut(id) else { return Ok(()) };
        if request.generated().is_multiple_of(REREAD_INTERVAL) {
            request.digest = ContextDigest::default();
        }
        request.digest = self.kv.read_context(&request.blocks, request.digest, request.computed)?;
        let entropy = request.digest.entropy(request.sampling.noise);
        let token = choose(entropy, &request.sampling, request.generated(), eos_every);
        request.tokens.push(token);
        let reason = stop_reason(request, token, max_model_len);
        let prompt_blocks = request.prompt_len / size * size;
        let generated = Generated {
            token,
            entropy,
            cached_tokens: request.cached_tokens.unwrap_or(0),
            created_tokens: prompt_blocks.saturating_sub(request.local_hit + request.external_tokens),
            finish: None,
        };
        self.shared.metrics.lock().generation_tokens += 1;
        match reason {
            // The channel holds all tokens of a request; a closed one is seen as an abort later.
            None => drop(request.outputs.try_send(Output::Token(Box::new(generated)))),
            Some(reason) => self.finish(id, generated, reason),
        }
        Ok(())
    }

    fn finish(&mut self, id: &str, mut generated: Generated, reason: FinishReason) {
        self.running.retain(|other| other != id);
        let now = self.now();
        let Some(request) = self.requests.get_mut(id) else { return };
        request.state = State::Finished;
        let (status, outcome) = match reason {
            FinishReason::Length => (FinishStatus::LengthCapped, Outcome::Length),
            FinishReason::Stop(_) => (FinishStatus::Stopped, Outcome::Stop),
        };
        let blocks: Vec<u64> = request.blocks.iter().map(|block| u64::from(*block)).collect();
        let finished = self.scheduler.request_finished(id, status, &[blocks], request.computed as u64, now);
        let mut params = finished.params;
        if let Some(params) = &mut params
            && params.do_remote_prefill
            && self.shared.config.is_v14()
            && request.generated() == 1
        {
            params.remote_prefill_cached_tokens = (request.cached_tokens.unwrap_or(0) as u64).into();
        }
        generated.finish = Some(Finish { reason, params });
        // A client that has gone just now leaves the hand-off to its lease, as in vLLM.
        drop(request.outputs.try_send(Output::Token(Box::new(generated))));
        self.unflushed = true;
        self.shared.metrics.lock().count_outcome(outcome);
        if !finished.delay_free {
            self.forget(id);
        }
    }
}

fn choose(entropy: u64, sampling: &Sampling, generated: usize, eos_every: Option<u64>) -> Token {
    if !sampling.script.is_empty() {
        return match sampling.script.get(generated) {
            Some(Some(token)) => *token,
            Some(None) => tokens::printable(entropy),
            None => EOS,
        };
    }
    let may_stop = generated >= sampling.min_tokens;
    let wants_eos = eos_every.is_some_and(|every| entropy.is_multiple_of(every));
    if wants_eos && may_stop {
        return EOS;
    }
    let mut token = tokens::printable(entropy);
    let mut attempt = entropy;
    // Stop tokens are impossible before the minimum; the alphabet is larger than any such list.
    for _ in 0..256 {
        if may_stop || !sampling.stop_token_ids.contains(&token) {
            break;
        }
        attempt = mix(attempt);
        token = tokens::printable(attempt);
    }
    token
}

fn stop_reason(request: &Request, token: Token, max_model_len: usize) -> Option<FinishReason> {
    let sampling = &request.sampling;
    if request.generated() < sampling.min_tokens {
        return None;
    }
    if token == EOS && !sampling.ignore_eos {
        return Some(FinishReason::Stop(None));
    }
    if sampling.stop_token_ids.contains(&token) {
        return Some(FinishReason::Stop(Some(token)));
    }
    let full = request.tokens.len() >= max_model_len;
    (full || request.generated() >= sampling.max_tokens).then_some(FinishReason::Length)
}

//! One engine in simulated time: a vLLM scheduler's steps (running sequences first, then waiting ones in their order,
//! as far as tokens, sequences and blocks go) with what each step takes. Does what the simulated engine of the same
//! settings does in real time.

use std::collections::VecDeque;
use std::time::Duration;

use crate::blocks::{Memory, Piece};
use crate::fleet::EngineSettings;

/// A sequence's place in its engine.
pub(crate) type Seat = usize;

/// What a sequence is to do.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    /// The request's number.
    pub(crate) request: u32,
    /// Tokens of the prompt.
    pub(crate) prompt: u32,
    /// Tokens to generate.
    pub(crate) output: u32,
    /// Its prompt's blocks.
    pub(crate) names: Box<[u64]>,
    /// Whether another engine has computed the prompt.
    pub(crate) pulls: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    /// Its blocks are on their way.
    Pulling,
    Running,
}

#[derive(Debug)]
struct Sequence {
    work: Work,
    state: State,
    computed: u32,
    generated: u32,
    /// The prompt's pieces, as far as they are there, then the one that grows with the answer.
    pieces: Vec<Piece>,
    room: u32,
    has_tail: bool,
    published: usize,
    /// Tokens of the prompt that need not be computed; known when it first runs.
    cached: Option<u32>,
}

impl Sequence {
    const fn tokens(&self) -> u32 {
        self.work.prompt + self.generated
    }
}

/// A token that a sequence got in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) request: u32,
    /// Begins with 1.
    pub(crate) number: u32,
    pub(crate) ends: bool,
    /// Tokens of the prompt that were not computed.
    pub(crate) cached: u32,
}

/// A prompt's blocks that are kept for another engine.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) request: u32,
    pub(crate) pieces: Vec<Piece>,
}

/// A sequence that waits for blocks of so many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pull {
    pub(crate) seat: Seat,
    pub(crate) request: u32,
    pub(crate) tokens: u32,
}

/// One engine.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) settings: EngineSettings,
    /// Tokens of a named block.
    name_tokens: u32,
    /// Whether other engines read the prompts that it computes.
    keeps: bool,
    memory: Memory,
    seats: Vec<Option<Sequence>>,
    spare: Vec<Seat>,
    waiting: VecDeque<Seat>,
    running: Vec<Seat>,
    pulling: usize,
    /// Prompts that other engines have yet to read.
    leases: usize,
    step: Vec<(Seat, u32, bool)>,
    pub(crate) is_stepping: bool,
    pub(crate) told: Told,
}

/// What is told of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    pub(crate) busy: Duration,
    pub(crate) requests: u64,
    pub(crate) looked_up: u64,
    pub(crate) found: u64,
    pub(crate) computed: u64,
    pub(crate) generated: u64,
    pub(crate) preemptions: u64,
    pub(crate) highest_usage: f64,
}

impl Engine {
    pub(crate) fn new(settings: EngineSettings, name_tokens: u32, keeps: bool) -> Self {
        Self {
            keeps,
            memory: Memory::new(settings.kv_tokens / u64::from(settings.block_size)),
            settings,
            name_tokens,
            seats: Vec::new(),
            spare: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            pulling: 0,
            leases: 0,
            step: Vec::new(),
            is_stepping: false,
            told: Told::default(),
        }
    }

    /// Whether so many tokens can ever have room here.
    pub(crate) fn has_room_for(&self, tokens: u64) -> bool {
        tokens
            <= self.settings.kv_tokens / u64::from(self.settings.block_size)
                * u64::from(self.settings.block_size)
    }

    pub(crate) fn submit(&mut self, work: Work) {
        self.told.requests += 1;
        let sequence = Sequence {
            work,
            state: State::Waiting,
            computed: 0,
            generated: 0,
            pieces: Vec::new(),
            room: 0,
            has_tail: false,
            published: 0,
            cached: None,
        };
        let seat = match self.spare.pop() {
            Some(seat) => {
                self.seats[seat] = Some(sequence);
                seat
            }
            None => {
                self.seats.push(Some(sequence));
                self.seats.len() - 1
            }
        };
        self.waiting.push_back(seat);
    }

    /// Tokens of a prompt that its prefix cache has.
    pub(crate) fn cached(&self, names: &[u64], prompt: u32) -> u32 {
        self.memory.cached(names).min(self.reusable(prompt))
    }

    /// The last token is always computed, and with it its block.
    const fn reusable(&self, tokens: u32) -> u32 {
        (tokens - 1) / self.settings.block_size * self.settings.block_size
    }

    /// Begins a step: what it takes, if there is anything to compute, and what is to be read first.
    pub(crate) fn begin(&mut self, pulls: &mut Vec<Pull>) -> Option<Duration> {
        loop {
            self.schedule(pulls);
            if !self.step.is_empty() || !self.give_up_blocks() {
                break;
            }
        }
        self.told.highest_usage = self.told.highest_usage.max(self.memory.usage());
        if self.step.is_empty() {
            return None;
        }
        let prompt: u64 = self.step.iter().filter(|part| !part.2).map(|part| u64::from(part.1)).sum();
        let decodes = self.step.iter().filter(|part| part.2).count() as u32;
        let mut takes = Duration::ZERO;
        if prompt > 0 {
            let computing = Duration::from_secs_f64(prompt as f64 / self.settings.prefill_tokens_per_second);
            takes += self.settings.prefill_start + computing;
        }
        if decodes > 0 {
            takes += self.settings.decode_step + self.settings.decode_sequence * decodes;
        }
        self.told.busy += takes;
        self.is_stepping = true;
        Some(takes)
    }

    /// Nothing runs and nothing will end by itself: who waits last with blocks gives them back.
    fn give_up_blocks(&mut self) -> bool {
        if !self.running.is_empty() || self.pulling > 0 || self.leases > 0 {
            return false;
        }
        let holds = |seat: &Seat| self.seats[*seat].as_ref().is_some_and(|one| !one.pieces.is_empty());
        let Some(at) = self.waiting.iter().rposition(holds) else { return false };
        let seat = self.waiting[at];
        self.take_blocks(seat);
        true
    }

    fn budget(&self) -> u32 {
        let settings = &self.settings;
        if settings.longest_step.is_zero() {
            return settings.max_num_batched_tokens;
        }
        let in_time = settings.longest_step.as_secs_f64() * settings.prefill_tokens_per_second;
        settings.max_num_batched_tokens.min((in_time + 1e-6).max(1.0) as u32)
    }

    fn schedule(&mut self, pulls: &mut Vec<Pull>) {
        let mut budget = self.budget();
        let mut at = 0;
        while at < self.running.len() && budget > 0 {
            let seat = self.running[at];
            match self.extend(seat, budget) {
                Some(tokens) => {
                    budget -= tokens;
                    self.enter(seat, tokens);
                    at += 1;
                }
                None => {
                    let Some(victim) = self.running.pop() else { break };
                    self.take_blocks(victim);
                    self.waiting.push_front(victim);
                    self.told.preemptions += 1;
                }
            }
        }
        let mut at = 0;
        while at < self.waiting.len() && budget > 0 && self.running.len() < self.settings.max_num_seqs {
            let seat = self.waiting[at];
            let Some(sequence) = &self.seats[seat] else { break };
            if sequence.state == State::Pulling {
                at += 1;
                continue;
            }
            let tokens = if sequence.pieces.is_empty() {
                self.admit(seat, budget, pulls)
            } else {
                self.extend(seat, budget)
            };
            match tokens {
                None => break,
                Some(0) => at += 1,
                Some(tokens) => {
                    self.waiting.remove(at);
                    self.running.push(seat);
                    budget -= tokens;
                    if let Some(sequence) = &mut self.seats[seat] {
                        sequence.state = State::Running;
                        let cached = sequence.computed;
                        sequence.cached.get_or_insert(cached);
                    }
                    self.enter(seat, tokens);
                }
            }
        }
    }

    /// Enters a part of a step; what it fills is there for others from now on.
    fn enter(&mut self, seat: Seat, tokens: u32) {
        let Some(sequence) = &self.seats[seat] else { return };
        let end = sequence.computed + tokens;
        let decodes = tokens == 1 && end == sequence.tokens();
        self.step.push((seat, tokens, decodes));
        self.publish(seat, end);
    }

    fn publish(&mut self, seat: Seat, end: u32) {
        let Some(sequence) = &mut self.seats[seat] else { return };
        let (prompt, size) = (sequence.work.prompt, self.settings.block_size);
        while let Some(name) = sequence.work.names.get(sequence.published) {
            let begin = sequence.published as u32 * self.name_tokens;
            let last = (begin + self.name_tokens).min(prompt);
            let Some(piece) = sequence.pieces.get(sequence.published).filter(|_| end >= last) else { break };
            // Of a block that is not whole nothing is shared.
            let whole = (last - begin) / size * size;
            if whole > 0 {
                self.memory.publish(*piece, *name, whole);
            }
            sequence.published += 1;
        }
    }

    /// How many tokens a sequence computes next, with room for them; none where there is none.
    fn extend(&mut self, seat: Seat, budget: u32) -> Option<u32> {
        let sequence = self.seats[seat].as_ref()?;
        let tokens = (sequence.tokens() - sequence.computed).min(budget);
        let end = sequence.computed + tokens;
        self.make_room(seat, end)?;
        Some(tokens)
    }

    /// Gives a sequence room up to a token.
    fn make_room(&mut self, seat: Seat, end: u32) -> Option<()> {
        let size = self.settings.block_size;
        let sequence = self.seats[seat].as_mut()?;
        while sequence.room < end {
            let prompt = sequence.work.prompt;
            if sequence.room < prompt {
                let at = sequence.pieces.len() as u32;
                let tokens = (prompt - at * self.name_tokens).min(self.name_tokens);
                let piece = self.memory.take(tokens.div_ceil(size))?;
                sequence.pieces.push(piece);
                sequence.room = at * self.name_tokens + tokens;
                if sequence.room == prompt {
                    // The block's rest is the answer's.
                    sequence.room = at * self.name_tokens + tokens.div_ceil(size) * size;
                }
            } else {
                let blocks = (end - sequence.room).div_ceil(size);
                match sequence.pieces.last() {
                    Some(tail) if sequence.has_tail => self.memory.grow(*tail, blocks)?,
                    _ => {
                        let tail = self.memory.take(blocks)?;
                        sequence.pieces.push(tail);
                        sequence.has_tail = true;
                    }
                }
                sequence.room += blocks * size;
            }
        }
        Some(())
    }

    /// Lets a sequence begin: the tokens of its first step, nothing where it first reads blocks.
    fn admit(&mut self, seat: Seat, budget: u32, pulls: &mut Vec<Pull>) -> Option<u32> {
        let sequence = self.seats[seat].as_ref()?;
        let (total, pulls_blocks) = (sequence.tokens(), sequence.work.pulls);
        let (mut hits, found) = self.memory.lookup(&sequence.work.names);
        let local = found.min(self.reusable(total));
        hits.truncate(local.div_ceil(self.name_tokens) as usize);
        let tokens = if pulls_blocks { total - local } else { (total - local).min(budget) };
        let room = (hits.len() as u32 * self.name_tokens).min(total);
        let missing = (local + tokens).saturating_sub(room).div_ceil(self.settings.block_size);
        if self.memory.available() < u64::from(missing) + self.memory.idle_among(&hits) {
            return None;
        }
        self.memory.hold(&hits);
        let sequence = self.seats[seat].as_mut()?;
        let prompt = sequence.work.prompt;
        sequence.room =
            (hits.len() as u32 * self.name_tokens).min(prompt.next_multiple_of(self.settings.block_size));
        sequence.published = hits.len();
        sequence.pieces = hits;
        sequence.computed = local;
        if self.make_room(seat, local + tokens).is_none() {
            self.take_blocks(seat);
            return None;
        }
        self.told.looked_up += u64::from(total);
        self.told.found += u64::from(local);
        if !pulls_blocks {
            return Some(tokens);
        }
        let sequence = self.seats[seat].as_mut()?;
        sequence.state = State::Pulling;
        pulls.push(Pull { seat, request: sequence.work.request, tokens });
        self.pulling += 1;
        Some(0)
    }

    /// A sequence loses its blocks and begins anew; what it has generated stays.
    fn take_blocks(&mut self, seat: Seat) {
        let Some(sequence) = &mut self.seats[seat] else { return };
        let pieces = std::mem::take(&mut sequence.pieces);
        (sequence.computed, sequence.room, sequence.published) = (0, 0, 0);
        (sequence.has_tail, sequence.state) = (false, State::Waiting);
        self.memory.release(&pieces);
    }

    /// What a sequence waited for has come.
    pub(crate) fn pulled(&mut self, seat: Seat) {
        self.pulling -= 1;
        let Some(sequence) = &mut self.seats[seat] else { return };
        sequence.state = State::Waiting;
        sequence.work.pulls = false;
        let end = sequence.work.prompt;
        // The last token is computed again, to sample from.
        sequence.computed = end - 1;
        self.publish(seat, end);
    }

    /// Ends a step.
    pub(crate) fn end(&mut self, tokens_got: &mut Vec<Token>, kept: &mut Vec<Kept>) {
        self.is_stepping = false;
        let mut step = std::mem::take(&mut self.step);
        for (seat, tokens, decodes) in step.drain(..) {
            let Some(sequence) = &mut self.seats[seat] else { continue };
            sequence.computed += tokens;
            if !decodes {
                self.told.computed += u64::from(tokens);
            }
            if sequence.computed < sequence.tokens() {
                continue;
            }
            sequence.generated += 1;
            self.told.generated += 1;
            let (request, number) = (sequence.work.request, sequence.generated);
            let (ends, cached) = (number >= sequence.work.output, sequence.cached.unwrap_or(0));
            tokens_got.push(Token { request, number, ends, cached });
            if ends {
                self.running.retain(|other| *other != seat);
                if let Some(ended) = self.seats[seat].take() {
                    self.spare.push(seat);
                    if self.keeps {
                        self.leases += 1;
                        kept.push(Kept { request, pieces: ended.pieces });
                    } else {
                        self.memory.release(&ended.pieces);
                    }
                }
            }
        }
        self.step = step;
    }

    /// Another engine has read a prompt that was kept for it.
    pub(crate) fn was_read(&mut self, pieces: &[Piece]) {
        self.leases -= 1;
        self.memory.release(pieces);
    }

    /// Its metrics page, as far as the router reads it.
    pub(crate) fn page(&self) -> String {
        format!(
            "vllm:num_requests_running {}\nvllm:num_requests_waiting {}\nvllm:kv_cache_usage_perc {}\n\
             vllm:prefix_cache_queries_total {}\nvllm:prefix_cache_hits_total {}\n",
            self.running.len(),
            self.waiting.len(),
            self.memory.usage(),
            self.told.looked_up,
            self.told.found
        )
    }
}

#[cfg(test)]
mod tests;

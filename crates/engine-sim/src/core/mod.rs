//! The engine core: one task that steps while there is work and is parked otherwise.
//!
//! It owns the blocks, the KV bytes and both halves of the connector. Whatever kills a vLLM
//! engine core ends this task; nothing here answers HTTP.

mod forward;
pub(crate) mod request;
mod schedule;
mod transfer;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kv_connector::ClockTime;
use kv_connector::error::EngineFatal;
use kv_connector::handshake::RegistryClient;
use kv_connector::protocol::KvTransferParams;
use kv_connector::scheduler::{FinishStatus, Scheduler};
use kv_connector::transport::MemoryError;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::blocks::{BlockPool, chain_hashes};
use crate::cache_events::CacheEvents;
use crate::kv::{ContextDigest, KvCache, KvError};
use crate::metrics::{Gauges, Outcome};
use crate::ranks::{PollError, Ranks};
use crate::shared::Shared;
use request::{Command, NewRequest, Output, Request, State};
use transfer::HandshakeOutcome;

/// How long a step without anything to compute waits before transfers are looked at again.
const IDLE_STEP: Duration = Duration::from_millis(1);

/// Most leases that a reading names.
const SHOWN_LEASES: usize = 4;

/// What ends an engine core.
#[derive(Debug, Error)]
enum CoreDeath {
    /// The connector met a state that vLLM dies of.
    #[error(transparent)]
    Connector(#[from] EngineFatal),
    /// Transfer parameters held values of impossible types.
    #[error("transfer parameters have values of the wrong type")]
    Poisoned,
    /// A peer reported blocks as read while their request still ran.
    #[error("request {0} was released before it had finished")]
    ReleasedWhileRunning(String),
    /// A block outside the memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A block that did not have the expected size.
    #[error(transparent)]
    Kv(#[from] KvError),
}

impl From<PollError> for CoreDeath {
    fn from(error: PollError) -> Self {
        match error {
            PollError::Connector(error) => error.into(),
            PollError::Kv(error) => error.into(),
        }
    }
}

/// What the core is built from.
pub(crate) struct CoreParts {
    pub(crate) shared: Arc<Shared>,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) scheduler: Scheduler,
    pub(crate) ranks: Ranks,
    pub(crate) kv: KvCache,
    pub(crate) registry: Option<Arc<RegistryClient>>,
    pub(crate) tracker: TaskTracker,
    pub(crate) stop: CancellationToken,
    /// Where it says what its prefix cache holds, if it does.
    pub(crate) events: Option<CacheEvents>,
    /// The origin of the engine's clock.
    pub(crate) started: Instant,
}

/// One engine core.
pub(crate) struct Core {
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    scheduler: Scheduler,
    ranks: Ranks,
    kv: KvCache,
    registry: Option<Arc<RegistryClient>>,
    tracker: TaskTracker,
    stop: CancellationToken,
    started: Instant,
    pool: BlockPool,
    events: Option<CacheEvents>,
    requests: HashMap<String, Request>,
    waiting: VecDeque<String>,
    running: Vec<String>,
    handshake_sender: mpsc::Sender<HandshakeOutcome>,
    handshake_outcomes: mpsc::Receiver<HandshakeOutcome>,
    /// The connector has something for its worker although no request needs a step.
    unflushed: bool,
    aborted: u64,
}

/// Why the core woke up.
enum Wake {
    Stop,
    Command(Option<Command>),
    Handshake(HandshakeOutcome),
    Look,
}

impl Core {
    pub(crate) fn new(parts: CoreParts) -> Self {
        let (handshake_sender, handshake_outcomes) = mpsc::channel(64);
        let mut pool = BlockPool::new(parts.shared.config.num_blocks);
        if parts.events.is_some() {
            pool.collect_evicted();
        }
        Self {
            pool,
            events: parts.events,
            shared: parts.shared,
            commands: parts.commands,
            scheduler: parts.scheduler,
            ranks: parts.ranks,
            kv: parts.kv,
            registry: parts.registry,
            tracker: parts.tracker,
            stop: parts.stop,
            started: parts.started,
            requests: HashMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            handshake_sender,
            handshake_outcomes,
            unflushed: false,
            aborted: 0,
        }
    }

    /// Steps until the engine is stopped or its core dies.
    pub(crate) async fn run(mut self) {
        match self.work().await {
            Ok(()) => {}
            Err(death) => {
                tracing::error!(engine_id = self.shared.engine_id, %death, "engine core died");
                self.shared.dead.store(true, Ordering::Release);
            }
        }
        for request in self.requests.values() {
            // A receiver that is gone needs no news.
            let _ = request.outputs.try_send(Output::Dead);
        }
        self.ranks.shutdown();
    }

    fn now(&self) -> ClockTime {
        self.started.elapsed()
    }

    async fn work(&mut self) -> Result<(), CoreDeath> {
        loop {
            self.take_everything_pending()?;
            self.abort_departed();
            if !self.has_work() {
                self.publish();
                let wake = self.park(None).await;
                if !self.handle(wake)? {
                    return Ok(());
                }
                continue;
            }
            let plan = self.schedule()?;
            self.unflushed = false;
            let now = self.now();
            let meta = self.scheduler.build_step(now)?;
            self.ranks.start_load(&meta, now)?;
            self.start_handshakes();
            self.publish();
            let duration = self.forward_time(&plan);
            if !duration.is_zero() && self.stopped_during(duration).await {
                return Ok(());
            }
            let computed_something = !plan.is_empty();
            self.execute(plan)?;
            let report = self.ranks.poll(self.now(), &self.kv)?;
            self.apply_transfers(report)?;
            self.give_up_overdue();
            self.publish();
            if computed_something {
                tokio::task::yield_now().await;
            } else if self.has_work() {
                let wake = self.park(Some(IDLE_STEP)).await;
                if !self.handle(wake)? {
                    return Ok(());
                }
            }
            if self.stop.is_cancelled() {
                return Ok(());
            }
        }
    }

    async fn stopped_during(&self, duration: Duration) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => true,
            () = tokio::time::sleep(duration) => false,
        }
    }

    /// Waits for anything to happen, or for the next look at transfers.
    async fn park(&mut self, limit: Option<Duration>) -> Wake {
        // An idle core of the faithful kind does not notice handshakes: they wait for its next step.
        let sees_handshakes = limit.is_some() || !self.shared.config.idle_trap;
        let timer = async {
            match limit {
                Some(limit) => tokio::time::sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => Wake::Stop,
            command = self.commands.recv() => Wake::Command(command),
            Some(outcome) = self.handshake_outcomes.recv(), if sees_handshakes => Wake::Handshake(outcome),
            () = self.shared.wake.notified() => Wake::Look,
            () = timer => Wake::Look,
        }
    }

    /// Acts on what woke the core; false when it has to end.
    fn handle(&mut self, wake: Wake) -> Result<bool, CoreDeath> {
        match wake {
            Wake::Stop | Wake::Command(None) => return Ok(false),
            Wake::Command(Some(command)) => self.accept(command)?,
            Wake::Handshake(outcome) => self.finish_handshake(outcome),
            Wake::Look => {}
        }
        Ok(true)
    }

    fn take_everything_pending(&mut self) -> Result<(), CoreDeath> {
        while let Ok(command) = self.commands.try_recv() {
            self.accept(command)?;
        }
        if self.has_work() {
            while let Ok(outcome) = self.handshake_outcomes.try_recv() {
                self.finish_handshake(outcome);
            }
        }
        Ok(())
    }

    /// v14 steps while finished requests still hold blocks; v2 is blind then.
    fn has_work(&self) -> bool {
        let patient = self.shared.config.is_v14() || !self.shared.config.idle_trap;
        let busy = !self.running.is_empty() || !self.waiting.is_empty();
        busy || self.unflushed
            || (patient && !self.requests.is_empty())
            || (!self.shared.config.idle_trap && self.ranks.has_pending_receives())
    }

    fn accept(&mut self, command: Command) -> Result<(), CoreDeath> {
        match command {
            Command::Submit(new) => self.add(*new),
            Command::Poison => return Err(CoreDeath::Poisoned),
            Command::PreAborted { id, params } => {
                self.scheduler.on_new_request(&id, 1, Some(*params));
                let now = self.now();
                self.scheduler.request_finished(&id, FinishStatus::Aborted, &[], 0, now);
                self.unflushed = true;
            }
        }
        Ok(())
    }

    fn add(&mut self, new: NewRequest) {
        if self.requests.contains_key(&new.id) {
            let _ = new.outputs.try_send(Output::Duplicate);
            return;
        }
        let flag = |choose: fn(&KvTransferParams) -> bool| new.params.as_ref().is_some_and(choose);
        let is_prefill_leg = flag(|params| params.do_remote_decode);
        let remote_cached = new
            .params
            .as_ref()
            .filter(|params| params.do_remote_prefill)
            .and_then(|params| params.remote_prefill_cached_tokens.value().copied())
            .and_then(|tokens| usize::try_from(tokens).ok());
        self.scheduler.on_new_request(&new.id, new.prompt.len(), new.params);
        let hashes = chain_hashes(&new.prompt, self.shared.config.block_size, &new.sampling.cache_salt);
        let request = Request {
            state: State::Waiting,
            prompt_len: new.prompt.len(),
            tokens: new.prompt,
            computed: 0,
            blocks: Vec::new(),
            hashes,
            sampling: new.sampling,
            corrupt: new.corrupt,
            outputs: new.outputs,
            digest: ContextDigest::default(),
            cached_tokens: None,
            local_hit: 0,
            external_tokens: 0,
            first_pulled_block: 0,
            remote_cached,
            load_failed: false,
            is_prefill_leg,
        };
        self.requests.insert(new.id.clone(), request);
        self.waiting.push_back(new.id);
    }

    /// Aborts every request whose receiver is gone.
    fn abort_departed(&mut self) {
        let departed: Vec<String> = self
            .running
            .iter()
            .chain(&self.waiting)
            .filter(|id| self.requests.get(*id).is_some_and(|request| request.outputs.is_closed()))
            .cloned()
            .collect();
        for id in departed {
            self.aborted += 1;
            self.end_early(&id, FinishStatus::Aborted);
            self.shared.metrics.lock().count_outcome(Outcome::Abort);
        }
    }

    /// Ends a request before its time. Blocks that a transfer may still write stay allocated (v14).
    fn end_early(&mut self, id: &str, status: FinishStatus) {
        self.running.retain(|other| other != id);
        self.waiting.retain(|other| other != id);
        let Some(request) = self.requests.get_mut(id) else { return };
        let transfer_runs = request.state == State::WaitingForRemoteKv;
        request.state = State::Finished;
        let blocks: Vec<u64> = request.blocks.iter().map(|block| u64::from(*block)).collect();
        let computed = request.computed as u64;
        let now = self.started.elapsed();
        self.scheduler.request_finished(id, status, &[blocks], computed, now);
        self.unflushed = true;
        if !(transfer_runs && status == FinishStatus::Aborted && self.shared.config.is_v14()) {
            self.forget(id);
        }
    }

    /// Drops a request and its references to blocks.
    fn forget(&mut self, id: &str) {
        if let Some(request) = self.requests.remove(id) {
            self.pool.release(&request.blocks);
        }
    }

    fn publish(&mut self) {
        if let Some(events) = &mut self.events {
            events.removed(self.pool.take_evicted());
            events.flush(self.started.elapsed().as_secs_f64());
        }
        let count = |state: State| self.requests.values().filter(|request| request.state == state).count();
        let parked = count(State::WaitingForRemoteKv);
        let is_leased = |request: &Request| request.state == State::Finished && request.is_prefill_leg;
        let leased: Vec<(&String, &Request)> =
            self.requests.iter().filter(|(_, request)| is_leased(request)).collect();
        let mut stats = self.shared.stats.lock();
        stats.blocks_held = self.pool.used();
        stats.blocks_held_for_remote = leased.iter().map(|(_, request)| request.blocks.len()).sum();
        stats.leases = leased.len();
        stats.leased = leased.iter().take(SHOWN_LEASES).map(|(id, _)| (*id).clone()).collect();
        stats.running = self.running.len();
        stats.waiting = self.waiting.len();
        stats.waiting_for_remote_kv = parked;
        stats.aborted = self.aborted;
        drop(stats);
        *self.shared.gauges.lock() = Gauges {
            running: self.running.len(),
            waiting: self.waiting.len(),
            deferred: parked,
            cache_usage: self.pool.used() as f64 / self.pool.capacity().max(1) as f64,
        };
    }
}

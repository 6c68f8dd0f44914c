//! What the core, the HTTP layer and the handle of one engine share.
//!
//! Locks here are held for a moment only and never over an await.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use http::HeaderMap;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{Notify, mpsc};

use crate::config::EngineConfig;
use crate::core::request::Command;
use crate::faults::Faults;
use crate::metrics::{Gauges, Metrics};

/// A request as it arrived, before anything was done with it.
#[derive(Debug, Clone)]
pub struct SeenRequest {
    /// Method and path.
    pub method: http::Method,
    /// Path with query.
    pub path: String,
    /// All headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

/// A reading of one engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct EngineStats {
    /// Blocks that any request holds.
    pub blocks_held: usize,
    /// Blocks of finished requests that wait for a decode engine or for the lease's end.
    pub blocks_held_for_remote: usize,
    /// Finished requests that wait for a decode engine or for the lease's end.
    pub leases: usize,
    /// The ids of some of them.
    pub leased: Vec<String>,
    /// Requests in the running batch.
    pub running: usize,
    /// Requests that wait, those parked for remote KV included.
    pub waiting: usize,
    /// Requests parked for remote KV.
    pub waiting_for_remote_kv: usize,
    /// Requests accepted with `do_remote_decode`.
    pub prefill_requests: u64,
    /// Requests accepted with `do_remote_prefill`.
    pub decode_requests: u64,
    /// Requests accepted without a transfer.
    pub plain_requests: u64,
    /// Pulls that succeeded, counted at every rank and for each rank that was read.
    pub kv_pulls: u64,
    /// Leases that ran out, counted at every rank.
    pub kv_expired: u64,
    /// Completion notifications for requests that were no longer kept.
    pub late_notifications: u64,
    /// Tokens generated.
    pub tokens_generated: u64,
    /// Requests that ended because their client went away.
    pub aborted: u64,
    /// The engine core has died: every request is answered with an error.
    pub dead: bool,
}

/// The state of one engine outside its core.
pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) engine_id: String,
    pub(crate) fingerprint: Option<String>,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) wake: Notify,
    pub(crate) faults: Faults,
    pub(crate) metrics: Mutex<Metrics>,
    pub(crate) gauges: Mutex<Gauges>,
    pub(crate) stats: Mutex<EngineStats>,
    pub(crate) dead: AtomicBool,
    /// Whether the registry, if there is one, has had the handshake payload.
    pub(crate) known: Arc<AtomicBool>,
    pub(crate) prefill_requests: AtomicU64,
    pub(crate) decode_requests: AtomicU64,
    pub(crate) plain_requests: AtomicU64,
    seen: Mutex<VecDeque<SeenRequest>>,
}

impl Shared {
    pub(crate) fn new(config: EngineConfig, engine_id: String, commands: mpsc::Sender<Command>) -> Arc<Self> {
        let known = Arc::new(AtomicBool::new(config.registry.is_none()));
        let fingerprint = config.is_v14().then(|| fingerprint(&config));
        Arc::new(Self {
            config,
            engine_id,
            fingerprint,
            commands,
            wake: Notify::new(),
            faults: Faults::default(),
            metrics: Mutex::default(),
            gauges: Mutex::default(),
            stats: Mutex::default(),
            dead: AtomicBool::new(false),
            known,
            prefill_requests: AtomicU64::new(0),
            decode_requests: AtomicU64::new(0),
            plain_requests: AtomicU64::new(0),
            seen: Mutex::default(),
        })
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire) || self.commands.is_closed()
    }

    pub(crate) fn record(&self, request: SeenRequest) {
        let mut seen = self.seen.lock();
        while seen.len() >= self.config.request_log.max(1) {
            seen.pop_front();
        }
        seen.push_back(request);
    }

    pub(crate) fn seen(&self) -> Vec<SeenRequest> {
        self.seen.lock().iter().cloned().collect()
    }

    pub(crate) fn read_stats(&self) -> EngineStats {
        let mut stats = self.stats.lock().clone();
        {
            let metrics = self.metrics.lock();
            stats.kv_pulls = metrics.pulls();
            stats.kv_expired = metrics.expired();
            stats.late_notifications = metrics.late_notifications();
            stats.tokens_generated = metrics.generation_tokens;
        }
        stats.prefill_requests = self.prefill_requests.load(Ordering::Relaxed);
        stats.decode_requests = self.decode_requests.load(Ordering::Relaxed);
        stats.plain_requests = self.plain_requests.load(Ordering::Relaxed);
        stats.dead = self.is_dead();
        stats
    }
}

fn fingerprint(config: &EngineConfig) -> String {
    use sha2::{Digest as _, Sha256};
    let shape = format!(
        "{} {} {} {} {}",
        config.model, config.layers, config.block_size, config.kv_heads, config.head_dim
    );
    let digest = Sha256::digest(shape.as_bytes());
    let short: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("vllm-{}-{short}", config.version())
}

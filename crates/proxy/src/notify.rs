//! Freeing an unread hand-off by telling its prefill engine so over NIXL, as a reader would.
//! Off unless asked for per engine and known to be safe: a word from a NIXL on the other side of
//! 1.4 crashes the engine. Never reads KV; a build without feature `nixl` only says so.

#[cfg(not(feature = "nixl"))]
#[path = "notify/absent.rs"]
mod agent;
#[cfg(feature = "nixl")]
mod agent;
mod gate;
mod owner;
mod view;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kv_connector::protocol::notification;
use kv_connector::protocol::params::Generation;
use kv_connector::transport::TransportError;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use gate::Barred;
pub use view::NotifyView;

use crate::handoff::HandedOff;
use crate::registry::{EngineRecord, Rank, RankView, Registry};
use crate::settings::Nixl;
use view::AgentState;

/// Notifications that may wait for the agent.
const QUEUE: usize = 1024;

/// After a word was sent: time for a broken connection to show itself.
const SETTLE: Duration = Duration::from_millis(250);

/// Most faults that are remembered as reported.
const MAX_REPORTS: usize = 1024;

/// Why a prefill engine was not notified.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotNotified {
    /// Its agents cannot be reached without their metadata.
    #[error("the registry does not hold rank {rank:?} of the engine")]
    NotRegistered {
        /// The rank as (pipeline, tensor-parallel).
        rank: Rank,
    },
    /// It is not known to be safe.
    #[error(transparent)]
    Barred(#[from] Barred),
    /// This router has no NIXL agent; why was said when it was wanted first.
    #[error("this router has no NIXL agent")]
    Unavailable,
    /// The agent has too much to do.
    #[error("too many notifications wait")]
    Busy,
    /// NIXL did not take it: the engine is gone or cannot be reached.
    #[error("NIXL did not take it: {0}")]
    Refused(#[from] TransportError),
    /// Nobody took it in time.
    #[error("not within the time for a release")]
    Timeout,
}

impl NotNotified {
    /// As a label of metrics.
    pub(crate) const fn label(&self) -> &'static str {
        match self {
            Self::NotRegistered { .. } => "not_registered",
            Self::Barred(Barred::OwnUnknown | Barred::PeerUnknown | Barred::Unreadable { .. }) => {
                "version_unknown"
            }
            Self::Barred(Barred::Incompatible { .. }) => "version_incompatible",
            Self::Unavailable => "unavailable",
            Self::Busy => "busy",
            Self::Refused(_) => "refused",
            Self::Timeout => "timeout",
        }
    }
}

/// One word to all ranks of an engine: its request will not be read by anybody.
#[cfg_attr(not(feature = "nixl"), allow(dead_code, reason = "read by the agent, which this build lacks"))]
#[derive(Clone, Debug)]
pub(crate) struct Notice {
    engine_id: String,
    generation: Generation,
    /// The one message that every rank gets.
    message: Vec<u8>,
    ranks: Vec<Arc<RankView>>,
    /// The NIXL version by the operator's word, and by the engine's own.
    configured: Option<String>,
    announced: Option<String>,
}

impl Notice {
    /// The word for a hand-off of a registered engine.
    ///
    /// # Errors
    /// [`NotNotified::NotRegistered`] unless all its ranks are there: a rank that is not told keeps
    /// the blocks, whatever the others do.
    pub(crate) fn new(
        hand_off: &HandedOff,
        engine: &EngineRecord,
        configured: Option<String>,
    ) -> Result<Self, NotNotified> {
        let (pp_size, tp_size) = (hand_off.channel.pp_size, hand_off.channel.tp_size);
        let all = (0..pp_size).flat_map(|pp| (0..tp_size).map(move |tp| (pp, tp)));
        let ranks =
            all.map(|rank| engine.ranks.get(&rank).cloned().ok_or(NotNotified::NotRegistered { rank }));
        Ok(Self {
            engine_id: hand_off.engine_id.clone(),
            generation: hand_off.generation,
            // One reader in all: any other number may be one that the engine cannot divide.
            message: notification::completion(&hand_off.remote_request_id, 1),
            ranks: ranks.collect::<Result<_, _>>()?,
            configured,
            announced: gate::announced(engine).map(str::to_owned),
        })
    }

    /// A word that says nothing: the newest generation ignores a heartbeat for no request. An older
    /// one would log an error.
    #[cfg_attr(not(feature = "nixl"), allow(dead_code, reason = "read by the agent, which this build lacks"))]
    fn small_talk(generation: Generation) -> Option<Vec<u8>> {
        (generation == Generation::V14).then(|| notification::heartbeat([]))
    }
}

type Answer = oneshot::Sender<Result<(), NotNotified>>;

/// What the agent's owner is asked to do.
enum Job {
    /// Have an agent, since there is an engine that may be notified.
    Start,
    /// Tell every rank.
    Tell(Notice, Answer),
    /// See whether the connections that it went over still hold.
    Probe(Notice, Answer),
}

/// The way to the router's NIXL agent, which begins to exist when an engine wants it.
#[derive(Debug)]
pub(crate) struct Notifier {
    jobs: mpsc::Sender<Job>,
    /// What became of the agent.
    agent: Arc<Mutex<AgentState>>,
    reported: Mutex<BTreeSet<(String, &'static str)>>,
}

impl Notifier {
    /// Starts the agent's owner, which ends with `stop`.
    pub(crate) fn start(
        settings: Nixl,
        registry: Registry,
        tasks: &TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let (jobs, queue) = mpsc::channel(QUEUE);
        let agent = Arc::<Mutex<AgentState>>::default();
        tasks.spawn(owner::run(settings, registry, tasks.clone(), Arc::clone(&agent), queue, stop));
        Self { jobs, agent, reported: Mutex::default() }
    }

    /// An engine of the fleet may be notified: an agent that cannot be had is reported now rather
    /// than at the first need.
    pub(crate) fn prepare(&self) {
        if self.jobs.try_send(Job::Start).is_err() {
            tracing::debug!("the NIXL agent's owner is busy or gone");
        }
    }

    /// Tells an engine. NIXL has then taken the word for each rank, on connections that were still
    /// whole a moment later. No more can be known: nothing comes back from the engine. Connections
    /// are made beforehand and keep the order, so what can still lose the word is the end of the
    /// engine, which frees its blocks, or a network that swallows it: then the lease's end does.
    ///
    /// Dropping the future leaves it open whether the engine is told; telling it twice is harmless.
    ///
    /// # Errors
    /// Why the engine was not told, or not all of its ranks.
    pub(crate) async fn notify(&self, notice: Notice) -> Result<(), NotNotified> {
        self.ask(|answer| Job::Tell(notice.clone(), answer)).await?;
        tokio::time::sleep(SETTLE).await;
        self.ask(|answer| Job::Probe(notice.clone(), answer)).await
    }

    async fn ask(&self, job: impl FnOnce(Answer) -> Job) -> Result<(), NotNotified> {
        let (answer, answered) = oneshot::channel();
        self.jobs.try_send(job(answer)).map_err(|_| NotNotified::Busy)?;
        answered.await.unwrap_or(Err(NotNotified::Unavailable))
    }

    /// Logs what keeps an engine from being notified, for each kind of reason once.
    pub(crate) fn report(&self, peer: &str, error: &NotNotified) {
        let news = {
            let mut reported = self.reported.lock();
            reported.len() < MAX_REPORTS && reported.insert((peer.to_owned(), error.label()))
        };
        // That there is no agent was said once for all engines.
        if news && *error != NotNotified::Unavailable {
            tracing::warn!(peer, %error, "a prefill engine could not be notified of an unread hand-off");
        } else {
            tracing::debug!(peer, %error, "a prefill engine was not notified");
        }
    }
}

#[cfg(test)]
mod tests;

//! The one task that owns the router's NIXL agent and takes its jobs one after the other.
//! The agent's calls run on a thread for blocking work; jobs that wait are bounded by their queue.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::agent::Agent;
use super::view::AgentState;
use super::{Job, NotNotified, gate};
use crate::registry::Registry;
use crate::settings::Nixl;

/// Where the agent is when it does nothing.
enum Seat {
    /// Nobody has wanted one yet.
    Empty,
    Taken(Box<Agent>),
    /// There can be none; why was logged.
    Barred,
}

struct Owner {
    settings: Nixl,
    registry: Registry,
    tasks: TaskTracker,
    /// What became of the agent, for whoever looks.
    known: Arc<Mutex<AgentState>>,
    seat: Seat,
}

/// Carries out jobs until told to stop; the agent then has a moment for what is on its way.
pub(super) async fn run(
    settings: Nixl,
    registry: Registry,
    tasks: TaskTracker,
    known: Arc<Mutex<AgentState>>,
    mut jobs: mpsc::Receiver<Job>,
    stop: CancellationToken,
) {
    let mut revision = registry.subscribe();
    let mut owner = Owner { settings, registry, tasks, known, seat: Seat::Empty };
    loop {
        let has_agent = matches!(owner.seat, Seat::Taken(_));
        tokio::select! {
            () = stop.cancelled() => break,
            job = jobs.recv() => match job {
                Some(job) => owner.carry_out(job).await,
                None => break,
            },
            changed = revision.changed(), if has_agent => {
                if changed.is_err() {
                    break;
                }
                owner.tidy().await;
            }
        }
    }
    if let Seat::Taken(agent) = owner.seat {
        owner.tasks.spawn_blocking(move || drop(agent));
    }
}

impl Owner {
    async fn carry_out(&mut self, job: Job) {
        self.start().await;
        let (notice, answer, first) = match job {
            Job::Start => return,
            Job::Tell(notice, answer) => (notice, answer, true),
            Job::Probe(notice, answer) => (notice, answer, false),
        };
        if answer.is_closed() {
            return;
        }
        let done = self.with_agent(move |agent| {
            let (configured, announced) = (notice.configured.as_deref(), notice.announced.as_deref());
            let version = gate::pass(agent.version(), configured, announced)?;
            if first {
                agent.tell(&notice, version)?
            } else {
                agent.probe(&notice)?
            }
            Ok(())
        });
        let done = done.await.unwrap_or(Err(NotNotified::Unavailable));
        if answer.send(done).is_err() {
            tracing::debug!("nobody waits for a notification any more");
        }
    }

    async fn tidy(&mut self) {
        let registry = self.registry.clone();
        self.with_agent(move |agent| agent.forget_the_gone(&registry)).await;
    }

    async fn start(&mut self) {
        if !matches!(self.seat, Seat::Empty) {
            return;
        }
        let settings = self.settings.clone();
        let started = self.tasks.spawn_blocking(move || Agent::start(&settings)).await;
        self.seat = match started {
            Ok(Ok(agent)) => {
                *self.known.lock() = AgentState::Ready(agent.version());
                Seat::Taken(Box::new(agent))
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "prefill engines cannot be notified: their unread blocks are freed in other ways");
                *self.known.lock() = AgentState::Missing(error.to_string());
                Seat::Barred
            }
            Err(_) => self.panicked(),
        };
    }

    async fn with_agent<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Agent) -> T + Send + 'static,
    ) -> Option<T> {
        let Seat::Taken(mut agent) = std::mem::replace(&mut self.seat, Seat::Barred) else { return None };
        let done = self.tasks.spawn_blocking(move || {
            let result = work(&mut agent);
            (agent, result)
        });
        match done.await {
            Ok((agent, result)) => {
                self.seat = Seat::Taken(agent);
                Some(result)
            }
            Err(_) => {
                self.seat = self.panicked();
                None
            }
        }
    }

    fn panicked(&self) -> Seat {
        let why = "the NIXL agent ended abnormally";
        tracing::error!("{why}; prefill engines are not notified any more");
        *self.known.lock() = AgentState::Missing(why.to_owned());
        Seat::Barred
    }
}

//! The one thread that owns an agent's NIXL objects: takes commands, posts, polls, listens.
//!
//! Commands come before posts, because one post may take as long as copying its bytes. It ends
//! when the agent is dropped, after what is on its way has had a moment to leave.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

use crate::transport::{Descriptor, MemoryType, TransportError};

use super::cell::{Shared, TransferCell};
use super::config::Progress;
use super::objects::{Objects, Selection, Status};

/// How often notifications are looked for when NIXL's own thread makes progress.
const LISTEN: Duration = Duration::from_millis(1);
/// How often a transfer is looked at once it has lasted for a while.
const WATCH: Duration = Duration::from_micros(50);
/// Polls of a young transfer before the thread begins to sleep in between.
const EAGER_POLLS: u32 = 200;

pub(super) type Reply = SyncSender<Result<(), TransportError>>;

/// What callers ask of the thread; handles are theirs to choose.
pub(super) enum Command {
    Register {
        id: u64,
        memory: MemoryType,
        ranges: Vec<Descriptor>,
        reply: Reply,
    },
    Deregister {
        id: u64,
        reply: Reply,
    },
    AddAgent {
        blob: Vec<u8>,
        reply: Reply,
    },
    RemoveAgent(String),
    Prepare {
        id: u64,
        agent: Option<String>,
        memory: MemoryType,
        descriptors: Vec<Descriptor>,
        reply: Reply,
    },
    ReleaseList(u64),
    Make {
        id: u64,
        agent: String,
        selection: Selection,
        cell: Arc<TransferCell>,
    },
    Post(u64),
    Release(u64),
    /// Without `reply` the caller does not want to know whether NIXL took it.
    Notify {
        agent: String,
        message: Vec<u8>,
        reply: Option<Reply>,
    },
}

struct Transfer {
    agent: String,
    cell: Arc<TransferCell>,
    notifies: bool,
    in_flight: bool,
    /// The caller has given the handle back.
    released: bool,
    /// Its peer was removed: whatever becomes of it, it has failed.
    doomed: bool,
}

/// The thread's state.
pub(super) struct Owner {
    objects: Objects,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    progress: Progress,
    linger: Duration,
    transfers: HashMap<u64, Transfer>,
    to_post: VecDeque<u64>,
    in_flight: Vec<u64>,
    /// The lists made for each known agent.
    lists_of: HashMap<String, Vec<u64>>,
    /// Agents to be forgotten once nothing to them is in flight.
    leaving: HashSet<String>,
    /// Registrations to be ended once nothing is in flight.
    ending: Vec<u64>,
    polls: u32,
    last_sent: Option<Instant>,
    /// Dropped last, when nothing of NIXL can touch the memory any more.
    _end: End,
}

/// Tells callers that the thread has ended, also by a panic: nobody may wait for it any longer.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Owner {
    pub(super) fn new(
        objects: Objects,
        commands: Receiver<Command>,
        shared: Arc<Shared>,
        progress: Progress,
        linger: Duration,
    ) -> Self {
        let _end = End(Arc::clone(&shared));
        Self {
            objects,
            commands,
            shared,
            progress,
            linger,
            transfers: HashMap::new(),
            to_post: VecDeque::new(),
            in_flight: Vec::new(),
            lists_of: HashMap::new(),
            leaving: HashSet::new(),
            ending: Vec::new(),
            polls: 0,
            last_sent: None,
            _end,
        }
    }

    /// Works until the last caller has gone.
    pub(super) fn run(mut self) {
        while self.take_commands() {
            self.turn();
        }
        let deadline = Instant::now() + self.linger;
        while Instant::now() < deadline && self.has_something_on_its_way() {
            self.turn();
            std::thread::sleep(WATCH);
        }
    }

    fn has_something_on_its_way(&self) -> bool {
        !self.in_flight.is_empty()
            || !self.to_post.is_empty()
            || self.last_sent.is_some_and(|sent| sent.elapsed() < self.linger)
    }

    /// One round of everything that is not a command.
    fn turn(&mut self) {
        if let Some(id) = self.to_post.pop_front() {
            self.post(id);
        }
        self.poll_transfers();
        let shared = &self.shared;
        if let Err(error) = self.objects.notifications(|agent, message| shared.deliver(agent, message)) {
            tracing::warn!(%error, "notifications could not be taken");
        }
        self.forget_leaving();
    }

    /// Carries out what is queued, after a wait if there is nothing else to do; false at the end.
    fn take_commands(&mut self) -> bool {
        let waited = match self.patience() {
            Some(patience) => self.commands.recv_timeout(patience),
            None => match self.commands.try_recv() {
                Ok(command) => Ok(command),
                Err(TryRecvError::Empty) => Err(RecvTimeoutError::Timeout),
                Err(TryRecvError::Disconnected) => Err(RecvTimeoutError::Disconnected),
            },
        };
        match waited {
            Ok(command) => self.carry_out(command),
            Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.carry_out(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// How long the thread may sleep; none when it must go on at once.
    fn patience(&mut self) -> Option<Duration> {
        if !self.to_post.is_empty() {
            return None;
        }
        if self.in_flight.is_empty() {
            self.polls = 0;
            return Some(match self.progress {
                Progress::Thread => LISTEN,
                Progress::Polling(interval) => interval,
            });
        }
        if self.progress != Progress::Thread || self.polls < EAGER_POLLS {
            std::thread::yield_now();
            return None;
        }
        Some(WATCH)
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Register { id, memory, ranges, reply } => {
                let done = self.objects.register(id, memory, &ranges);
                self.publish_metadata();
                answer(&reply, done.map_err(|_| TransportError::Backend("register memory")));
            }
            Command::Deregister { id, reply } => {
                self.ending.push(id);
                self.end_registrations();
                answer(&reply, Ok(()));
            }
            Command::AddAgent { blob, reply } => {
                // Who is added again must not keep the connection that it was removed for.
                self.forget_leaving();
                answer(&reply, self.add_agent(&blob));
            }
            Command::RemoveAgent(agent) => self.remove_agent(agent),
            Command::Prepare { id, agent, memory, descriptors, reply } => {
                let done = self.objects.prepare(id, agent.as_deref(), memory, &descriptors);
                if let (Ok(()), Some(agent)) = (&done, agent) {
                    self.lists_of.entry(agent).or_default().push(id);
                }
                answer(&reply, done.map_err(|_| TransportError::Backend("prepare descriptors")));
            }
            Command::ReleaseList(id) => {
                for lists in self.lists_of.values_mut() {
                    lists.retain(|list| *list != id);
                }
                self.objects.release_list(id);
            }
            Command::Make { id, agent, selection, cell } => self.make(id, agent, &selection, cell),
            Command::Post(id) => self.to_post.push_back(id),
            Command::Release(id) => self.release(id),
            Command::Notify { agent, message, reply } => {
                self.last_sent = Some(Instant::now());
                let sent = self.objects.notify(&agent, &message);
                if let Err(error) = &sent {
                    self.shared.set_broken(&agent);
                    if reply.is_none() {
                        tracing::warn!(agent, %error, "a notification could not be sent");
                    }
                }
                if let Some(reply) = reply {
                    answer(&reply, sent.map_err(|_| TransportError::Backend("send a notification")));
                }
            }
        }
    }

    fn publish_metadata(&self) {
        match self.objects.metadata() {
            Ok(metadata) => self.shared.set_metadata(metadata),
            Err(error) => tracing::error!(%error, "the agent's metadata could not be read"),
        }
    }

    fn add_agent(&mut self, blob: &[u8]) -> Result<(), TransportError> {
        let agent = self.objects.load_agent(blob).map_err(|_| TransportError::BadAgentMetadata)?;
        self.leaving.remove(&agent);
        self.lists_of.entry(agent).or_default();
        Ok(())
    }

    fn remove_agent(&mut self, agent: String) {
        for list in self.lists_of.remove(&agent).unwrap_or_default() {
            self.objects.release_list(list);
        }
        for (id, transfer) in self.transfers.iter_mut().filter(|(_, transfer)| transfer.agent == agent) {
            transfer.doomed = true;
            if !transfer.in_flight {
                self.objects.release(*id);
            }
        }
        self.leaving.insert(agent);
    }

    fn make(&mut self, id: u64, agent: String, selection: &Selection, cell: Arc<TransferCell>) {
        if let Err(error) = self.objects.make(id, selection) {
            tracing::warn!(agent, %error, "a transfer could not be made");
            cell.fail();
        }
        let notifies = selection.notification.is_some();
        let (in_flight, released, doomed) = (false, false, false);
        self.transfers.insert(id, Transfer { agent, cell, notifies, in_flight, released, doomed });
    }

    fn post(&mut self, id: u64) {
        let Some(transfer) = self.transfers.get_mut(&id) else { return };
        let status = if transfer.doomed { Status::Missing } else { self.objects.post(id) };
        transfer.in_flight = true;
        self.in_flight.push(id);
        self.polls = 0;
        self.settle(id, status);
        self.in_flight.retain(|posted| self.transfers.get(posted).is_some_and(|transfer| transfer.in_flight));
    }

    fn poll_transfers(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        self.polls = self.polls.saturating_add(1);
        for id in self.in_flight.clone() {
            let status = self.objects.status(id);
            self.settle(id, status);
        }
        self.in_flight.retain(|posted| self.transfers.get(posted).is_some_and(|transfer| transfer.in_flight));
        self.end_registrations();
    }

    fn settle(&mut self, id: u64, status: Status) {
        let Some(transfer) = self.transfers.get_mut(&id) else { return };
        match status {
            Status::Moving => return,
            Status::Arrived if !transfer.doomed => {
                if transfer.notifies {
                    self.last_sent = Some(Instant::now());
                }
                transfer.cell.complete(self.objects.telemetry(id, transfer.cell.pairs));
            }
            Status::Broken if !transfer.doomed => {
                self.shared.set_broken(&transfer.agent);
                transfer.cell.fail();
            }
            Status::Arrived | Status::Broken | Status::Missing => transfer.cell.fail(),
        }
        transfer.in_flight = false;
        if transfer.doomed {
            self.objects.release(id);
        }
        if transfer.released {
            self.release(id);
        }
    }

    fn release(&mut self, id: u64) {
        match self.transfers.get_mut(&id) {
            Some(transfer) if transfer.in_flight => transfer.released = true,
            _ => {
                self.to_post.retain(|posted| *posted != id);
                self.objects.release(id);
                self.transfers.remove(&id);
            }
        }
    }

    fn end_registrations(&mut self) {
        if self.in_flight.is_empty() && !self.ending.is_empty() {
            for id in self.ending.drain(..) {
                self.objects.deregister(id);
            }
            self.publish_metadata();
        }
    }

    fn forget_leaving(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        let busy: HashSet<&str> = self
            .transfers
            .values()
            .filter(|transfer| transfer.in_flight)
            .map(|transfer| transfer.agent.as_str())
            .collect();
        let (kept, gone) = self.leaving.drain().partition(|agent| busy.contains(agent.as_str()));
        self.leaving = kept;
        let gone: HashSet<String> = gone;
        for agent in gone {
            if let Err(error) = self.objects.forget_agent(&agent) {
                tracing::warn!(agent, %error, "an agent could not be forgotten");
            }
        }
    }
}

/// The caller may have given up waiting.
fn answer(reply: &Reply, result: Result<(), TransportError>) {
    if reply.try_send(result).is_err() {
        tracing::warn!("a caller no longer waits for the NIXL thread");
    }
}

//! NIXL transport: bytes move between processes over UCX, as between vLLM's workers.
//!
//! One thread owns all of NIXL; calls queue work for it and poll what became of it. All unsafe
//! code of the crate is below this module. It must never load or notify an agent whose NIXL is
//! not known to fit, and never call the binding before the library was found.

mod blob;
mod cell;
mod config;
mod library;
mod memory;
mod objects;
mod pages;
mod thread;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

pub use config::{LibrarySource, NixlConfig, NixlError, NixlVersion, PeerVersions, Progress};
pub use library::NixlLibrary;
pub use memory::NixlMemory;
pub(in crate::transport) use pages::Pages;

use super::{
    AgentName, Descriptor, ListId, MemoryType, RegistrationId, Telemetry, TransferId, TransferOp,
    TransferState, Transport, TransportError, sealed,
};
use cell::{Shared, TransferCell};
use objects::{Objects, Selection};
use thread::{Command, Owner, Reply};

/// What is remembered of a prepared list, to check transfers before they reach NIXL.
#[derive(Debug)]
struct PreparedList {
    /// None for a list over this agent's own memory.
    agent: Option<AgentName>,
    lens: Lens,
}

#[derive(Debug)]
enum Lens {
    Equal { len: u64, count: u64 },
    Each(Vec<u64>),
}

impl Lens {
    fn of(descriptors: &[Descriptor]) -> Self {
        let len = descriptors.first().map_or(0, |first| first.len);
        if descriptors.iter().all(|descriptor| descriptor.len == len) {
            return Self::Equal { len, count: descriptors.len() as u64 };
        }
        Self::Each(descriptors.iter().map(|descriptor| descriptor.len).collect())
    }

    fn get(&self, index: u64) -> Result<u64, TransportError> {
        let (found, len) = match self {
            Self::Equal { len, count } => ((index < *count).then_some(*len), *count),
            Self::Each(lens) => {
                (usize::try_from(index).ok().and_then(|i| lens.get(i)).copied(), lens.len() as u64)
            }
        };
        found.ok_or(TransportError::IndexOutOfRange { index, len })
    }
}

#[derive(Debug)]
struct Transfer {
    agent: AgentName,
    cell: Arc<TransferCell>,
}

/// An agent of NIXL with the UCX backend.
#[derive(Debug)]
pub struct NixlAgent {
    name: String,
    version: Option<NixlVersion>,
    peers: PeerVersions,
    memory: NixlMemory,
    call_timeout: Duration,
    shared: Arc<Shared>,
    /// Taken when the agent is dropped, which ends the thread.
    commands: Option<SyncSender<Command>>,
    thread: Option<JoinHandle<()>>,
    known: HashSet<AgentName>,
    registrations: BTreeMap<RegistrationId, (MemoryType, Vec<Descriptor>)>,
    lists: HashMap<ListId, PreparedList>,
    transfers: BTreeMap<TransferId, Transfer>,
    next_handle: u64,
}

impl NixlAgent {
    /// Starts an agent that may register `memory`; takes up to a second.
    ///
    /// # Errors
    /// NIXL refuses to make an agent, or there is no thread for it.
    pub fn new(config: NixlConfig, library: &NixlLibrary, memory: NixlMemory) -> Result<Self, NixlError> {
        let version = config.version.or(library.version());
        let name = blob::name_with_version(&config.name, rand::random(), version);
        let (commands, queue) = sync_channel(config.queue.max(1));
        let (started, start) = sync_channel(1);
        let shared = Arc::new(Shared::default());
        let (peers, call_timeout) = (config.peers.clone(), config.call_timeout);
        let run = {
            let (name, shared, memory, library) =
                (name.clone(), Arc::clone(&shared), memory.clone(), library.clone());
            move || match Objects::new(&name, &config, memory, &library) {
                Ok(objects) => {
                    let metadata = objects.metadata().map_err(|error| NixlError::Refused {
                        action: "give its metadata",
                        error: error.to_string(),
                    });
                    let owner = Owner::new(objects, queue, shared, config.progress, config.linger);
                    if started.send(metadata).is_ok() {
                        owner.run();
                    }
                }
                Err(error) => drop(started.send(Err(error))),
            }
        };
        let builder = std::thread::Builder::new().name("nixl".to_owned());
        let thread = builder.spawn(run).map_err(|error| NixlError::Thread(error.kind()))?;
        let metadata = start.recv().map_err(|_| NixlError::Thread(std::io::ErrorKind::BrokenPipe))??;
        shared.set_metadata(metadata);
        Ok(Self {
            name,
            version,
            peers,
            memory,
            call_timeout,
            shared,
            commands: Some(commands),
            thread: Some(thread),
            known: HashSet::new(),
            registrations: BTreeMap::new(),
            lists: HashMap::new(),
            transfers: BTreeMap::new(),
            next_handle: 1,
        })
    }

    /// The name peers know it by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends a notification and waits until NIXL has taken it, which is not yet delivery: a broken
    /// connection shows at the next notification, one to a peer that never answers not at all.
    ///
    /// # Errors
    /// An unknown agent, or NIXL refuses; the connection to the agent is then of no more use.
    pub fn notify_heard(&mut self, agent: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        if !self.known.contains(agent) {
            return Err(TransportError::UnknownAgent(agent.0.clone()));
        }
        let (agent, message) = (agent.0.clone(), message.to_vec());
        self.call(|reply| Command::Notify { agent, message, reply: Some(reply) }, None)
    }

    /// Transfer and list handles that were given out and not released.
    pub fn live_handles(&self) -> usize {
        self.transfers.len() + self.lists.len()
    }

    fn handle(&mut self) -> u64 {
        let handle = self.next_handle;
        self.next_handle += 1;
        handle
    }

    /// Queues a command; `peer` is whom a full queue is blamed on.
    fn send(&self, command: Command, peer: &str) -> Result<(), TransportError> {
        let commands = self.commands.as_ref().ok_or(TransportError::Stopped)?;
        commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => TransportError::Busy(peer.to_owned()),
            TrySendError::Disconnected(_) => TransportError::Stopped,
        })
    }

    /// Queues a command and waits for its answer; on a time-out `undo` is queued behind it.
    fn call(
        &self,
        command: impl FnOnce(Reply) -> Command,
        undo: Option<Command>,
    ) -> Result<(), TransportError> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply), &self.name)?;
        match answer.recv_timeout(self.call_timeout) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(TransportError::Stopped),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(undo) = undo {
                    self.send(undo, &self.name)?;
                }
                Err(TransportError::Busy(self.name.clone()))
            }
        }
    }

    fn is_registered(&self, memory: MemoryType, wanted: &Descriptor) -> bool {
        self.registrations
            .values()
            .any(|(kind, ranges)| *kind == memory && ranges.iter().any(|range| memory::covers(range, wanted)))
    }

    fn prepare(
        &mut self,
        agent: Option<&AgentName>,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError> {
        let id = self.handle();
        let prepare = |reply| Command::Prepare {
            id,
            agent: agent.map(|agent| agent.0.clone()),
            memory,
            descriptors: descriptors.to_vec(),
            reply,
        };
        self.call(prepare, Some(Command::ReleaseList(id)))?;
        self.lists.insert(ListId(id), PreparedList { agent: agent.cloned(), lens: Lens::of(descriptors) });
        Ok(ListId(id))
    }

    fn list(&self, list: ListId) -> Result<&PreparedList, TransportError> {
        self.lists.get(&list).ok_or(TransportError::UnknownHandle(list.0))
    }

    /// Checks that two selections pair up; returns the peer.
    fn check_sides(
        &self,
        (local, local_ids): (ListId, &[u64]),
        (remote, remote_ids): (ListId, &[u64]),
    ) -> Result<AgentName, TransportError> {
        let (local, remote) = (self.list(local)?, self.list(remote)?);
        for (list, ids) in [(local, local_ids), (remote, remote_ids)] {
            for id in ids {
                list.lens.get(*id)?;
            }
        }
        let (None, Some(agent)) = (&local.agent, &remote.agent) else {
            return Err(TransportError::Mismatch);
        };
        if local_ids.len() != remote_ids.len() {
            return Err(TransportError::Mismatch);
        }
        for (local_id, remote_id) in local_ids.iter().zip(remote_ids) {
            if local.lens.get(*local_id)? != remote.lens.get(*remote_id)? {
                return Err(TransportError::Mismatch);
            }
        }
        Ok(agent.clone())
    }

    fn transfer(&self, transfer: TransferId) -> Result<&Transfer, TransportError> {
        self.transfers.get(&transfer).ok_or(TransportError::UnknownHandle(transfer.0))
    }
}

impl sealed::Sealed for NixlAgent {}

impl Transport for NixlAgent {
    fn agent_metadata(&self) -> Vec<u8> {
        self.shared.metadata()
    }

    fn register_memory(
        &mut self,
        memory: MemoryType,
        ranges: &[Descriptor],
    ) -> Result<RegistrationId, TransportError> {
        if let Some(range) = ranges.iter().find(|range| !self.memory.contains(memory, range)) {
            return Err(TransportError::NotRegistered { address: range.address, len: range.len });
        }
        let id = self.handle();
        let register = |reply| Command::Register { id, memory, ranges: ranges.to_vec(), reply };
        let (unheard, _) = sync_channel(1);
        self.call(register, Some(Command::Deregister { id, reply: unheard }))?;
        self.registrations.insert(RegistrationId(id), (memory, ranges.to_vec()));
        Ok(RegistrationId(id))
    }

    fn deregister_memory(&mut self, registration: RegistrationId) -> Result<(), TransportError> {
        let id = registration.0;
        self.registrations.remove(&registration).ok_or(TransportError::UnknownHandle(id))?;
        self.call(|reply| Command::Deregister { id, reply }, None)
    }

    fn add_remote_agent(&mut self, metadata: &[u8]) -> Result<AgentName, TransportError> {
        let name = blob::agent_name(metadata).ok_or(TransportError::BadAgentMetadata)?;
        if name == self.name {
            return Err(TransportError::BadAgentMetadata);
        }
        self.peers.check(name, self.version)?;
        let name = AgentName(name.to_owned());
        let add = |reply| Command::AddAgent { blob: metadata.to_vec(), reply };
        let undo = (!self.known.contains(&name)).then(|| Command::RemoveAgent(name.0.clone()));
        self.call(add, undo)?;
        self.known.insert(name.clone());
        Ok(name)
    }

    fn remove_remote_agent(&mut self, agent: &AgentName) -> Result<(), TransportError> {
        if !self.known.contains(agent) {
            return Err(TransportError::UnknownAgent(agent.0.clone()));
        }
        self.send(Command::RemoveAgent(agent.0.clone()), &agent.0)?;
        self.known.remove(agent);
        self.shared.set_whole(agent);
        for transfer in self.transfers.values().filter(|transfer| transfer.agent == *agent) {
            transfer.cell.doom();
        }
        Ok(())
    }

    /// Also false once the connection to it broke, which only removing it and adding it mends.
    fn knows_remote_agent(&mut self, agent: &AgentName) -> bool {
        self.known.contains(agent) && !self.shared.is_broken(agent)
    }

    fn prepare_local(
        &mut self,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError> {
        if let Some(range) = descriptors.iter().find(|range| !self.is_registered(memory, range)) {
            return Err(TransportError::NotRegistered { address: range.address, len: range.len });
        }
        self.prepare(None, memory, descriptors)
    }

    fn prepare_remote(
        &mut self,
        agent: &AgentName,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError> {
        if !self.known.contains(agent) {
            return Err(TransportError::UnknownAgent(agent.0.clone()));
        }
        // NIXL takes a range that runs over the end of the address space for a registered one.
        let runs_over =
            |range: &&Descriptor| range.len == 0 || range.address.checked_add(range.len).is_none();
        if let Some(range) = descriptors.iter().find(runs_over) {
            return Err(TransportError::NotRegistered { address: range.address, len: range.len });
        }
        self.prepare(Some(agent), memory, descriptors)
    }

    fn release_list(&mut self, list: ListId) -> Result<(), TransportError> {
        self.list(list)?;
        self.send(Command::ReleaseList(list.0), &self.name)?;
        self.lists.remove(&list);
        Ok(())
    }

    fn make_transfer(
        &mut self,
        op: TransferOp,
        local: (ListId, &[u64]),
        remote: (ListId, &[u64]),
        notification: Option<&[u8]>,
    ) -> Result<TransferId, TransportError> {
        let agent = self.check_sides(local, remote)?;
        let selection = Selection {
            op,
            local: (local.0.0, narrow(local.1)?),
            remote: (remote.0.0, narrow(remote.1)?),
            notification: notification.map(<[u8]>::to_vec),
        };
        let cell = Arc::new(TransferCell::new(local.1.len() as u64));
        let id = self.handle();
        let make = Command::Make { id, agent: agent.0.clone(), selection, cell: Arc::clone(&cell) };
        self.send(make, &agent.0)?;
        self.transfers.insert(TransferId(id), Transfer { agent, cell });
        Ok(TransferId(id))
    }

    fn post(&mut self, transfer: TransferId) -> Result<TransferState, TransportError> {
        let posted = self.transfer(transfer)?;
        if !self.known.contains(&posted.agent) {
            return Err(TransportError::UnknownAgent(posted.agent.0.clone()));
        }
        if !posted.cell.begin() {
            return Err(TransportError::InProgress(transfer.0));
        }
        self.send(Command::Post(transfer.0), &posted.agent.0).inspect_err(|_| posted.cell.withdraw())?;
        Ok(TransferState::InProgress)
    }

    fn poll(&mut self, transfer: TransferId) -> Result<TransferState, TransportError> {
        let state = self.transfer(transfer)?.cell.state();
        if state == TransferState::InProgress && self.shared.has_stopped() {
            return Ok(TransferState::Failed);
        }
        Ok(state)
    }

    fn telemetry(&mut self, transfer: TransferId) -> Option<Telemetry> {
        self.transfers.get(&transfer)?.cell.telemetry()
    }

    /// Also refuses a transfer in flight: its bytes may still arrive.
    fn release_transfer(&mut self, transfer: TransferId) -> Result<(), TransportError> {
        let released = self.transfer(transfer)?;
        if released.cell.is_in_progress() && !self.shared.has_stopped() {
            return Err(TransportError::InProgress(transfer.0));
        }
        match self.send(Command::Release(transfer.0), &released.agent.0) {
            Ok(()) | Err(TransportError::Stopped) => {}
            Err(error) => return Err(error),
        }
        self.transfers.remove(&transfer);
        Ok(())
    }

    fn send_notification(&mut self, agent: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        if !self.known.contains(agent) {
            return Err(TransportError::UnknownAgent(agent.0.clone()));
        }
        let command = Command::Notify { agent: agent.0.clone(), message: message.to_vec(), reply: None };
        self.send(command, &agent.0)
    }

    fn take_notifications(&mut self) -> Vec<(AgentName, Vec<u8>)> {
        self.shared.take_notifications()
    }
}

/// Indices as NIXL takes them.
fn narrow(ids: &[u64]) -> Result<Vec<i32>, TransportError> {
    let len = i32::MAX as u64;
    ids.iter()
        .map(|&index| i32::try_from(index).map_err(|_| TransportError::IndexOutOfRange { index, len }))
        .collect()
}

impl Drop for NixlAgent {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the NIXL thread ended abnormally");
        }
    }
}

#[cfg(test)]
mod tests;

//! Loopback transport: real bytes between two engines' memories on one machine.
//!
//! Each agent listens on 127.0.0.1 and serves its own memory to those who hold its blob, in the
//! same process or another; agents of one [`Fabric`] need neither sockets nor threads. Threads end
//! when the agent is dropped. It must never touch memory that was not registered.

mod fabric;
mod faults;
mod link;
mod server;
mod wire;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

pub use fabric::Fabric;
pub use faults::{Call, Event, Faults};

use super::{
    AgentName, Descriptor, KvMemory, ListId, MemoryType, RegistrationId, Telemetry, TransferId, TransferOp,
    TransferState, Transport, TransportError, sealed,
};
use link::{Link, TransferCell};
use server::{Server, Shared};
use wire::AgentBlob;

#[derive(Debug)]
struct PreparedList {
    /// None for a list over this agent's own memory.
    agent: Option<AgentName>,
    descriptors: Arc<[Descriptor]>,
}

#[derive(Debug)]
struct Transfer {
    agent: AgentName,
    cell: Arc<TransferCell>,
    /// States that the next polls see, whatever the transfer does.
    script: VecDeque<TransferState>,
    seen_in_progress: bool,
}

/// How peers reach this agent.
#[derive(Debug)]
enum Reach {
    Sockets { server: Server, blob: AgentBlob },
    Fabric { fabric: Fabric, shared: Arc<Shared> },
}

/// The way to one peer.
#[derive(Debug)]
enum Route {
    Socket(Link),
    Fabric(String),
}

/// An agent over one engine's [`KvMemory`].
#[derive(Debug)]
pub struct LoopbackAgent {
    name: String,
    memory: KvMemory,
    reach: Reach,
    faults: Faults,
    routes: HashMap<AgentName, Route>,
    /// Threads of removed peers, waited for when the agent is dropped.
    retired: Vec<JoinHandle<()>>,
    lists: HashMap<ListId, PreparedList>,
    transfers: BTreeMap<TransferId, Transfer>,
    next_handle: u64,
}

impl LoopbackAgent {
    /// Starts an agent whose name begins with `name` and that serves `memory`.
    ///
    /// # Errors
    /// No free port or no thread.
    pub fn new(name: &str, memory: KvMemory) -> io::Result<Self> {
        let secret: [u8; 16] = rand::random();
        // Two engines may have been given one name; their agents must still be told apart.
        let name = format!("{name}#{:08x}", rand::random::<u32>());
        let server = Server::start(&name, secret, memory.clone())?;
        let blob = AgentBlob { name: name.clone(), address: server.address(), secret };
        Ok(Self::with_reach(name, memory, Reach::Sockets { server, blob }))
    }

    /// Joins an agent to the others of `fabric`: no I/O, and bytes move only inside of calls.
    pub fn in_fabric(name: &str, memory: KvMemory, fabric: &Fabric) -> Self {
        let (name, shared) = fabric.join(name, memory.clone());
        Self::with_reach(name, memory, Reach::Fabric { fabric: fabric.clone(), shared })
    }

    fn with_reach(name: String, memory: KvMemory, reach: Reach) -> Self {
        Self {
            name,
            memory,
            reach,
            faults: Faults::default(),
            routes: HashMap::new(),
            retired: Vec::new(),
            lists: HashMap::new(),
            transfers: BTreeMap::new(),
            next_handle: 1,
        }
    }

    fn shared(&self) -> &Arc<Shared> {
        match &self.reach {
            Reach::Sockets { server, .. } => server.shared(),
            Reach::Fabric { shared, .. } => shared,
        }
    }

    fn route_of_blob(&self, metadata: &[u8]) -> Result<(AgentName, Option<AgentBlob>), TransportError> {
        match &self.reach {
            Reach::Sockets { .. } => {
                let blob = AgentBlob::decode(metadata).ok_or(TransportError::BadAgentMetadata)?;
                Ok((AgentName(blob.name.clone()), Some(blob)))
            }
            Reach::Fabric { fabric, .. } => {
                let name = wire::decode_fabric_name(metadata).ok_or(TransportError::BadAgentMetadata)?;
                fabric.find(&name).ok_or(TransportError::BadAgentMetadata)?;
                Ok((AgentName(name), None))
            }
        }
    }

    /// The state of a posted transfer; in a fabric it is carried out now.
    fn advance(&self, transfer: &Transfer) -> TransferState {
        if let Reach::Fabric { fabric, shared } = &self.reach
            && transfer.cell.is_posted()
            && transfer.cell.state() == TransferState::InProgress
        {
            let peer = match self.routes.get(&transfer.agent) {
                Some(Route::Fabric(name)) => fabric.find(name),
                _ => None,
            };
            fabric::carry(&transfer.cell, &self.name, shared, peer.as_deref());
        }
        transfer.cell.state()
    }

    /// The memory it serves.
    pub fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// A handle with which calls can be scripted to fail; it stays valid when the agent has moved.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
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

    fn select(&self, list: ListId, ids: &[u64]) -> Result<Vec<Descriptor>, TransportError> {
        let prepared = self.lists.get(&list).ok_or(TransportError::UnknownHandle(list.0))?;
        let len = prepared.descriptors.len() as u64;
        ids.iter()
            .map(|&index| {
                let descriptor = usize::try_from(index).ok().and_then(|i| prepared.descriptors.get(i));
                descriptor.copied().ok_or(TransportError::IndexOutOfRange { index, len })
            })
            .collect()
    }
}

impl sealed::Sealed for LoopbackAgent {}

impl Transport for LoopbackAgent {
    fn agent_metadata(&self) -> Vec<u8> {
        match &self.reach {
            Reach::Sockets { blob, .. } => blob.encode(),
            Reach::Fabric { .. } => wire::encode_fabric_name(&self.name),
        }
    }

    fn register_memory(
        &mut self,
        _memory: MemoryType,
        ranges: &[Descriptor],
    ) -> Result<RegistrationId, TransportError> {
        self.faults.check(Call::RegisterMemory)?;
        if let Some(range) = ranges.iter().find(|range| !self.memory.contains(range.address, range.len)) {
            return Err(TransportError::NotRegistered { address: range.address, len: range.len });
        }
        let registration = RegistrationId(self.handle());
        self.shared().register(registration, ranges.to_vec());
        Ok(registration)
    }

    fn deregister_memory(&mut self, registration: RegistrationId) -> Result<(), TransportError> {
        self.faults.check(Call::DeregisterMemory)?;
        if !self.shared().deregister(registration) {
            return Err(TransportError::UnknownHandle(registration.0));
        }
        self.faults.note(|| Event::Deregistered(registration));
        Ok(())
    }

    fn add_remote_agent(&mut self, metadata: &[u8]) -> Result<AgentName, TransportError> {
        self.faults.check(Call::AddRemoteAgent)?;
        let (name, blob) = self.route_of_blob(metadata)?;
        if !self.routes.contains_key(&name) {
            let route = match blob {
                None => Route::Fabric(name.0.clone()),
                Some(blob) => Link::start(&self.name, blob, self.memory.clone())
                    .map(Route::Socket)
                    .map_err(|_| TransportError::Busy(name.0.clone()))?,
            };
            self.routes.insert(name.clone(), route);
        }
        self.faults.note(|| Event::AddedAgent(name.clone()));
        Ok(name)
    }

    fn remove_remote_agent(&mut self, agent: &AgentName) -> Result<(), TransportError> {
        self.faults.check(Call::RemoveRemoteAgent)?;
        let route = self.routes.remove(agent).ok_or_else(|| TransportError::UnknownAgent(agent.0.clone()))?;
        self.faults.note(|| Event::RemovedAgent(agent.clone()));
        if let Route::Socket(link) = route {
            self.retired.retain(|thread| !thread.is_finished());
            self.retired.extend(link.close());
        }
        Ok(())
    }

    fn knows_remote_agent(&mut self, agent: &AgentName) -> bool {
        self.routes.contains_key(agent) && !self.faults.has_lost_agents()
    }

    fn prepare_local(
        &mut self,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError> {
        self.faults.check(Call::PrepareLocal)?;
        if let Some(range) = descriptors.iter().find(|range| !self.shared().is_registered(range)) {
            return Err(TransportError::NotRegistered { address: range.address, len: range.len });
        }
        Ok(self.prepare(None, memory, descriptors))
    }

    fn prepare_remote(
        &mut self,
        agent: &AgentName,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError> {
        self.faults.check(Call::PrepareRemote)?;
        if !self.routes.contains_key(agent) {
            return Err(TransportError::UnknownAgent(agent.0.clone()));
        }
        Ok(self.prepare(Some(agent.clone()), memory, descriptors))
    }

    fn release_list(&mut self, list: ListId) -> Result<(), TransportError> {
        self.faults.check(Call::ReleaseList)?;
        self.lists.remove(&list).ok_or(TransportError::UnknownHandle(list.0))?;
        self.faults.note(|| Event::ReleasedList(list));
        Ok(())
    }

    fn make_transfer(
        &mut self,
        op: TransferOp,
        local: (ListId, &[u64]),
        remote: (ListId, &[u64]),
        notification: Option<&[u8]>,
    ) -> Result<TransferId, TransportError> {
        self.faults.check(Call::MakeTransfer)?;
        let (local_ranges, remote_ranges) =
            (self.select(local.0, local.1)?, self.select(remote.0, remote.1)?);
        let side = |list: ListId| self.lists.get(&list).and_then(|prepared| prepared.agent.clone());
        let (None, Some(agent)) = (side(local.0), side(remote.0)) else {
            return Err(TransportError::Mismatch);
        };
        if local_ranges.len() != remote_ranges.len()
            || local_ranges.iter().zip(&remote_ranges).any(|(l, r)| l.len != r.len)
        {
            return Err(TransportError::Mismatch);
        }
        let message = notification.map(<[u8]>::to_vec);
        let transfer = TransferId(self.handle());
        self.faults.note(|| Event::Made {
            transfer,
            op,
            local: (local.0, local.1.to_vec()),
            remote: (remote.0, remote.1.to_vec()),
            notification: message.clone(),
        });
        let cell = Arc::new(TransferCell::new(op, local_ranges, remote_ranges, message));
        let script = VecDeque::new();
        self.transfers.insert(transfer, Transfer { agent, cell, script, seen_in_progress: false });
        Ok(transfer)
    }

    fn post(&mut self, transfer: TransferId) -> Result<TransferState, TransportError> {
        let started = Instant::now();
        self.faults.check(Call::Post)?;
        let posted = self.transfers.get_mut(&transfer).ok_or(TransportError::UnknownHandle(transfer.0))?;
        let route = self
            .routes
            .get(&posted.agent)
            .ok_or_else(|| TransportError::UnknownAgent(posted.agent.0.clone()))?;
        posted.cell.set_posted(started, self.faults.take_transfer_failure());
        posted.script = self.faults.take_states();
        posted.seen_in_progress = true;
        if let Route::Socket(link) = route {
            link.submit(Arc::clone(&posted.cell)).inspect_err(|_| posted.cell.end(TransferState::Failed))?;
        }
        Ok(TransferState::InProgress)
    }

    fn poll(&mut self, transfer: TransferId) -> Result<TransferState, TransportError> {
        let checked = self.faults.check(Call::Poll);
        let posted = self.transfers.get_mut(&transfer).ok_or(TransportError::UnknownHandle(transfer.0))?;
        posted.seen_in_progress = false;
        checked?;
        if !posted.cell.is_posted() {
            return Err(TransportError::NotPosted(transfer.0));
        }
        let scripted = posted.script.pop_front();
        let state = match scripted {
            Some(state) if state != TransferState::Done => state,
            _ if self.faults.holds_transfers() => TransferState::InProgress,
            _ => match self.transfers.get(&transfer) {
                Some(posted) => self.advance(posted),
                None => TransferState::Failed,
            },
        };
        if let Some(posted) = self.transfers.get_mut(&transfer) {
            posted.seen_in_progress = state == TransferState::InProgress;
        }
        if state != TransferState::InProgress {
            self.faults.note(|| Event::Ended(transfer));
        }
        Ok(state)
    }

    fn telemetry(&mut self, transfer: TransferId) -> Option<Telemetry> {
        self.transfers.get(&transfer).and_then(|posted| posted.cell.telemetry())
    }

    fn release_transfer(&mut self, transfer: TransferId) -> Result<(), TransportError> {
        self.faults.check(Call::ReleaseTransfer)?;
        let released = self.transfers.remove(&transfer).ok_or(TransportError::UnknownHandle(transfer.0))?;
        released.cell.cancel();
        self.faults.note(|| Event::Released(transfer));
        if released.seen_in_progress {
            self.faults.note_released_in_progress();
        }
        Ok(())
    }

    fn send_notification(&mut self, agent: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        self.faults.check(Call::SendNotification)?;
        let unknown = || TransportError::UnknownAgent(agent.0.clone());
        match (self.routes.get(agent).ok_or_else(unknown)?, &self.reach) {
            (Route::Socket(link), _) => link.notify(message.to_vec())?,
            (Route::Fabric(name), Reach::Fabric { fabric, .. }) => {
                // A peer that has left is not noticed: delivery is not confirmed.
                if let Some(peer) = fabric.find(name) {
                    peer.deliver(&AgentName(self.name.clone()), message.to_vec())
                        .map_err(|_| TransportError::Busy(agent.0.clone()))?;
                }
            }
            (Route::Fabric(_), Reach::Sockets { .. }) => return Err(unknown()),
        }
        self.faults.note(|| Event::Notified(agent.clone(), message.to_vec()));
        Ok(())
    }

    fn take_notifications(&mut self) -> Vec<(AgentName, Vec<u8>)> {
        self.shared().take_notifications()
    }
}

impl LoopbackAgent {
    fn prepare(
        &mut self,
        agent: Option<AgentName>,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> ListId {
        let list = ListId(self.handle());
        self.faults.note(|| Event::Prepared {
            list,
            agent: agent.clone(),
            memory,
            descriptors: descriptors.to_vec(),
        });
        self.lists.insert(list, PreparedList { agent, descriptors: descriptors.into() });
        list
    }
}

impl Drop for LoopbackAgent {
    fn drop(&mut self) {
        if let Reach::Fabric { fabric, .. } = &self.reach {
            fabric.leave(&self.name);
        }
        for (_, route) in self.routes.drain() {
            if let Route::Socket(link) = route {
                self.retired.extend(link.close());
            }
        }
        for thread in self.retired.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a loopback link ended abnormally");
            }
        }
    }
}

#[cfg(test)]
mod tests;

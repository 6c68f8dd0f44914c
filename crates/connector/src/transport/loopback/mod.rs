//! Loopback transport: real bytes between two engines' memories on one machine.
//!
//! Each agent listens on 127.0.0.1 and serves its own memory to those who hold its blob, in the
//! same process or another. Its threads end when the agent is dropped. It must never touch memory
//! that was not registered.

mod faults;
mod link;
mod server;
mod wire;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

pub use faults::{Call, Faults};

use super::{
    AgentName, Descriptor, KvMemory, ListId, MemoryType, RegistrationId, Telemetry, TransferId, TransferOp,
    TransferState, Transport, TransportError, sealed,
};
use link::{Link, TransferCell};
use server::Server;
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
}

/// An agent over one engine's [`KvMemory`].
#[derive(Debug)]
pub struct LoopbackAgent {
    blob: AgentBlob,
    memory: KvMemory,
    server: Server,
    faults: Faults,
    links: HashMap<AgentName, Link>,
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
        let blob = AgentBlob { name, address: server.address(), secret };
        Ok(Self {
            blob,
            memory,
            server,
            faults: Faults::default(),
            links: HashMap::new(),
            retired: Vec::new(),
            lists: HashMap::new(),
            transfers: BTreeMap::new(),
            next_handle: 1,
        })
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
        self.blob.encode()
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
        self.server.register(registration, ranges.to_vec());
        Ok(registration)
    }

    fn deregister_memory(&mut self, registration: RegistrationId) -> Result<(), TransportError> {
        if self.server.deregister(registration) {
            return Ok(());
        }
        Err(TransportError::UnknownHandle(registration.0))
    }

    fn add_remote_agent(&mut self, metadata: &[u8]) -> Result<AgentName, TransportError> {
        self.faults.check(Call::AddRemoteAgent)?;
        let blob = AgentBlob::decode(metadata).ok_or(TransportError::BadAgentMetadata)?;
        let name = AgentName(blob.name.clone());
        if !self.links.contains_key(&name) {
            let link = Link::start(&self.blob.name, blob, self.memory.clone())
                .map_err(|_| TransportError::Busy(name.0.clone()))?;
            self.links.insert(name.clone(), link);
        }
        Ok(name)
    }

    fn remove_remote_agent(&mut self, agent: &AgentName) -> Result<(), TransportError> {
        let link = self.links.remove(agent).ok_or_else(|| TransportError::UnknownAgent(agent.0.clone()))?;
        self.retired.retain(|thread| !thread.is_finished());
        self.retired.extend(link.close());
        Ok(())
    }

    fn prepare_local(&mut self, descriptors: &[Descriptor]) -> Result<ListId, TransportError> {
        self.faults.check(Call::PrepareLocal)?;
        if let Some(range) = descriptors.iter().find(|range| !self.server.is_registered(range)) {
            return Err(TransportError::NotRegistered { address: range.address, len: range.len });
        }
        let list = ListId(self.handle());
        self.lists.insert(list, PreparedList { agent: None, descriptors: descriptors.into() });
        Ok(list)
    }

    fn prepare_remote(
        &mut self,
        agent: &AgentName,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError> {
        self.faults.check(Call::PrepareRemote)?;
        if !self.links.contains_key(agent) {
            return Err(TransportError::UnknownAgent(agent.0.clone()));
        }
        let list = ListId(self.handle());
        let prepared = PreparedList { agent: Some(agent.clone()), descriptors: descriptors.into() };
        self.lists.insert(list, prepared);
        Ok(list)
    }

    fn release_list(&mut self, list: ListId) -> Result<(), TransportError> {
        self.lists.remove(&list).map(|_| ()).ok_or(TransportError::UnknownHandle(list.0))
    }

    fn make_transfer(
        &mut self,
        op: TransferOp,
        local: (ListId, &[u64]),
        remote: (ListId, &[u64]),
        notification: Option<&[u8]>,
    ) -> Result<TransferId, TransportError> {
        self.faults.check(Call::MakeTransfer)?;
        let (local_list, remote_list) = (local.0, remote.0);
        let local = self.select(local_list, local.1)?;
        let remote = self.select(remote_list, remote.1)?;
        let side = |list: ListId| self.lists.get(&list).and_then(|prepared| prepared.agent.clone());
        let (None, Some(agent)) = (side(local_list), side(remote_list)) else {
            return Err(TransportError::Mismatch);
        };
        if local.len() != remote.len() || local.iter().zip(&remote).any(|(l, r)| l.len != r.len) {
            return Err(TransportError::Mismatch);
        }
        let cell = Arc::new(TransferCell::new(op, local, remote, notification.map(<[u8]>::to_vec)));
        let transfer = TransferId(self.handle());
        self.transfers.insert(transfer, Transfer { agent, cell });
        Ok(transfer)
    }

    fn post(&mut self, transfer: TransferId) -> Result<TransferState, TransportError> {
        let started = Instant::now();
        self.faults.check(Call::Post)?;
        let posted = self.transfers.get(&transfer).ok_or(TransportError::UnknownHandle(transfer.0))?;
        let link = self
            .links
            .get(&posted.agent)
            .ok_or_else(|| TransportError::UnknownAgent(posted.agent.0.clone()))?;
        posted.cell.set_posted(started, self.faults.take_transfer_failure());
        link.submit(Arc::clone(&posted.cell))?;
        Ok(TransferState::InProgress)
    }

    fn poll(&mut self, transfer: TransferId) -> Result<TransferState, TransportError> {
        self.faults.check(Call::Poll)?;
        let posted = self.transfers.get(&transfer).ok_or(TransportError::UnknownHandle(transfer.0))?;
        if self.faults.holds_transfers() {
            return Ok(TransferState::InProgress);
        }
        Ok(posted.cell.state())
    }

    fn telemetry(&mut self, transfer: TransferId) -> Option<Telemetry> {
        self.transfers.get(&transfer).and_then(|posted| posted.cell.telemetry())
    }

    fn release_transfer(&mut self, transfer: TransferId) -> Result<(), TransportError> {
        self.faults.check(Call::ReleaseTransfer)?;
        let released = self.transfers.remove(&transfer).ok_or(TransportError::UnknownHandle(transfer.0))?;
        released.cell.cancel();
        Ok(())
    }

    fn send_notification(&mut self, agent: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        self.faults.check(Call::SendNotification)?;
        let link = self.links.get(agent).ok_or_else(|| TransportError::UnknownAgent(agent.0.clone()))?;
        link.notify(message.to_vec())
    }

    fn take_notifications(&mut self) -> Vec<(AgentName, Vec<u8>)> {
        self.server.take_notifications()
    }
}

impl Drop for LoopbackAgent {
    fn drop(&mut self) {
        for (_, link) in self.links.drain() {
            self.retired.extend(link.close());
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

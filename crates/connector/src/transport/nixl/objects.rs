//! NIXL's objects of one agent, used from one thread, and the order in which they end.
//!
//! Handles of NIXL hold bare pointers into their agent, so they go first; the memory goes last.
//! Nothing here waits for a peer.

#![allow(unsafe_code, reason = "implements a trait of the binding that hands out an address")]

use std::collections::HashMap;

use nixl_sys::{
    Agent, AgentConfig, MemType, MemoryRegion, NixlDescriptor, NotificationMap, OptArgs, RegistrationHandle,
    XferDescList, XferDlistHandle, XferOp, XferRequest, XferStatus,
};

use crate::transport::{Descriptor, MemoryType, Telemetry, TransferOp};

use super::config::{NixlConfig, NixlError, Progress};
use super::library::NixlLibrary;
use super::memory::NixlMemory;

const BACKEND: &str = "UCX";
/// What NIXL calls the initiator's own side.
const LOCAL_SIDE: &str = "";

/// What NIXL says of a posted transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Moving,
    Arrived,
    /// The connection to the peer is of no more use.
    Broken,
    /// There is no such request.
    Missing,
}

/// The sides of a transfer: two lists and indices into them.
#[derive(Debug)]
pub(super) struct Selection {
    pub(super) op: TransferOp,
    pub(super) local: (u64, Vec<i32>),
    pub(super) remote: (u64, Vec<i32>),
    pub(super) notification: Option<Vec<u8>>,
}

/// One agent with all that hangs on it; fields are dropped in this order.
pub(super) struct Objects {
    requests: HashMap<u64, XferRequest>,
    lists: HashMap<u64, XferDlistHandle>,
    registrations: HashMap<u64, Vec<RegistrationHandle>>,
    agent: Agent,
    _memory: NixlMemory,
}

impl Objects {
    /// Makes the agent and its UCX backend; takes up to a second.
    ///
    /// `_library` is the proof that the calls of the binding have something to call.
    pub(super) fn new(
        name: &str,
        config: &NixlConfig,
        memory: NixlMemory,
        _library: &NixlLibrary,
    ) -> Result<Self, NixlError> {
        let refused = |action| {
            move |error: nixl_sys::NixlError| NixlError::Refused { action, error: error.to_string() }
        };
        let settings = AgentConfig {
            enable_prog_thread: config.progress == Progress::Thread,
            capture_telemetry: true,
            ..AgentConfig::default()
        };
        let agent = Agent::new_configured(name, &settings).map_err(refused("make an agent"))?;
        let (_kinds, mut params) =
            agent.get_plugin_params(BACKEND).map_err(refused("find its UCX backend"))?;
        for (key, value) in &config.backend {
            params.set(key, value).map_err(refused("take a backend setting"))?;
        }
        agent.create_backend(BACKEND, &params).map_err(refused("make its UCX backend"))?;
        let (requests, lists, registrations) = Default::default();
        Ok(Self { requests, lists, registrations, agent, _memory: memory })
    }

    pub(super) fn metadata(&self) -> Result<Vec<u8>, nixl_sys::NixlError> {
        self.agent.get_local_md()
    }

    /// Registers all ranges or none.
    pub(super) fn register(
        &mut self,
        id: u64,
        memory: MemoryType,
        ranges: &[Descriptor],
    ) -> Result<(), nixl_sys::NixlError> {
        let handles: Result<Vec<_>, _> = ranges
            .iter()
            .map(|range| self.agent.register_memory(&Range { memory, range: *range }, None))
            .collect();
        self.registrations.insert(id, handles?);
        Ok(())
    }

    pub(super) fn deregister(&mut self, id: u64) {
        self.registrations.remove(&id);
    }

    pub(super) fn load_agent(&mut self, blob: &[u8]) -> Result<String, nixl_sys::NixlError> {
        self.agent.load_remote_md(blob)
    }

    /// Forgets an agent; no request to it may be in flight.
    pub(super) fn forget_agent(&mut self, agent: &str) -> Result<(), nixl_sys::NixlError> {
        self.agent.invalidate_remote_md(agent)
    }

    /// Prepares a list in the memory of `agent`, or in this agent's own.
    pub(super) fn prepare(
        &mut self,
        id: u64,
        agent: Option<&str>,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<(), nixl_sys::NixlError> {
        let mut list = XferDescList::new(kind(memory))?;
        for descriptor in descriptors {
            let (address, len) = sizes(descriptor)?;
            list.add_desc(address, len, descriptor.device);
        }
        let handle = self.agent.prepare_xfer_dlist(agent.unwrap_or(LOCAL_SIDE), &list, None)?;
        self.lists.insert(id, handle);
        Ok(())
    }

    pub(super) fn release_list(&mut self, id: u64) {
        self.lists.remove(&id);
    }

    pub(super) fn make(&mut self, id: u64, selection: &Selection) -> Result<(), nixl_sys::NixlError> {
        let op = match selection.op {
            TransferOp::Read => XferOp::Read,
            TransferOp::Write => XferOp::Write,
        };
        let list = |id| self.lists.get(id).ok_or(nixl_sys::NixlError::NotFound);
        let (local, remote) = (list(&selection.local.0)?, list(&selection.remote.0)?);
        let mut options = OptArgs::new()?;
        if let Some(message) = &selection.notification {
            options.set_notification_message(message)?;
            options.set_has_notification(true)?;
        }
        let (local_ids, remote_ids) = (&selection.local.1, &selection.remote.1);
        let request = self.agent.make_xfer_req(op, local, local_ids, remote, remote_ids, Some(&options))?;
        self.requests.insert(id, request);
        Ok(())
    }

    /// Starts a request; may take as long as copying the bytes.
    pub(super) fn post(&mut self, id: u64) -> Status {
        match self.requests.get(&id).map(|request| self.agent.post_xfer_req(request, None)) {
            Some(Ok(true)) => Status::Moving,
            Some(Ok(false)) => Status::Arrived,
            Some(Err(_)) => Status::Broken,
            None => Status::Missing,
        }
    }

    pub(super) fn status(&self, id: u64) -> Status {
        match self.requests.get(&id).map(|request| self.agent.get_xfer_status(request)) {
            Some(Ok(XferStatus::InProgress)) => Status::Moving,
            Some(Ok(XferStatus::Success)) => Status::Arrived,
            Some(Err(_)) => Status::Broken,
            None => Status::Missing,
        }
    }

    pub(super) fn telemetry(&self, id: u64, pairs: u64) -> Option<Telemetry> {
        let measured = self.requests.get(&id)?.get_telemetry().ok()?;
        Some(Telemetry {
            transfer: measured.xfer_duration(),
            post: measured.post_duration(),
            bytes: measured.total_bytes,
            descriptors: pairs,
        })
    }

    /// Drops a request that is not in flight.
    pub(super) fn release(&mut self, id: u64) {
        self.requests.remove(&id);
    }

    pub(super) fn notify(&self, agent: &str, message: &[u8]) -> Result<(), nixl_sys::NixlError> {
        self.agent.send_notification(agent, message, None)
    }

    /// Hands each arrived notification to `deliver`; this also lets UCX make progress.
    pub(super) fn notifications(
        &self,
        mut deliver: impl FnMut(&str, Vec<u8>),
    ) -> Result<(), nixl_sys::NixlError> {
        let mut arrived = NotificationMap::new()?;
        self.agent.get_notifications(&mut arrived, None)?;
        for agent in arrived.agents() {
            let agent = agent?;
            for message in arrived.get_notifications(agent)? {
                deliver(agent, message?);
            }
        }
        Ok(())
    }
}

fn kind(memory: MemoryType) -> MemType {
    match memory {
        MemoryType::Dram => MemType::Dram,
        MemoryType::Vram => MemType::Vram,
    }
}

fn sizes(descriptor: &Descriptor) -> Result<(usize, usize), nixl_sys::NixlError> {
    let size = |size| usize::try_from(size).map_err(|_| nixl_sys::NixlError::InvalidParam);
    Ok((size(descriptor.address)?, size(descriptor.len)?))
}

/// One range as the binding wants it for a registration.
#[derive(Debug)]
struct Range {
    memory: MemoryType,
    range: Descriptor,
}

impl MemoryRegion for Range {
    // SAFETY: gives out the address of memory that the owner of `Objects` has checked to lie in
    // `_memory`, which outlives every registration made from it.
    unsafe fn as_ptr(&self) -> *const u8 {
        std::ptr::with_exposed_provenance(usize::try_from(self.range.address).unwrap_or(0))
    }

    fn size(&self) -> usize {
        usize::try_from(self.range.len).unwrap_or(0)
    }
}

impl NixlDescriptor for Range {
    fn mem_type(&self) -> MemType {
        kind(self.memory)
    }

    fn device_id(&self) -> u64 {
        self.range.device
    }
}

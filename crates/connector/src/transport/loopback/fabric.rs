//! Agents of one process joined without sockets or threads: a transfer moves when it is polled.
//!
//! Nothing happens between two calls, so a run is repeatable step by step.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::transport::{AgentName, KvMemory, TransferOp, TransferState};

use super::link::TransferCell;
use super::server::Shared;
use super::wire;

#[derive(Debug, Default)]
struct Ports {
    by_name: Mutex<HashMap<String, Arc<Shared>>>,
    agents: AtomicU64,
}

/// What joins agents; clones are the same fabric.
#[derive(Debug, Clone, Default)]
pub struct Fabric {
    ports: Arc<Ports>,
}

impl Fabric {
    /// Joins an agent; its name is made unique in this fabric.
    pub(super) fn join(&self, name: &str, memory: KvMemory) -> (String, Arc<Shared>) {
        let number = self.ports.agents.fetch_add(1, Ordering::Relaxed);
        let name = format!("{name}#{number}");
        let shared = Shared::new([0; 16], memory);
        self.ports.by_name.lock().insert(name.clone(), Arc::clone(&shared));
        (name, shared)
    }

    pub(super) fn leave(&self, name: &str) {
        self.ports.by_name.lock().remove(name);
    }

    pub(super) fn find(&self, name: &str) -> Option<Arc<Shared>> {
        self.ports.by_name.lock().get(name).cloned()
    }
}

/// Carries a posted transfer out, to its end.
pub(super) fn carry(cell: &TransferCell, own_name: &str, own: &Shared, peer: Option<&Shared>) {
    let outcome = match peer {
        Some(peer) if !cell.is_void() => copy(cell, own_name, own, peer),
        _ => Err(wire::refused("the transfer is void")),
    };
    cell.end(if outcome.is_ok() { TransferState::Done } else { TransferState::Failed });
}

fn copy(cell: &TransferCell, own_name: &str, own: &Shared, peer: &Shared) -> io::Result<()> {
    if cell.remote.iter().any(|range| !peer.is_registered(range)) {
        return Err(wire::refused("range is not registered"));
    }
    for (local, remote) in cell.local.iter().zip(&cell.remote) {
        let (from, source, to, target) = match cell.op {
            TransferOp::Read => (peer.memory(), remote, own.memory(), local),
            TransferOp::Write => (own.memory(), local, peer.memory(), remote),
        };
        let bytes = from.read(source.address, source.len).map_err(io::Error::other)?;
        to.write(target.address, &bytes).map_err(io::Error::other)?;
    }
    match &cell.notification {
        Some(message) => peer.deliver(&AgentName(own_name.to_owned()), message.clone()),
        None => Ok(()),
    }
}

//! Scripted failures of a loopback agent, for tests and for simulated engines, and a journal of
//! what was asked of it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::transport::{
    AgentName, Descriptor, ListId, MemoryType, RegistrationId, TransferId, TransferOp, TransferState,
    TransportError,
};

/// A call that can be scripted to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// Registering memory.
    RegisterMemory,
    /// Ending a registration.
    DeregisterMemory,
    /// Adding a peer's agent.
    AddRemoteAgent,
    /// Forgetting a peer's agent.
    RemoveRemoteAgent,
    /// Preparing local descriptors.
    PrepareLocal,
    /// Preparing remote descriptors.
    PrepareRemote,
    /// Releasing a prepared list.
    ReleaseList,
    /// Making a transfer.
    MakeTransfer,
    /// Posting a transfer.
    Post,
    /// Polling a transfer.
    Poll,
    /// Releasing a transfer.
    ReleaseTransfer,
    /// Sending a notification.
    SendNotification,
}

/// One call an agent carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A list was prepared.
    Prepared {
        /// Its handle.
        list: ListId,
        /// None for this agent's own memory.
        agent: Option<AgentName>,
        /// Kind of memory.
        memory: MemoryType,
        /// What it holds.
        descriptors: Vec<Descriptor>,
    },
    /// A transfer was made.
    Made {
        /// Its handle.
        transfer: TransferId,
        /// Direction.
        op: TransferOp,
        /// Local list and the indices into it.
        local: (ListId, Vec<u64>),
        /// Remote list and the indices into it.
        remote: (ListId, Vec<u64>),
        /// Notification that rides on it.
        notification: Option<Vec<u8>>,
    },
    /// A transfer was seen to have ended, well or not.
    Ended(TransferId),
    /// A transfer was released.
    Released(TransferId),
    /// A list was released.
    ReleasedList(ListId),
    /// A notification was sent on its own.
    Notified(AgentName, Vec<u8>),
    /// A peer was added.
    AddedAgent(AgentName),
    /// A peer was forgotten.
    RemovedAgent(AgentName),
    /// A registration was ended.
    Deregistered(RegistrationId),
}

#[derive(Debug, Default)]
struct Script {
    failing_calls: HashMap<Call, (usize, usize)>,
    failing_transfers: usize,
    holds_transfers: bool,
    lost_agents: bool,
    states: VecDeque<VecDeque<TransferState>>,
    journal: Option<Vec<Event>>,
    released_in_progress: usize,
}

/// The script of one agent; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    script: Arc<Mutex<Script>>,
}

impl Faults {
    /// Lets the next `times` calls of this kind fail; zero ends the failing.
    pub fn fail_next(&self, call: Call, times: usize) {
        self.fail_after(call, 0, times);
    }

    /// Lets `skipped` calls of this kind through and then `times` fail.
    pub fn fail_after(&self, call: Call, skipped: usize, times: usize) {
        self.script.lock().failing_calls.insert(call, (skipped, times));
    }

    /// Lets the next `times` posted transfers end as failed without moving bytes.
    pub fn fail_next_transfers(&self, times: usize) {
        self.script.lock().failing_transfers = times;
    }

    /// While set, no transfer is seen to end.
    pub fn hold_transfers(&self, hold: bool) {
        self.script.lock().holds_transfers = hold;
    }

    /// The states that polls of the transfers posted next are answered with, one script for each;
    /// after its last state a transfer goes its own way.
    pub fn script_transfers(&self, scripts: impl IntoIterator<Item = Vec<TransferState>>) {
        self.script.lock().states.extend(scripts.into_iter().map(VecDeque::from));
    }

    /// While set, the agent has lost what it knew of its peers.
    pub fn lose_agents(&self, lost: bool) {
        self.script.lock().lost_agents = lost;
    }

    /// Begins to keep a journal of the calls, empty at first.
    pub fn record(&self) {
        self.script.lock().journal = Some(Vec::new());
    }

    /// Takes the journal so far; empty when none is kept.
    pub fn take_journal(&self) -> Vec<Event> {
        self.script.lock().journal.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// How often a transfer was released that was last seen in progress.
    pub fn released_in_progress(&self) -> usize {
        self.script.lock().released_in_progress
    }

    pub(super) fn note(&self, event: impl FnOnce() -> Event) {
        if let Some(journal) = &mut self.script.lock().journal {
            journal.push(event());
        }
    }

    pub(super) fn note_released_in_progress(&self) {
        self.script.lock().released_in_progress += 1;
    }

    pub(super) fn check(&self, call: Call) -> Result<(), TransportError> {
        match self.script.lock().failing_calls.get_mut(&call) {
            Some((skipped, _)) if *skipped > 0 => {
                *skipped -= 1;
                Ok(())
            }
            Some((_, left)) if *left > 0 => {
                *left -= 1;
                Err(TransportError::Scripted(call))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn take_transfer_failure(&self) -> bool {
        let mut script = self.script.lock();
        let fails = script.failing_transfers > 0;
        script.failing_transfers = script.failing_transfers.saturating_sub(1);
        fails
    }

    pub(super) fn take_states(&self) -> VecDeque<TransferState> {
        self.script.lock().states.pop_front().unwrap_or_default()
    }

    pub(super) fn holds_transfers(&self) -> bool {
        self.script.lock().holds_transfers
    }

    pub(super) fn has_lost_agents(&self) -> bool {
        self.script.lock().lost_agents
    }
}

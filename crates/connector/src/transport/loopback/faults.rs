//! Scripted failures of a loopback agent, for tests and for simulated engines.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::transport::TransportError;

/// A call that can be scripted to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// Registering memory.
    RegisterMemory,
    /// Adding a peer's agent.
    AddRemoteAgent,
    /// Preparing local descriptors.
    PrepareLocal,
    /// Preparing remote descriptors.
    PrepareRemote,
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

#[derive(Debug, Default)]
struct Script {
    failing_calls: HashMap<Call, usize>,
    failing_transfers: usize,
    holds_transfers: bool,
}

/// The script of one agent; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    script: Arc<Mutex<Script>>,
}

impl Faults {
    /// Lets the next `times` calls of this kind fail; zero ends the failing.
    pub fn fail_next(&self, call: Call, times: usize) {
        self.script.lock().failing_calls.insert(call, times);
    }

    /// Lets the next `times` posted transfers end as failed without moving bytes.
    pub fn fail_next_transfers(&self, times: usize) {
        self.script.lock().failing_transfers = times;
    }

    /// While set, no transfer is seen to end.
    pub fn hold_transfers(&self, hold: bool) {
        self.script.lock().holds_transfers = hold;
    }

    pub(super) fn check(&self, call: Call) -> Result<(), TransportError> {
        match self.script.lock().failing_calls.get_mut(&call) {
            Some(left) if *left > 0 => {
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

    pub(super) fn holds_transfers(&self) -> bool {
        self.script.lock().holds_transfers
    }
}

//! Exchanges in flight with a peer, each counted from when it steps in until its guard is dropped.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Peer;
use crate::pool::breaker::Ticket;

/// One exchange in flight with a peer; ends when dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) peer: Arc<Peer>,
    ticket: Option<Ticket>,
    /// Prompt tokens that wait with it.
    tokens: u64,
}

impl InFlight {
    /// The peer computes a prompt of so many tokens.
    pub(crate) fn with_prompt(mut self, tokens: f64) -> Self {
        let tokens = tokens as u64;
        self.peer.routing.enter(tokens);
        self.tokens += tokens;
        self
    }

    /// The prompt that the peer had to compute is computed.
    pub(crate) fn prompt_is_done(&mut self) {
        self.peer.routing.leave(std::mem::take(&mut self.tokens));
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.peer.health.leave(ticket);
        }
        self.peer.routing.leave(self.tokens);
        self.peer.in_flight.fetch_sub(1, Ordering::SeqCst);
        self.peer.standing.moved.notify_waiters();
    }
}

impl Peer {
    /// Counts one exchange until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> InFlight {
        let ticket = self.health.enter(true);
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        InFlight { peer: Arc::clone(self), ticket, tokens: 0 }
    }

    /// As [`Peer::enter`], unless its breaker is shut.
    pub(crate) fn try_enter(self: &Arc<Self>) -> Option<InFlight> {
        let ticket = self.health.enter(false)?;
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        Some(InFlight { peer: Arc::clone(self), ticket: Some(ticket), tokens: 0 })
    }
}

//! What operators have decided about the fleet, as one small value that routers can share.
//! Owns no peer: the pool applies it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::peer::{PeerSpec, Role};

/// The decisions; two routers with equal values treat their peers alike.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OperatorState {
    /// Peers that operators added, by id. Tokens are not written out.
    pub added: BTreeMap<String, PeerSpec>,
    /// Peers that operators removed and that must not come back by registration.
    pub removed: BTreeSet<PeerPlace>,
    /// Ids of peers that get no new requests.
    pub drained: BTreeSet<String>,
    /// Ids of peers that take part in no hand-off.
    pub quarantined: BTreeSet<String>,
}

/// A role at a base URL in canonical spelling.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PeerPlace {
    /// The base URL.
    pub url: String,
    /// The role.
    pub role: Role,
}

/// The current value and everybody who follows it.
#[derive(Debug)]
pub(crate) struct Operator {
    state: watch::Sender<Arc<OperatorState>>,
}

impl Default for Operator {
    fn default() -> Self {
        Self { state: watch::Sender::new(Arc::default()) }
    }
}

impl Operator {
    pub(crate) fn state(&self) -> Arc<OperatorState> {
        Arc::clone(&self.state.borrow())
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<OperatorState>> {
        self.state.subscribe()
    }

    /// Changes the value; those who follow hear of it only if it is another one then.
    pub(crate) fn change(&self, change: impl FnOnce(&mut OperatorState)) {
        self.state.send_if_modified(|state| {
            let mut next = (**state).clone();
            change(&mut next);
            let news = next != **state;
            if news {
                *state = Arc::new(next);
            }
            news
        });
    }
}

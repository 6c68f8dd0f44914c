//! Which leases of other engines this engine depends on, and when to renew them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use crate::ClockTime;
use crate::protocol::params::KvTransferParams;

use super::Heartbeat;

#[derive(Debug, Default)]
pub(super) struct Heartbeats {
    by_engine: BTreeMap<String, Heartbeat>,
    /// Local request to the remote engine and remote request it keeps alive.
    of_request: HashMap<String, (String, String)>,
    last: Option<ClockTime>,
}

impl Heartbeats {
    pub(super) fn len(&self) -> usize {
        self.of_request.len()
    }

    /// Follows a request whose parameters name everything a heartbeat needs.
    pub(super) fn track(&mut self, request: &str, params: &KvTransferParams) {
        if !params.do_remote_prefill {
            return;
        }
        let (Some(engine_id), Some(remote_request), Some(host), Some(&port), Some(&tp_size)) = (
            params.remote_engine_id.value(),
            params.remote_request_id.value(),
            params.remote_host.value(),
            params.remote_port.value(),
            params.tp_size.value(),
        ) else {
            return;
        };
        let heartbeat = self.by_engine.entry(engine_id.clone()).or_insert_with(|| Heartbeat {
            engine_id: engine_id.clone(),
            host: host.clone(),
            port,
            tp_size,
            dcp_size: params.dcp_size.value().copied().unwrap_or(1),
            pp_size: params.pp_size.value().copied().unwrap_or(1),
            request_ids: BTreeSet::new(),
        });
        heartbeat.request_ids.insert(remote_request.clone());
        let key = (engine_id.clone(), remote_request.clone());
        self.of_request.insert(request.to_owned(), key);
    }

    pub(super) fn stop(&mut self, request: &str) {
        let Some(key) = self.of_request.remove(request) else { return };
        // Two local requests may have been given one hand-off: the other still needs the lease.
        if self.of_request.values().any(|other| *other == key) {
            return;
        }
        let (engine_id, remote_request) = key;
        let Some(heartbeat) = self.by_engine.get_mut(&engine_id) else { return };
        heartbeat.request_ids.remove(&remote_request);
        if heartbeat.request_ids.is_empty() {
            self.by_engine.remove(&engine_id);
        }
    }

    /// Everything to renew, when the interval has passed.
    pub(super) fn due(&mut self, now: ClockTime, interval: Duration) -> Vec<Heartbeat> {
        let due = self.last.is_none_or(|last| now.saturating_sub(last) >= interval);
        if self.by_engine.is_empty() || !due {
            return Vec::new();
        }
        self.last = Some(now);
        self.by_engine.values().cloned().collect()
    }
}

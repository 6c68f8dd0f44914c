//! The fleet as the router's stream tells it: everything at first, then what has changed.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Deserialize;
use serde_json::Value;

use crate::cli::client::Operators;
use crate::cli::fault::CliError;
use crate::cli::peers::{LastError, Load};

/// Most requests that are remembered, as many as the stream tells of.
const MOST_REQUESTS: usize = 60;

#[derive(Debug, Deserialize)]
pub(super) struct Router {
    pub(super) version: String,
    pub(super) ready: bool,
    pub(super) draining: bool,
    pub(super) running: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Peer {
    pub(super) id: String,
    pub(super) role: String,
    pub(super) condition: String,
    pub(super) version: Option<String>,
    pub(super) in_flight: u64,
    pub(super) breaker: String,
    pub(super) errors: u64,
    pub(super) last_error: Option<LastError>,
    pub(super) load: Option<Load>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Pair {
    pub(super) prefill: String,
    pub(super) decode: String,
    pub(super) rate: f64,
    pub(super) mean_ms: Option<f64>,
    pub(super) longest_ms: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct HandOffs {
    pub(super) live: u64,
    pub(super) shown: Vec<HandOff>,
}

#[derive(Debug, Deserialize)]
pub(super) struct HandOff {
    pub(super) request_id: String,
    pub(super) state: String,
    pub(super) prefill: String,
    pub(super) decode: Option<String>,
    pub(super) blocks: u64,
    pub(super) ends_ms: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    pub(super) number: u64,
    pub(super) began_ms: u64,
    pub(super) ended_ms: Option<u64>,
    pub(super) request_id: String,
    pub(super) endpoint: String,
    pub(super) outcome: Option<String>,
    pub(super) prefill: Option<String>,
    pub(super) decode: Option<String>,
    pub(super) first_byte_seconds: Option<f64>,
}

/// One frame; what is absent has not changed.
#[derive(Debug, Deserialize)]
struct Frame {
    now_ms: u64,
    #[serde(default)]
    peers: Vec<Peer>,
    #[serde(default)]
    gone: Vec<String>,
    router: Option<Router>,
    pairs: Option<Vec<Pair>>,
    hand_offs: Option<HandOffs>,
    #[serde(default)]
    requests: Vec<Request>,
    matrix: Option<Value>,
}

#[derive(Debug, Default)]
pub(super) struct Fleet {
    pub(super) router: Option<Router>,
    pub(super) peers: BTreeMap<String, Peer>,
    pub(super) pairs: Vec<Pair>,
    pub(super) hand_offs: HandOffs,
    pub(super) requests: BTreeMap<u64, Request>,
    now: Option<(u64, Instant)>,
}

impl Fleet {
    /// Takes over a frame; one with everything forgets what was.
    pub(super) fn apply(&mut self, operators: &Operators, frame: &Value) -> Result<(), CliError> {
        self.take(operators.read_as(frame)?);
        Ok(())
    }

    fn take(&mut self, frame: Frame) {
        // Only a first frame has all of these.
        if frame.router.is_some()
            && frame.pairs.is_some()
            && frame.hand_offs.is_some()
            && frame.matrix.is_some()
        {
            *self = Self::default();
        }
        self.now = Some((frame.now_ms, Instant::now()));
        self.peers.extend(frame.peers.into_iter().map(|peer| (peer.id.clone(), peer)));
        self.peers.retain(|id, _| !frame.gone.contains(id));
        self.router = frame.router.or(self.router.take());
        if let Some(pairs) = frame.pairs {
            self.pairs = pairs;
        }
        if let Some(hand_offs) = frame.hand_offs {
            self.hand_offs = hand_offs;
        }
        self.requests.extend(frame.requests.into_iter().map(|request| (request.number, request)));
        while self.requests.len() > MOST_REQUESTS {
            self.requests.pop_first();
        }
    }

    /// Now, on the router's clock.
    pub(super) fn now_ms(&self) -> u64 {
        self.now.map_or(0, |(then, at)| then + at.elapsed().as_millis() as u64)
    }

    /// Prefill peers first, in the order of their names.
    pub(super) fn peers_in_order(&self) -> Vec<&Peer> {
        let mut peers: Vec<&Peer> = self.peers.values().collect();
        peers.sort_by_key(|peer| peer.role != "prefill");
        peers
    }

    /// The newest first.
    pub(super) fn newest(&self) -> impl Iterator<Item = &Request> {
        self.requests.values().rev()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    pub(in crate::cli::top) fn example() -> Fleet {
        let peer = |id: &str, role: &str| {
            json!({"id": id, "role": role, "condition": "open", "version": "0.32.0", "in_flight": 1,
                   "breaker": "closed", "errors": 2, "last_error": null,
                   "load": {"running": 3, "waiting": 1, "kv_usage": 0.25, "cached_token_rate": null, "at_ms": 1}})
        };
        let mut fleet = Fleet::default();
        fleet.take(frame(json!({
            "now_ms": 1000,
            "peers": [peer("decode-1", "decode"), peer("prefill-1", "prefill")],
            "router": {"version": "0.1.0", "ready": true, "draining": false, "running": 1},
            "pairs": [{"prefill": "prefill-1", "decode": "decode-1", "rate": 2.5, "mean_ms": 6.1, "longest_ms": 9.8}],
            "hand_offs": {"live": 1, "shown": [{"request_id": "one", "state": "dispatched", "prefill": "prefill-1",
                "decode": "decode-1", "blocks": 4, "ends_ms": 31000}]},
            "requests": [{"number": 7, "began_ms": 900, "ended_ms": null, "request_id": "one",
                "endpoint": "completions", "outcome": null, "prefill": "prefill-1", "decode": "decode-1",
                "first_byte_seconds": null}],
            "matrix": {}
        })));
        fleet
    }

    fn frame(value: Value) -> Frame {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_delta_changes_what_it_names_and_a_snapshot_everything() {
        let mut fleet = example();
        let order: Vec<&str> = fleet.peers_in_order().iter().map(|peer| peer.id.as_str()).collect();
        assert_eq!(order, ["prefill-1", "decode-1"]);
        fleet.take(frame(json!({"now_ms": 1250, "gone": ["decode-1"], "pairs": []})));
        assert_eq!((fleet.peers.len(), fleet.pairs.len(), fleet.hand_offs.live), (1, 0, 1));
        assert!(fleet.router.as_ref().unwrap().ready && fleet.now_ms() >= 1250);
        let all = json!({"now_ms": 9, "router": {"version": "0.1.0", "ready": false, "draining": false, "running": 0},
                         "pairs": [], "hand_offs": {"live": 0, "shown": []}, "matrix": {}});
        fleet.take(frame(all));
        assert_eq!((fleet.peers.len(), fleet.requests.len(), fleet.hand_offs.live), (0, 0, 0));
    }
}

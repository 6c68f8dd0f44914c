//! What a check says of an engine and of a pair, and what to do about it.

use serde_json::{Value, json};

use super::target::{Pair, Trial};
use crate::cli::peers::Peer;

/// A pair and what came of its hand-off.
pub(super) struct Judgement {
    pub(super) pair: Pair,
    pub(super) trial: Trial,
}

impl Judgement {
    pub(super) fn works(&self) -> bool {
        self.trial.result == "works"
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "prefill": self.pair.prefill,
            "decode": self.pair.decode,
            "handshake": self.pair.verdict,
            "result": self.trial.result,
            "detail": self.trial.detail,
            "seconds": self.trial.seconds,
            "blocks": self.trial.blocks,
            "read": self.trial.read,
        })
    }

    /// What is wrong with it that is not wrong with one of its engines.
    pub(super) fn finding(&self) -> Option<(String, String)> {
        let advice = advice(&self.trial.result)?;
        let reason = self.trial.detail.as_ref().or(self.pair.reason.as_ref());
        let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        let what = self.trial.result.replace('_', " ");
        Some((format!("{} to {}: {what}{reason}", self.pair.prefill, self.pair.decode), advice.to_owned()))
    }
}

fn advice(result: &str) -> Option<&'static str> {
    Some(match result {
        // The last two are said of the engine.
        "works" | "prefill_unready" | "decode_unready" => return None,
        "not_read" => {
            "look for NIXL's errors in the decode engine's log: it must reach the prefill engine's side channel \
             (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT there) and its memory (UCX_NET_DEVICES, UCX_TLS on both)"
        }
        "incompatible" => {
            "start both engines with the same model, dtype, block size, KV layout and attention backend, and \
             versions that understand each other; docs/compatibility.md has the rules"
        }
        "quarantined" => {
            "if an operator did it: kvbaton peers resume ID; after a restart it ends by itself \
             (pairing.quarantine_restarted)"
        }
        "no_common_model" => "start both engines with the same --served-model-name",
        "prefill_failed" => {
            "send it a request of your own and read its log: it must serve /v1/completions, and take the token \
             that the settings give for it"
        }
        "hand_off_refused" => {
            "start the prefill engine with --kv-transfer-config \
             '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\"}'; if it names a foreign address, set \
             its side_channel in the settings"
        }
        "decode_failed" => {
            "read the decode engine's log: it needs the same --kv-transfer-config, and must reach the prefill \
             engine's side channel"
        }
        "timed_out" => {
            "the engines answer but the hand-off does not end: look at both logs, and at firewalls between them"
        }
        _ => "run the check again: the fleet has changed meanwhile",
    })
}

/// What is wrong with an engine.
pub(super) fn of_peer(peer: &Peer) -> Option<(String, String)> {
    if peer.state == "ready" {
        return None;
    }
    let last = peer.last_error.as_ref().map(|last| format!(": {}", last.kind)).unwrap_or_default();
    let advice = format!(
        "start it, or correct its url in the settings: {}/health must answer 200 from the router's host",
        peer.url.trim_end_matches('/')
    );
    Some((format!("{} does not answer{last}", peer.id), advice))
}

//! What a check says of an engine and of a pair, and what to do about it.

use serde_json::{Value, json};

use super::target::{Pair, Source, Trial};
use crate::cli::peers::Peer;

/// The heading about engines that are not there.
pub(super) const NOTHING_READY: &str = "nothing-is-ready";

/// The heading about sources of engines.
const SOURCE: &str = "a-source-names-no-engines";

/// Something that is wrong.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) what: String,
    /// What to do about it.
    pub(super) advice: String,
    /// Where more is said of it: a heading of docs/troubleshooting.md.
    pub(super) see: &'static str,
}

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
    pub(super) fn finding(&self) -> Option<Finding> {
        let (see, advice) = advice(&self.trial.result)?;
        let reason = self.trial.detail.as_ref().or(self.pair.reason.as_ref());
        let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        let what = self.trial.result.replace('_', " ");
        let what = format!("{} to {}: {what}{reason}", self.pair.prefill, self.pair.decode);
        Some(Finding { what, advice: advice.to_owned(), see })
    }
}

impl Source {
    pub(super) fn json(&self) -> Value {
        json!({"source": self.source, "role": self.role, "urls": self.urls, "failure": self.failure})
    }

    /// What is wrong with it.
    pub(super) fn finding(&self) -> Option<Finding> {
        let (what, advice) = match &self.failure {
            Some(failure) => (failure.clone(), "what it had named before is kept"),
            None if !self.heard => ("it has not answered yet".to_owned(), "give it longer with --wait"),
            None if self.urls.is_empty() => (
                "it names no engine".to_owned(),
                "see whether its name is right, and whether engines are ready",
            ),
            None => return None,
        };
        let what = format!("{} ({}): {what}", self.source, self.role);
        Some(Finding { what, advice: advice.to_owned(), see: SOURCE })
    }
}

/// Where more is said of a result, and what to do.
fn advice(result: &str) -> Option<(&'static str, &'static str)> {
    Some(match result {
        // The last two are said of the engine.
        "works" | "prefill_unready" | "decode_unready" => return None,
        "not_read" => (
            "the-decode-engine-is-very-slow-or-hangs",
            "look for NIXL's errors in the decode engine's log: it must reach the prefill engine's side channel \
             (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT there) and its memory (UCX_NET_DEVICES, UCX_TLS on both)",
        ),
        "incompatible" => (
            "no_compatible_pair",
            "start both engines with the same model, dtype, block size, KV layout and attention backend, and \
             versions that understand each other; docs/compatibility.md has the rules",
        ),
        "quarantined" => (
            "no_compatible_pair",
            "if an operator did it: kvbaton peers resume ID; after a restart it ends by itself \
             (pairing.quarantine_restarted)",
        ),
        "no_common_model" => ("model_not_found", "start both engines with the same --served-model-name"),
        "prefill_failed" => (
            "prefill_failed",
            "send it a request of your own and read its log: it must serve /v1/completions, and take the token \
             that the settings give for it",
        ),
        "hand_off_refused" => (
            "bad_handoff",
            "start the prefill engine with --kv-transfer-config \
             '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\"}'; if it names a foreign address, set \
             its side_channel in the settings",
        ),
        "decode_failed" => (
            "the-decode-engine-answers-500-after-five-seconds",
            "read the decode engine's log: it needs the same --kv-transfer-config, and must reach the prefill \
             engine's side channel",
        ),
        "timed_out" => (
            "the-decode-engine-is-very-slow-or-hangs",
            "the engines answer but the hand-off does not end: look at both logs, and at firewalls between them",
        ),
        _ => ("by-symptom", "run the check again: the fleet has changed meanwhile"),
    })
}

/// What is wrong with an engine.
pub(super) fn of_peer(peer: &Peer) -> Option<Finding> {
    if peer.state == "ready" {
        return None;
    }
    let last = peer.last_error.as_ref().map(|last| format!(": {}", last.kind)).unwrap_or_default();
    let advice = format!(
        "start it, or correct its url in the settings: {}/health must answer 200 from the router's host",
        peer.url.trim_end_matches('/')
    );
    Some(Finding { what: format!("{} does not answer{last}", peer.id), advice, see: NOTHING_READY })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_is_said_where_findings_point() {
        let page = include_str!("../../../docs/troubleshooting.md");
        let headings: Vec<String> = page
            .lines()
            .filter_map(|line| line.strip_prefix('#').map(|rest| rest.trim_start_matches('#').trim()))
            .map(|heading| heading.to_lowercase().replace(' ', "-").replace([',', '/'], ""))
            .collect();
        let results = [
            "not_read",
            "incompatible",
            "quarantined",
            "no_common_model",
            "prefill_failed",
            "hand_off_refused",
            "decode_failed",
            "timed_out",
            "gone",
        ];
        let places = results.iter().filter_map(|result| advice(result)).map(|(see, _)| see);
        let places: Vec<&str> = places.chain([NOTHING_READY]).collect();
        assert_eq!(places.len(), results.len() + 1);
        for see in places {
            assert!(headings.iter().any(|heading| heading == see), "{see}");
        }
        assert_eq!(advice("works"), None);
    }
}

//! Whether the router can tell a prefill engine that a hand-off will not be read, and what keeps it from
//! that: for operators, who set `notify` and cannot see versions meet.

use std::sync::Arc;

use kv_connector::transport::NixlVersion;
use serde::Serialize;

use super::gate::{self, Barred};
use super::{NotNotified, Notifier};
use crate::registry::EngineRecord;

/// The router's own agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum AgentState {
    /// No engine has wanted it yet, or it is being started.
    #[default]
    Unstarted,
    /// It is there, with the version of its library.
    Ready(Option<NixlVersion>),
    /// There is none, for this reason.
    Missing(String),
}

/// Whether a peer is notified of hand-offs that will not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NotifyView {
    /// Whether the peer's description asks for it.
    pub configured: bool,
    /// Whether it can be.
    pub usable: bool,
    /// Why not, for machines: `off`, `starting`, `unavailable`, `not_registered`, `version_unknown` or
    /// `version_incompatible`.
    pub reason: Option<&'static str>,
    /// Why not, for people.
    pub detail: Option<String>,
}

impl NotifyView {
    const fn without(configured: bool, reason: &'static str) -> Self {
        Self { configured, usable: false, reason: Some(reason), detail: None }
    }

    fn judged(agent: &AgentState, said: Option<&str>, engines: &[Arc<EngineRecord>]) -> Self {
        let own = match agent {
            AgentState::Unstarted => return Self::without(true, "starting"),
            AgentState::Missing(why) => {
                let detail = Some(why.clone());
                return Self { detail, ..Self::without(true, NotNotified::Unavailable.label()) };
            }
            AgentState::Ready(own) => *own,
        };
        let pass = |engine: &EngineRecord| match engine.ranks.is_empty() {
            true => Err(NotNotified::NotRegistered { rank: (0, 0) }),
            false => {
                let passed: Result<NixlVersion, Barred> = gate::pass(own, said, gate::announced(engine));
                passed.map(drop).map_err(NotNotified::from)
            }
        };
        let judged = match engines {
            [] => Err(NotNotified::NotRegistered { rank: (0, 0) }),
            engines => engines.iter().try_for_each(|engine| pass(engine)),
        };
        match judged {
            Ok(()) => Self { configured: true, usable: true, reason: None, detail: None },
            Err(error) => {
                let detail = Some(error.to_string());
                Self { detail, ..Self::without(true, error.label()) }
            }
        }
    }
}

impl Notifier {
    /// Whether an engine is notified, by what its peer's description asks for and says of its version.
    pub(crate) fn view(
        &self,
        configured: bool,
        said: Option<&str>,
        engines: &[Arc<EngineRecord>],
    ) -> NotifyView {
        if !configured {
            return NotifyView::without(false, "off");
        }
        NotifyView::judged(&self.agent.lock(), said, engines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{Registration, Registry, RegistryLimits};

    fn engine(announced: Option<&str>, payload: Option<bytes::Bytes>) -> Arc<EngineRecord> {
        let registry = Registry::new(RegistryLimits::default());
        let mut registration = Registration { engine_id: "e".into(), ..Registration::default() };
        registration.traits.nixl_version = announced.map(str::to_owned);
        registry.register(registration).unwrap();
        if let Some(payload) = payload {
            registry.put("e", 0, 0, payload).unwrap();
        }
        registry.engine("e").unwrap()
    }

    fn payload() -> bytes::Bytes {
        use kv_connector::protocol::handshake::NixlHandshakePayload;
        use kv_connector::protocol::metadata::{AgentMetadataV2, NixlAgentMetadata};
        let metadata = AgentMetadataV2 { engine_id: "e".into(), ..AgentMetadataV2::default() };
        let agent_metadata_bytes = NixlAgentMetadata::V2(metadata).encode();
        NixlHandshakePayload { compatibility_hash: "h".into(), agent_metadata_bytes }.encode().into()
    }

    #[test]
    fn what_keeps_an_engine_from_being_notified_is_named() {
        let ready = || AgentState::Ready(NixlVersion::parse("1.5.1"));
        let there = |announced| vec![engine(announced, Some(payload()))];
        let table = [
            (AgentState::Unstarted, None, there(Some("1.5.1")), Some("starting")),
            (AgentState::Missing("no library".into()), None, there(Some("1.5.1")), Some("unavailable")),
            (ready(), None, Vec::new(), Some("not_registered")),
            (ready(), None, vec![engine(Some("1.5.1"), None)], Some("not_registered")),
            (ready(), None, there(None), Some("version_unknown")),
            (ready(), None, there(Some("1.3.0")), Some("version_incompatible")),
            (ready(), Some("1.3.0"), there(Some("1.5.1")), Some("version_incompatible")),
            (AgentState::Ready(None), None, there(Some("1.5.1")), Some("version_unknown")),
            (ready(), None, there(Some("1.4.0")), None),
            (ready(), Some("1.5.1"), there(None), None),
        ];
        for (agent, said, engines, reason) in table {
            let view = NotifyView::judged(&agent, said, &engines);
            assert_eq!((view.usable, view.reason), (reason.is_none(), reason), "{agent:?} {said:?}");
            let explained = !matches!(reason, None | Some("starting"));
            assert_eq!(view.detail.is_some(), explained, "{view:?}");
        }
    }
}

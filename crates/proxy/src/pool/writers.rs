//! Whose engines may speak for a peer that the settings or an operator named: an identity decides which
//! requests a peer gets, so that it is not for whoever comes first.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Pool;
use super::peer::Peer;
use crate::registry::{EngineRecord, Registration, Registry, RegistryError, Writer, canonical_base_url};

/// The credentials that write the registry, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Writers {
    /// Those of engines.
    pub engines: BTreeSet<String>,
    /// Those that may speak for every peer: operators, and the program's own engines.
    pub trusted: BTreeSet<String>,
}

impl Writers {
    /// Whether an engine of this owner is believed to be the peer's. Where several credentials register
    /// engines, the one that the peer names; no engine's, when it names none.
    pub(crate) fn may_speak(&self, owner: Option<&str>, peer: &Peer) -> bool {
        let Some(owner) = owner else { return true };
        if peer.standing.is_adopted() || self.trusted.contains(owner) {
            return true;
        }
        match &peer.spec.registered_by {
            Some(named) => named == owner,
            None => self.engines.is_empty() || (self.engines.len() == 1 && self.engines.contains(owner)),
        }
    }

    /// Whether a registered engine is believed to be the peer's.
    pub(crate) fn believe(&self, engine: &EngineRecord, peer: &Peer) -> bool {
        self.may_speak(engine.owner.as_deref(), peer)
    }
}

impl Pool {
    /// Other credentials from now on.
    pub(crate) fn set_writers(&self, writers: Writers) {
        self.writers.store(Arc::new(writers));
        self.relearn();
    }

    /// Whether a registered engine is believed to be a peer's.
    pub(crate) fn believes(&self, engine: &EngineRecord, peer: &Peer) -> bool {
        self.writers.load().believe(engine, peer)
    }

    /// Whether an engine may register under its id and at the address that it names.
    ///
    /// # Errors
    /// They are a peer's for which its credential may not speak.
    pub(crate) fn check_claim(
        &self,
        registration: &Registration,
        registry: &Registry,
    ) -> Result<(), RegistryError> {
        let Writer::Engine { credential, .. } = &registration.writer else { return Ok(()) };
        self.check_change(&registration.writer, &registration.engine_id, registry)?;
        let address = registration.base_url.as_deref().and_then(canonical_base_url);
        self.check_peers(credential, |peer| {
            let is_there = address.is_some() && peer.address == address;
            is_there || peer.observed.now().engine_ids.contains(&registration.engine_id)
        })
    }

    /// Whether an engine's credential may change what the router itself has read of an engine, which
    /// nobody owns.
    ///
    /// # Errors
    /// It is that of a peer for which the credential may not speak.
    pub(crate) fn check_change(
        &self,
        writer: &Writer,
        engine_id: &str,
        registry: &Registry,
    ) -> Result<(), RegistryError> {
        let Writer::Engine { credential, .. } = writer else { return Ok(()) };
        match registry.engine(engine_id).filter(|known| known.owner.is_none()) {
            Some(known) if known.base_url.is_some() => {
                self.check_peers(credential, |peer| peer.address == known.base_url)
            }
            _ => Ok(()),
        }
    }

    fn check_peers(&self, credential: &str, concerns: impl Fn(&Peer) -> bool) -> Result<(), RegistryError> {
        let writers = self.writers.load();
        let snapshot = self.snapshot.load();
        let mut others = snapshot.all().filter(|peer| !writers.may_speak(Some(credential), peer));
        match others.find(|peer| concerns(peer)) {
            Some(peer) => Err(RegistryError::AddressReserved { base_url: peer.spec.url.clone() }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::ModelScope;
    use crate::pool::{PeerSpec, Role};
    use crate::registry::{EngineRole, EngineState, RegistryLimits};

    const URL: &str = "http://10.0.0.1:8100";

    fn writers(engines: &[&str]) -> Writers {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Writers { engines: names(engines), trusted: names(&["ops"]) }
    }

    fn peer(registered_by: Option<&str>) -> PeerSpec {
        let mut spec = PeerSpec::new(Role::Prefill, URL);
        spec.registered_by = registered_by.map(str::to_owned);
        spec
    }

    fn registration(writer: Writer, base_url: &str, role: EngineRole) -> Registration {
        Registration {
            engine_id: "e".into(),
            base_url: Some(base_url.to_owned()),
            role: Some(role),
            state: EngineState::Draining,
            writer,
            ..Registration::default()
        }
    }

    fn engine(credential: &str) -> Writer {
        Writer::Engine { credential: credential.into(), models: ModelScope::All }
    }

    fn pool(registered_by: Option<&str>, engines: &[&str]) -> Pool {
        let pool = Pool::default();
        pool.set_writers(writers(engines));
        pool.add(peer(registered_by)).unwrap();
        pool
    }

    #[tokio::test]
    async fn one_credential_of_engines_registers_them_all() {
        for registered_by in [None, Some("a")] {
            let pool = pool(registered_by, &["a"]);
            let here = registration(engine("a"), URL, EngineRole::Prefill);
            assert_eq!(pool.check_claim(&here, &Registry::new(RegistryLimits::default())), Ok(()));
        }
    }

    #[tokio::test]
    async fn of_several_credentials_only_the_one_that_the_peer_names_registers_at_its_address() {
        let reserved = Err(RegistryError::AddressReserved { base_url: URL.into() });
        let check = |registered_by, writer, base_url, role| {
            let registry = Registry::new(RegistryLimits::default());
            pool(registered_by, &["a", "b"]).check_claim(&registration(writer, base_url, role), &registry)
        };
        // In whatever role and spelling.
        for role in [EngineRole::Prefill, EngineRole::Decode, EngineRole::Both] {
            for base_url in [URL, "HTTP://10.0.0.1:8100/"] {
                assert_eq!(check(Some("a"), engine("a"), base_url, role), Ok(()));
                assert_eq!(check(Some("a"), engine("b"), base_url, role), reserved, "{role:?} {base_url}");
                assert_eq!(check(None, engine("a"), base_url, role), reserved, "{role:?} {base_url}");
            }
        }
        let elsewhere = "http://10.0.0.1:8101";
        assert_eq!(check(Some("a"), engine("b"), elsewhere, EngineRole::Prefill), Ok(()));
        for writer in [Writer::Trusted, Writer::Observer, Writer::Operator("ops".into())] {
            assert_eq!(check(Some("a"), writer, URL, EngineRole::Prefill), Ok(()));
        }
    }

    #[tokio::test]
    async fn an_engine_that_was_there_first_does_not_speak_for_a_peer_that_is_named_later() {
        let registry = Registry::new(RegistryLimits::default());
        registry.register(registration(engine("b"), URL, EngineRole::Both)).unwrap();
        for (registered_by, believed) in [(Some("b"), true), (Some("a"), false), (None, false)] {
            let pool = pool(registered_by, &["a", "b"]);
            let adopted = pool.adopt(&registry).came.len();
            pool.learn(&registry);
            let peer = pool.all().remove(0);
            let seen = peer.identity.load().engine_ids();
            assert_eq!(seen.contains("e"), believed, "{registered_by:?}");
            assert_eq!(peer.identity.load().state(), believed.then_some(EngineState::Draining));
            // Nor is it a decode peer at that address.
            assert_eq!(adopted, usize::from(believed), "{registered_by:?}");
        }
    }

    #[tokio::test]
    async fn other_credentials_hold_for_engines_that_are_there() {
        let registry = Registry::new(RegistryLimits::default());
        let pool = pool(None, &["a"]);
        registry.register(registration(engine("a"), URL, EngineRole::Prefill)).unwrap();
        let believed = || {
            pool.learn(&registry);
            !pool.all().remove(0).identity.load().engines.is_empty()
        };
        assert!(believed());
        pool.set_writers(writers(&["a", "b"]));
        assert!(!believed());
        pool.set_writers(writers(&[]));
        assert!(believed());
    }

    #[tokio::test]
    async fn what_the_router_has_read_of_a_peer_is_not_for_another_credential() {
        let registry = Registry::new(RegistryLimits::default());
        registry.register(registration(Writer::Observer, URL, EngineRole::Prefill)).unwrap();
        let pool = pool(Some("a"), &["a", "b"]);
        let reserved = Err(RegistryError::AddressReserved { base_url: URL.into() });
        assert_eq!(pool.check_change(&engine("b"), "e", &registry), reserved);
        assert_eq!(pool.check_change(&engine("a"), "e", &registry), Ok(()));
        // Nor by moving it to where no peer is.
        let moved = Registration { base_url: None, ..registration(engine("b"), URL, EngineRole::Prefill) };
        assert_eq!(pool.check_claim(&moved, &registry), reserved);
        assert_eq!(pool.check_change(&engine("b"), "unheard-of", &registry), Ok(()));
    }

    #[tokio::test]
    async fn who_registers_the_id_that_a_hand_off_named_does_not_speak_for_the_peer() {
        let registry = Registry::new(RegistryLimits::default());
        let silent =
            |writer| Registration { base_url: None, ..registration(writer, URL, EngineRole::Prefill) };
        for (owner, believed) in [("a", true), ("b", false)] {
            registry.register(silent(engine(owner))).unwrap();
            let pool = pool(Some("a"), &["a", "b"]);
            let peer = pool.all().remove(0);
            let claim = |credential| pool.check_claim(&silent(engine(credential)), &registry).is_ok();
            assert!(claim("b"), "nothing is known of it yet");
            peer.observed.change(|observed| observed.engine_ids.extend(["e".to_owned()]));
            assert_eq!((claim("a"), claim("b")), (true, false));
            pool.learn(&registry);
            assert_eq!(peer.identity.load().engine_ids().contains("e"), believed, "{owner}");
            assert!(registry.remove("e"));
        }
    }
}

//! Whether an engine may be notified at all, by the versions of NIXL on both sides.
//! What is not known is a no: a wrong yes crashes the engine.

use kv_connector::transport::NixlVersion;

use crate::registry::EngineRecord;

/// Why an engine must not be notified.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Barred {
    /// The router's own library does not tell its version.
    #[error("the version of the router's own NIXL library is not known: set nixl.version")]
    OwnUnknown,
    /// Neither the operator nor the engine has said what the engine runs.
    #[error("the engine's NIXL version is not known: set its nixl_version")]
    PeerUnknown,
    /// What was said is no version.
    #[error("{said:?} is not a NIXL version such as 1.5.1")]
    Unreadable {
        /// What was said.
        said: String,
    },
    /// The two must not talk.
    #[error("NIXL {peer} does not understand this router's NIXL {own}")]
    Incompatible {
        /// The router's.
        own: NixlVersion,
        /// The engine's.
        peer: NixlVersion,
    },
}

/// The NIXL version that an engine announced when it registered.
pub(super) fn announced(engine: &EngineRecord) -> Option<&str> {
    engine.traits.nixl_version.as_deref()
}

/// The engine's version, if it may be notified. Where operator and engine both say one, both must
/// fit: a setting may be older than the engine.
///
/// # Errors
/// Why it must not be notified.
pub(super) fn pass(
    own: Option<NixlVersion>,
    configured: Option<&str>,
    announced: Option<&str>,
) -> Result<NixlVersion, Barred> {
    let own = own.ok_or(Barred::OwnUnknown)?;
    let mut passed = Err(Barred::PeerUnknown);
    for said in [configured, announced].into_iter().flatten() {
        let peer = NixlVersion::parse(said).ok_or_else(|| Barred::Unreadable { said: said.to_owned() })?;
        if !own.talks_with(peer) {
            return Err(Barred::Incompatible { own, peer });
        }
        passed = Ok(peer);
    }
    passed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> NixlVersion {
        NixlVersion::parse(text).unwrap()
    }

    /// Own version, operator's word, engine's word, and the version it passes with.
    type Row = (Option<&'static str>, Option<&'static str>, Option<&'static str>, Option<&'static str>);

    #[test]
    fn only_what_is_known_to_fit_passes() {
        let table: [Row; 18] = [
            (Some("1.5.1"), Some("1.5.1"), None, Some("1.5.1")),
            (Some("1.5.1"), None, Some("1.4.0"), Some("1.4.0")),
            (Some("1.5.1"), Some("1.5.1"), Some("1.6.0"), Some("1.6.0")),
            (Some("1.4.0"), Some("1.9.2"), None, Some("1.9.2")),
            (Some("1.5.1"), None, None, None),
            (Some("1.5.1"), Some("1.3.9"), None, None),
            (Some("1.5.1"), None, Some("1.3.0"), None),
            (Some("1.5.1"), Some("0.9.1"), None, None),
            (Some("1.5.1"), Some("2.0.0"), None, None),
            (Some("1.5.1"), Some("1.5.1"), Some("1.3.0"), None),
            (Some("1.5.1"), Some("1.3.0"), Some("1.5.1"), None),
            (Some("1.3.0"), Some("1.2.0"), None, Some("1.2.0")),
            (Some("1.3.0"), Some("1.4.0"), None, None),
            (Some("1.5.1"), Some("1.5"), None, None),
            (Some("1.5.1"), None, Some("main"), None),
            (Some("1.5.1"), Some("1.5.1"), Some(""), None),
            (None, Some("1.5.1"), Some("1.5.1"), None),
            (None, None, None, None),
        ];
        for (own, configured, announced, passes) in table {
            let passed = pass(own.map(version), configured, announced);
            let row = format!("{own:?} {configured:?} {announced:?}: {passed:?}");
            assert_eq!(passed.ok(), passes.map(version), "{row}");
        }
    }

    #[test]
    fn the_reason_is_named() {
        let own = Some(version("1.5.1"));
        assert_eq!(pass(own, None, None), Err(Barred::PeerUnknown));
        assert_eq!(pass(None, Some("1.5.1"), None), Err(Barred::OwnUnknown));
        assert_eq!(pass(own, None, Some("x")), Err(Barred::Unreadable { said: "x".into() }));
        let apart = Barred::Incompatible { own: version("1.5.1"), peer: version("1.3.0") };
        assert_eq!(pass(own, Some("1.3.0"), None), Err(apart));
    }
}

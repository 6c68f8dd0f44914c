//! Which request an engine's side channel may be sent. One in another dialect ends the engine's listener
//! for good, so nothing here is a guess: whoever is not sure does not ask.

use kv_connector::protocol::params::Generation;

/// Why a side channel must not be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unsure {
    #[error("the dialect of the engine's version is not known: set the peer's generation")]
    UnknownVersion,
    #[error("the engine's version contradicts the peer's generation")]
    SettingContradicts,
    #[error("the engine's version contradicts its hand-offs")]
    HandOffContradicts,
}

/// What is known of an engine's dialect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Evidence<'a> {
    /// The operator's word.
    pub(crate) told: Option<Generation>,
    /// What the engine says of itself, asked just now.
    pub(crate) version: Option<&'a str>,
    /// Whether its hand-offs named this side channel, and if so the generation whose shape they have.
    pub(crate) hand_off: Option<Option<Generation>>,
}

/// The dialect of which all evidence agrees.
///
/// # Errors
/// There is none, or it contradicts itself.
pub(crate) fn dialect(evidence: Evidence<'_>) -> Result<Generation, Unsure> {
    let by_version = evidence.version.and_then(of_version);
    if let (Some(told), Some(by_version)) = (evidence.told, by_version)
        && told != by_version
    {
        return Err(Unsure::SettingContradicts);
    }
    let dialect = by_version.or(evidence.told).ok_or(Unsure::UnknownVersion)?;
    match evidence.hand_off {
        Some(shape) if shape != Some(dialect) => Err(Unsure::HandOffContradicts),
        _ => Ok(dialect),
    }
}

/// The dialect of a released version whose side channel was seen. Versions in between and later ones may
/// speak another, and so may builds from before or after a release.
fn of_version(version: &str) -> Option<Generation> {
    let released = version.split('+').next()?;
    let mut numbers = released.split('.');
    let (major, minor, patch) = (numbers.next()?, numbers.next()?, numbers.next()?);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let post = |text: &str| text.strip_prefix("post").is_some_and(is_number);
    if !is_number(patch) || !numbers.next().is_none_or(post) || numbers.next().is_some() {
        return None;
    }
    match (major, minor) {
        ("0", "13") => Some(Generation::V2),
        ("0", "32") => Some(Generation::V14),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_versions_that_were_seen_have_a_dialect() {
        for version in ["0.13.0", "0.13.1", "0.13.0+cu129", "0.13.0.post1"] {
            assert_eq!(of_version(version), Some(Generation::V2), "{version}");
        }
        for version in ["0.32.0", "0.32.2+cpu"] {
            assert_eq!(of_version(version), Some(Generation::V14), "{version}");
        }
        let others = [
            "0.12.0",
            "0.14.0",
            "0.31.9",
            "0.33.0",
            "1.13.0",
            "0.32",
            "0.32.0rc1",
            "0.32.1.dev7+gabc",
            "main",
            "",
            "0.13.0.1",
            "0.32.0.post1.dev2",
            "0.32.",
            "v0.32.0",
        ];
        for version in others {
            assert_eq!(of_version(version), None, "{version}");
        }
    }

    #[test]
    fn the_operators_word_counts_where_the_version_says_nothing() {
        let told = Evidence { told: Some(Generation::V14), version: Some("0.33.0"), hand_off: None };
        assert_eq!(dialect(told), Ok(Generation::V14));
        assert_eq!(dialect(Evidence { version: None, ..told }), Ok(Generation::V14));
        assert_eq!(dialect(Evidence { told: None, ..told }), Err(Unsure::UnknownVersion));
        let contradicted = Evidence { version: Some("0.13.0"), ..told };
        assert_eq!(dialect(contradicted), Err(Unsure::SettingContradicts));
    }

    proptest! {
        /// Whatever is asked is asked in the one dialect that no evidence denies.
        #[test]
        fn no_evidence_is_overruled(
            told in prop::option::of(prop::sample::select(vec![Generation::V2, Generation::V14])),
            version in prop::option::of(prop::sample::select(vec!["0.13.0", "0.20.0", "0.32.0", "0.40.0"])),
            hand_off in prop::option::of(prop::option::of(
                prop::sample::select(vec![Generation::V2, Generation::V14]),
            )),
        ) {
            if let Ok(dialect) = dialect(Evidence { told, version, hand_off }) {
                prop_assert!(told.is_none_or(|told| told == dialect));
                prop_assert!(hand_off.is_none_or(|shape| shape == Some(dialect)));
                prop_assert!(told.is_some() || version.and_then(of_version) == Some(dialect));
            }
        }
    }
}

//! Versions of NIXL, and which of them can talk to each other: known to whoever decides about
//! peers, with or without the library.

use std::fmt;

/// A version of NIXL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NixlVersion {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Patch number.
    pub patch: u32,
}

impl NixlVersion {
    /// Reads `1.5.1`; a suffix after the third number is ignored.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, '.');
        let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let rest = parts.next()?;
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        Some(Self { major, minor, patch: rest[..digits].parse().ok()? })
    }

    /// True when agents of the two versions can talk: 1.4 brought a UCX whose first message ends
    /// a process with an older one.
    pub fn talks_with(self, other: Self) -> bool {
        let generation = |version: Self| (version.major, version.major == 1 && version.minor >= 4);
        generation(self) == generation(other)
    }
}

impl fmt::Display for NixlVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_drawn_at_1_4() {
        let talk = |one: &str, other: &str| {
            NixlVersion::parse(one).unwrap().talks_with(NixlVersion::parse(other).unwrap())
        };
        for (one, other) in [("1.5.1", "1.4.0"), ("1.3.0", "1.0.1"), ("0.9.1", "0.4.0"), ("2.0.0", "2.7.1")] {
            assert!(talk(one, other) && talk(other, one), "{one} and {other}");
        }
        for (one, other) in [("1.4.0", "1.3.9"), ("1.5.1", "0.9.1"), ("2.0.0", "1.5.1"), ("1.0.0", "0.9.9")] {
            assert!(!talk(one, other) && !talk(other, one), "{one} and {other}");
        }
    }

    #[test]
    fn only_whole_versions_are_read() {
        let version = NixlVersion { major: 1, minor: 5, patch: 1 };
        for text in ["1.5.1", "1.5.1rc2", "1.5.1+cu12"] {
            assert_eq!(NixlVersion::parse(text), Some(version), "{text}");
        }
        for text in ["", "1", "1.5", "v1.5.1", "1.5.x", "main", "-1.5.1", "1.5."] {
            assert_eq!(NixlVersion::parse(text), None, "{text}");
        }
    }
}

//! Where a peer comes from, which decides who may take it out and who gives way at one address.

use std::fmt;
use std::sync::Arc;

/// Where a peer comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The settings, or the program itself.
    #[default]
    Settings,
    /// An operator's word.
    Operator,
    /// Its engines' registration, with which it leaves.
    Registration,
    /// A source of addresses, with which it leaves.
    Discovery {
        /// The source's name, such as `dns:decode.svc`.
        source: Arc<str>,
        /// Which of the processes that were at this address it is, where the source tells.
        instance: Option<Arc<str>>,
    },
}

impl Origin {
    /// Whether nobody named it: it gives way to whoever is named at its address.
    pub(crate) const fn gives_way(&self) -> bool {
        matches!(self, Self::Registration | Self::Discovery { .. })
    }

    /// The source that found it, if one did.
    pub(crate) const fn source(&self) -> Option<&Arc<str>> {
        match self {
            Self::Discovery { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Settings => f.write_str("settings"),
            Self::Operator => f.write_str("operator"),
            Self::Registration => f.write_str("registration"),
            Self::Discovery { source, .. } => f.write_str(source),
        }
    }
}

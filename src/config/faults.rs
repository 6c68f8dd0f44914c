//! What is wrong with the settings, all of it at once, each with a hint.

use std::fmt;
use std::path::PathBuf;

/// Where a setting came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A settings file.
    File(PathBuf),
    /// An environment variable.
    Env(String),
    /// A flag of the command line.
    Flag(&'static str),
    /// The settings as a whole.
    Settings,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Env(name) => f.write_str(name),
            Self::Flag(name) => f.write_str(name),
            Self::Settings => f.write_str("settings"),
        }
    }
}

/// One wrong setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFault {
    /// Where it stands.
    pub source: Source,
    /// Its dotted name.
    pub key: String,
    /// What is wrong with it.
    pub what: String,
    /// What to do.
    pub hint: Option<String>,
}

impl ConfigFault {
    pub(crate) fn new(source: Source, key: &str, what: String, hint: Option<String>) -> Self {
        Self { source, key: key.to_owned(), what, hint }
    }
}

impl fmt::Display for ConfigFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gap = if self.key.is_empty() { "" } else { " " };
        write!(f, "{}: {}{gap}{}", self.source, self.key, self.what)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

/// All wrong settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigFaults(pub Vec<ConfigFault>);

impl fmt::Display for ConfigFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} wrong setting(s):", self.0.len())?;
        for fault in &self.0 {
            write!(f, "\n  - {fault}")?;
        }
        Ok(())
    }
}

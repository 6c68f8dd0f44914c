//! Settings of the side channels: whose are read, and whether the router has some of its own.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The engines' ZMQ side channels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SideChannelSettings {
    /// Which engines' side channels the router reads.
    pub read: ReadSideChannels,
    /// Pause between two looks at one side channel.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// The router's own side channels.
    pub front: FrontSettings,
}

impl Default for SideChannelSettings {
    fn default() -> Self {
        Self {
            read: ReadSideChannels::Auto,
            interval: Duration::from_secs(5),
            front: FrontSettings::default(),
        }
    }
}

/// Which engines' side channels the router reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadSideChannels {
    /// Those that the settings or hand-offs name, of engines that do not register by themselves.
    Auto,
    /// Those that the settings name.
    Configured,
    /// None.
    Off,
}

/// Side channels of the router, one port for each registered engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FrontSettings {
    /// Whether there are any.
    pub enabled: bool,
    /// Address to listen on.
    pub listen: IpAddr,
    /// Ports to take, `first-last`; `0` takes whatever is free.
    pub ports: PortRange,
    /// Host at which decode engines reach them; the address to listen on when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advertise: Option<String>,
}

impl Default for FrontSettings {
    fn default() -> Self {
        Self {
            enabled: false,
            listen: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            ports: PortRange { first: 5700, last: 5799 },
            advertise: None,
        }
    }
}

impl FrontSettings {
    /// The host for hand-offs; `None` when nothing usable is set.
    #[must_use]
    pub fn host(&self) -> Option<String> {
        let advertised = self.advertise.clone();
        advertised.or_else(|| (!self.listen.is_unspecified()).then(|| self.listen.to_string()))
    }
}

/// Ports from the first to the last; `0` alone stands for any free port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PortRange {
    /// The first port.
    pub first: u16,
    /// The last port.
    pub last: u16,
}

impl PortRange {
    /// Whether the operating system chooses.
    #[must_use]
    pub fn is_any(self) -> bool {
        self.last == 0
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            return write!(f, "{}", self.first);
        }
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl From<PortRange> for String {
    fn from(range: PortRange) -> Self {
        range.to_string()
    }
}

/// A text that is no range of ports.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no range of ports such as \"5700-5799\"")]
pub struct NotPorts(String);

impl TryFrom<String> for PortRange {
    type Error = NotPorts;

    fn try_from(text: String) -> Result<Self, NotPorts> {
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(0), Ok(0)) => Ok(Self { first: 0, last: 0 }),
            (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(Self { first, last }),
            _ => Err(NotPorts(text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_written() {
        let read = |text: &str| PortRange::try_from(text.to_owned());
        assert_eq!(read("5700-5799"), Ok(PortRange { first: 5700, last: 5799 }));
        assert_eq!(read(" 80 - 80 ").unwrap().to_string(), "80");
        assert!(read("0").unwrap().is_any());
        for text in ["", "-", "1-", "0-5", "9-8", "1-65536", "a-b", "1-2-3"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_wildcard_is_nothing_to_advertise() {
        let mut front = FrontSettings::default();
        assert_eq!(front.host(), None);
        front.listen = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(front.host().as_deref(), Some("127.0.0.1"));
        front.advertise = Some("router".to_owned());
        assert_eq!(front.host().as_deref(), Some("router"));
    }
}

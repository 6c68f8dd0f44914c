//! The registry's address in the place of P's side channel, for decode engines that shake hands over
//! HTTP with whatever their hand-off names. Changes no other byte of a hand-off.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::HandOffRefusal;
use crate::handoff::HandedOff;
use crate::splice::rewrite_address;

/// Host and port at which engines reach the registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RegistryAddress {
    host: String,
    port: u16,
}

/// A text that names no host and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the address of a registry looks like 10.0.0.2:8000 or [fd00::2]:8000")]
pub struct NotAnAddress;

impl FromStr for RegistryAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        let (host, port) = text.rsplit_once(':').ok_or(NotAnAddress)?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or(NotAnAddress)?;
        let host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(bare) => bare.parse::<std::net::Ipv6Addr>().map(|_| bare).map_err(|_| NotAnAddress)?,
            None => host,
        };
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
        let is_host = !host.is_empty() && (host.bytes().all(plain) || text.starts_with('['));
        is_host.then(|| Self { host: host.to_owned(), port }).ok_or(NotAnAddress)
    }
}

impl TryFrom<String> for RegistryAddress {
    type Error = NotAnAddress;

    fn try_from(text: String) -> Result<Self, NotAnAddress> {
        text.parse()
    }
}

impl From<RegistryAddress> for String {
    fn from(address: RegistryAddress) -> Self {
        address.to_string()
    }
}

impl fmt::Display for RegistryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl HandedOff {
    /// The hand-off as a decode engine gets it that shakes hands with the registry.
    pub(crate) fn by_way_of(mut self, registry: Option<&RegistryAddress>) -> Result<Self, HandOffRefusal> {
        if let Some(RegistryAddress { host, port }) = registry {
            self.raw =
                rewrite_address(&self.raw, Some(host), Some(*port)).map_err(|_| HandOffRefusal::Garbage)?;
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for (text, host, port) in [
            ("10.0.0.2:8000", "10.0.0.2", 8000),
            ("registry.kv-cache.svc:80", "registry.kv-cache.svc", 80),
            ("[fd00::2]:8000", "fd00::2", 8000),
        ] {
            let address: RegistryAddress = text.parse().unwrap();
            assert_eq!((address.host.as_str(), address.port), (host, port));
            assert_eq!(address.to_string(), text);
        }
        for text in
            ["", "10.0.0.2", ":80", "a:0", "a:65536", "a:b", "http://a:80", "a b:80", "fd00::2:80", "[x]:80"]
        {
            assert_eq!(text.parse::<RegistryAddress>(), Err(NotAnAddress), "{text}");
        }
    }
}

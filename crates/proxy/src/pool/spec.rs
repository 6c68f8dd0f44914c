//! What the operator says of an engine: a peer's description, and why one cannot be used.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_connector::protocol::params::{Generation, TransferMode};
use kv_connector::transport::NixlVersion;
use serde::{Deserialize, Serialize};

use super::peer::Peer;
use crate::error::Stage;
use crate::request::Endpoint;
use crate::routing::kv_events::EventAddress;
use crate::side_channel::channels::ChannelAddress;

/// Longest lease that makes sense; also keeps deadlines within what clocks can hold.
const MAX_LEASE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Most data-parallel ranks of one address.
const MAX_RANKS: u32 = 1024;

/// What a peer does in the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts and holds their KV blocks until they are read.
    Prefill,
    /// Pulls the blocks and generates.
    Decode,
}

impl Role {
    /// The leg that this role serves.
    #[must_use]
    pub const fn stage(self) -> Stage {
        match self {
            Self::Prefill => Stage::Prefill,
            Self::Decode => Stage::Decode,
        }
    }
}

/// What becomes of the client's `Authorization` header on the way to a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Authorization {
    /// It passes unchanged.
    #[default]
    Forward,
    /// It is replaced by `Bearer` and the peer's token.
    Replace,
    /// It is dropped.
    None,
}

/// What the operator says of a peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerSpec {
    /// Its role; implied by the list it stands in when it comes from the settings.
    pub role: Role,
    /// Base URL, `http://host:port` or `https://host:port` with an optional path prefix.
    pub url: String,
    /// Name shown to operators and used as its id; made from role and position when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Connector generation; asked of the engine when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<Generation>,
    /// Host at which decode engines reach this prefill engine's side channel, in place of the
    /// one that it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_host: Option<String>,
    /// Port of the side channel, in place of the one that it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_port: Option<u16>,
    /// Where the router reads the engine's side channel, `host:port`; by its hand-offs when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub side_channel: Option<String>,
    /// Where the engine publishes its KV events, `tcp://host:port`; that of its rank 0, each further rank has
    /// the next port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_events: Option<String>,
    /// Where it replays KV events that were missed, in the same way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_events_replay: Option<String>,
    /// Which side of a pair drives the copy; what the engine registers or its hand-offs tell when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer_mode: Option<TransferMode>,
    /// Tensor-parallel size of the engine, whose other ranks are read then too. A wrong one ends an
    /// engine's side channel for good; hand-offs tell it as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tp_size: Option<u32>,
    /// Pipeline stages of the engine, as with `tp_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pp_size: Option<u32>,
    /// How many data-parallel engines there are behind the URL; each has the next port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dp_size: Option<u32>,
    /// Whether this decode engine shakes hands over the router's side channels, where there are any;
    /// when absent, unless it registers by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub front: Option<bool>,
    /// How long this prefill engine keeps an unread hand-off, as configured there.
    #[serde(default, with = "humantime_serde::option", skip_serializing_if = "Option::is_none")]
    pub lease: Option<Duration>,
    /// How long an abandoned prefill of this engine may still end by itself, in place of the fleet's
    /// `abandon_grace`; zero where an abort frees everything.
    #[serde(default, with = "humantime_serde::option", skip_serializing_if = "Option::is_none")]
    pub abandon_grace: Option<Duration>,
    /// Which data-parallel rank behind the URL this is; each rank is a peer of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dp_rank: Option<u32>,
    /// Each of the `dp_size` ranks behind the URL is a peer of its own; for entries of the settings.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dp_split: bool,
    /// The credential of its engines, where several may register any: what those of another say of
    /// this address counts for nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registered_by: Option<String>,
    /// The endpoints on which the engine takes hand-offs; by its version when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hand_offs: Option<Vec<Endpoint>>,
    /// Whether the router notifies this prefill engine itself, over NIXL, of hand-offs that nobody
    /// will read. Done only while the NIXL versions of both are known to fit.
    #[serde(default)]
    pub notify: bool,
    /// The version of NIXL that it runs, such as `1.5.1`; it may also announce it itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nixl_version: Option<String>,
    /// Where it is, such as `zone` or `rack`: hand-offs between peers whose labels differ may cost more.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What becomes of the client's `Authorization`.
    #[serde(default)]
    pub authorization: Authorization,
    /// The token for `authorization = "replace"`; never shown.
    #[serde(default, skip_serializing)]
    pub token: Option<String>,
}

impl PeerSpec {
    /// A peer about which only role and address are known.
    #[must_use]
    pub fn new(role: Role, url: impl Into<String>) -> Self {
        Self {
            role,
            url: url.into(),
            name: None,
            generation: None,
            kv_host: None,
            kv_port: None,
            side_channel: None,
            kv_events: None,
            kv_events_replay: None,
            transfer_mode: None,
            tp_size: None,
            pp_size: None,
            dp_size: None,
            front: None,
            lease: None,
            abandon_grace: None,
            dp_rank: None,
            dp_split: false,
            registered_by: None,
            hand_offs: None,
            notify: false,
            nixl_version: None,
            labels: BTreeMap::new(),
            authorization: Authorization::Forward,
            token: None,
        }
    }

    /// The peers that an entry of the settings stands for: one, or one for each rank.
    #[must_use]
    pub fn ranks(&self) -> Vec<Self> {
        let (true, Some(size)) = (self.dp_split, self.dp_size) else { return vec![self.clone()] };
        let of_rank = |rank: u32| Self {
            dp_rank: Some(rank),
            dp_split: false,
            name: self.name.as_ref().map(|name| format!("{name}-{rank}")),
            ..self.clone()
        };
        (0..size).map(of_rank).collect()
    }

    /// Whether a peer can be made of this.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), PeerSpecError> {
        if let Some(name) = &self.name {
            super::checked_name(name)?;
        }
        Peer::new(String::new(), self.clone()).map(|_| ())
    }

    /// Whether what it says beside the address and the token can be used.
    ///
    /// # Errors
    /// What cannot.
    pub(super) fn check_details(&self) -> Result<(), PeerSpecError> {
        if self.kv_host.as_deref().is_some_and(|host| !is_host(host)) || self.kv_port == Some(0) {
            return Err(PeerSpecError::SideChannel);
        }
        if self.side_channel.as_deref().is_some_and(|text| ChannelAddress::parse(text).is_none()) {
            return Err(PeerSpecError::SideChannelAddress);
        }
        let events = [&self.kv_events, &self.kv_events_replay];
        let is_bad = |text: &String| EventAddress::parse(text).is_none();
        if events.into_iter().flatten().any(is_bad)
            || (self.kv_events.is_none() && self.kv_events_replay.is_some())
        {
            return Err(PeerSpecError::KvEvents);
        }
        let sizes = [self.tp_size, self.pp_size, self.dp_size];
        if sizes.into_iter().flatten().any(|size| !(1..=1024).contains(&size)) {
            return Err(PeerSpecError::Size);
        }
        if self.lease.is_some_and(|lease| lease.is_zero() || lease > MAX_LEASE) {
            return Err(PeerSpecError::Lease);
        }
        if self.abandon_grace.is_some_and(|grace| grace > MAX_LEASE || self.role != Role::Prefill) {
            return Err(PeerSpecError::AbandonGrace);
        }
        let size = self.dp_size.unwrap_or(MAX_RANKS);
        let unsplittable = self.dp_split && (self.dp_size.is_none() || self.dp_rank.is_some());
        if unsplittable || self.dp_rank.is_some_and(|rank| rank >= size) {
            return Err(PeerSpecError::Ranks);
        }
        if self.notify && self.role != Role::Prefill {
            return Err(PeerSpecError::Notify);
        }
        if let Some(version) = self.nixl_version.as_ref().filter(|text| NixlVersion::parse(text).is_none()) {
            return Err(PeerSpecError::NixlVersion { version: version.clone() });
        }
        Ok(())
    }
}

/// Why a peer's description cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerSpecError {
    /// The URL is not `http://host[:port][/prefix]`.
    #[error("{url:?} is not a base URL of the form http://host:port")]
    Url {
        /// What was given.
        url: String,
    },
    /// Engines are reached over HTTP and HTTPS only.
    #[error("{url:?}: only http:// and https:// engines can be reached")]
    Scheme {
        /// What was given.
        url: String,
    },
    /// `authorization = "replace"` without a usable token.
    #[error("authorization \"replace\" needs a non-empty token that fits a header")]
    Token,
    /// The name is empty or holds characters that an id in a path cannot have.
    #[error("{name:?} cannot be a peer's name: use letters, digits, '.', '_' and '-'")]
    Name {
        /// What was given.
        name: String,
    },
    /// `kv_host` or `kv_port` is no address.
    #[error("kv_host must be a host name or an IP address, and kv_port not 0")]
    SideChannel,
    /// `side_channel` is no address.
    #[error("side_channel must be host:port")]
    SideChannelAddress,
    /// `kv_events` or `kv_events_replay` is no address, or there is only the latter.
    #[error("kv_events must be tcp://host:port, and kv_events_replay too, beside it")]
    KvEvents,
    /// One of the sizes is out of range.
    #[error("tp_size, pp_size and dp_size must be from 1 to 1024")]
    Size,
    /// `lease` is out of range.
    #[error("lease must be more than 0 and at most 7 days")]
    Lease,
    /// `abandon_grace` is out of range, or not a prefill engine's.
    #[error("abandon_grace is for prefill engines and at most 7 days")]
    AbandonGrace,
    /// The data-parallel rank is not one of so many, or there is nothing to split.
    #[error("dp_rank must be below dp_size and below {MAX_RANKS}; dp_split needs dp_size and no dp_rank")]
    Ranks,
    /// Only prefill engines are notified.
    #[error("notify is for prefill engines")]
    Notify,
    /// `nixl_version` is no version.
    #[error("{version:?} is not a NIXL version such as 1.5.1")]
    NixlVersion {
        /// What was given.
        version: String,
    },
    /// Another peer has this name or this role, URL and rank.
    #[error("a peer with the same name or the same role, url and dp_rank exists: {id}")]
    Exists {
        /// The id of the other peer.
        id: String,
    },
}

/// Whether a text is a host name or an IP address.
#[must_use]
pub fn is_host(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    bare.parse::<std::net::IpAddr>().is_ok()
        || (!host.is_empty() && host.len() <= 253 && host.bytes().all(name))
}

//! One peer's side: where its engines publish, and what they said.

use std::fmt;

use parking_lot::RwLock;
use serde::Serialize;

use super::index::{BlockIndex, Chain};
use crate::pool::peer::PeerSpec;

/// Where an engine publishes its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventAddress {
    pub(super) host: String,
    pub(super) port: u16,
}

impl EventAddress {
    /// Reads `tcp://host:port`; an IPv6 address stands in brackets.
    #[must_use]
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        crate::pool::is_host(bare).then(|| Self { host: bare.to_owned(), port })
    }

    /// That of a data-parallel rank; each has the next port.
    fn of_rank(&self, rank: u32) -> Option<Self> {
        let port = u16::try_from(u32::from(self.port) + rank).ok()?;
        Some(Self { host: self.host.clone(), port })
    }
}

impl fmt::Display for EventAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "tcp://[{}]:{}", self.host, self.port),
            false => write!(f, "tcp://{}:{}", self.host, self.port),
        }
    }
}

/// A peer's engines that publish.
#[derive(Debug, Default)]
pub(crate) struct PeerEvents {
    pub(super) sources: Vec<Source>,
}

/// One engine that publishes.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) address: EventAddress,
    pub(super) replay: Option<EventAddress>,
    /// The rank that its batches must be of, where there are several.
    pub(super) rank: Option<u32>,
    /// What it said, while somebody listens.
    pub(super) state: RwLock<Option<Known>>,
}

/// What an engine said.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) index: BlockIndex,
    /// The number of the next batch.
    pub(super) next: Option<u64>,
    /// How often batches were missed for good.
    pub(super) gaps: u64,
    /// Batches that could not be used.
    pub(super) refused: u64,
}

/// An engine's KV events as operators see them.
#[derive(Clone, Debug, Serialize)]
pub struct KvEventsView {
    /// Where it publishes.
    pub address: String,
    /// Whether the router is subscribed.
    pub subscribed: bool,
    /// Blocks that it has cached, as far as is known.
    pub blocks: usize,
    /// Tokens of a block, once known.
    pub block_size: usize,
    /// How many batches it has published, as far as is known.
    pub batches: u64,
    /// How often batches were missed for good, so that everything was forgotten.
    pub gaps: u64,
    /// Batches that could not be used.
    pub refused: u64,
}

impl PeerEvents {
    pub(crate) fn of(spec: &PeerSpec) -> Self {
        let parse = |text: &Option<String>| text.as_deref().and_then(EventAddress::parse);
        let Some(address) = parse(&spec.kv_events) else { return Self::default() };
        let replay = parse(&spec.kv_events_replay);
        let ranks = match (spec.dp_rank, spec.dp_size) {
            (Some(rank), _) => rank..rank + 1,
            (None, size) => 0..size.unwrap_or(1),
        };
        let is_one = spec.dp_rank.is_none() && spec.dp_size.is_none();
        let source = |rank: u32| {
            Some(Source {
                address: address.of_rank(rank)?,
                replay: replay.as_ref().and_then(|replay| replay.of_rank(rank)),
                rank: (!is_one).then_some(rank),
                state: RwLock::default(),
            })
        };
        Self { sources: ranks.filter_map(source).collect() }
    }

    /// Whether any of the peer's engines publishes.
    pub(crate) fn is_any(&self) -> bool {
        !self.sources.is_empty()
    }

    /// How many tokens of a prompt are cached, whichever of several engines behind the peer gets it.
    pub(super) fn cached(&self, mut chain: impl FnMut(usize) -> Chain) -> usize {
        let of_one = |source: &Source| match source.state.read().as_ref() {
            Some(known) if known.index.len() > 0 => known.index.cached(&chain(known.index.block_size())),
            _ => 0,
        };
        self.sources.iter().map(of_one).min().unwrap_or(0)
    }

    pub(crate) fn views(&self) -> Vec<KvEventsView> {
        self.sources.iter().map(Source::view).collect()
    }
}

impl Source {
    fn view(&self) -> KvEventsView {
        let state = self.state.read();
        let known = state.as_ref();
        KvEventsView {
            address: self.address.to_string(),
            subscribed: known.is_some(),
            blocks: known.map_or(0, |known| known.index.len()),
            block_size: known.map_or(0, |known| known.index.block_size()),
            batches: known.and_then(|known| known.next).unwrap_or(0),
            gaps: known.map_or(0, |known| known.gaps),
            refused: known.map_or(0, |known| known.refused),
        }
    }
}

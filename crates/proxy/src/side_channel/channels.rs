//! The side channels of one peer: where they are, who answered there last, when to ask again.
//! Pure bookkeeping: asks nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use kv_connector::protocol::params::{Generation, TransferMode};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use super::settings::ReadSideChannels;
use crate::pool::peer::{PeerFault, PeerSpec};

/// Most side channels of one peer: its data-parallel ranks, and some that moved.
const MAX_CHANNELS: usize = 256;

/// Most ranks that an engine is believed to have.
const MAX_RANKS: u64 = 4096;

/// Where a side channel is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChannelAddress {
    /// Without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl ChannelAddress {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Self { host: bare.to_owned(), port }
    }

    /// Reads `host:port`; an IPv6 address stands in brackets.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        (!host.is_empty() && (bracketed || !host.contains([':', '[', ']']))).then(|| Self::new(host, port))
    }
}

impl fmt::Display for ChannelAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// What a hand-off says of its engine's side channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedChannel {
    pub(crate) address: ChannelAddress,
    pub(crate) tp_size: u32,
    pub(crate) pp_size: u32,
    pub(crate) dcp_size: u32,
    pub(crate) mode: Option<TransferMode>,
    /// The generation whose hand-offs have this shape; none where several have.
    pub(crate) shape: Option<Generation>,
}

impl NamedChannel {
    /// The ranks that the engine serves, in order.
    pub(crate) fn ranks(&self) -> Vec<(u32, u32)> {
        ranks(self.pp_size, self.tp_size)
    }
}

/// All ranks of an engine; the first one alone where there cannot be so many.
pub(crate) fn ranks(pp_size: u32, tp_size: u32) -> Vec<(u32, u32)> {
    if u64::from(pp_size) * u64::from(tp_size) > MAX_RANKS {
        return vec![(0, 0)];
    }
    (0..pp_size).flat_map(|pp| (0..tp_size).map(move |tp| (pp, tp))).collect()
}

/// How the last look at a side channel went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SideChannelState {
    /// Not looked at yet.
    #[default]
    Unread,
    /// It answered, and the registry has its engine.
    Read,
    /// It could harm the engine to ask: what it must be asked is not known for sure.
    NotAsked,
    /// No usable answer came.
    Failed,
    /// The engine registers by itself and is not asked.
    RegistersItself,
}

/// The side channels of one peer.
#[derive(Debug, Default)]
pub(crate) struct Channels {
    known: Mutex<BTreeMap<ChannelAddress, Channel>>,
}

#[derive(Clone, Debug, Default)]
struct Channel {
    configured: bool,
    /// Which of the data-parallel engines of the peer it belongs to.
    place: u32,
    /// The newest hand-off's engine and what it said.
    named: Option<(String, NamedChannel)>,
    /// When a hand-off first named that engine here.
    since: Option<Instant>,
    looking: bool,
    /// `None` at once.
    next: Option<Instant>,
    state: SideChannelState,
    dialect: Option<Generation>,
    engine_id: Option<String>,
    ranks: usize,
    read: Option<Instant>,
    read_at: Option<u64>,
    problem: Option<PeerFault>,
}

/// A look at one side channel that is due.
#[derive(Clone, Debug)]
pub(crate) struct Due {
    pub(crate) address: ChannelAddress,
    pub(crate) place: u32,
    pub(crate) named: Option<(String, NamedChannel)>,
    /// The engine that answered last.
    pub(crate) engine_id: Option<String>,
}

/// What a hand-off changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct News {
    /// The side channel has to be looked at.
    pub(crate) ask: bool,
    /// The engine that was there before.
    pub(crate) replaced: Option<String>,
}

/// What a look brought.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Read { engine_id: String, ranks: usize, dialect: Generation },
    RegistersItself,
    NotAsked { reason: String },
    Failed { reason: String },
}

impl Outcome {
    pub(crate) fn state(&self) -> SideChannelState {
        match self {
            Self::Read { .. } => SideChannelState::Read,
            Self::RegistersItself => SideChannelState::RegistersItself,
            Self::NotAsked { .. } => SideChannelState::NotAsked,
            Self::Failed { .. } => SideChannelState::Failed,
        }
    }
}

impl Channels {
    /// Those that the operator named: one port for each data-parallel rank.
    pub(crate) fn of(spec: &PeerSpec) -> Self {
        let mut known = BTreeMap::new();
        if let Some(first) = spec.side_channel.as_deref().and_then(ChannelAddress::parse) {
            let ranks = spec.dp_rank.map_or(0..spec.dp_size.unwrap_or(1), |rank| rank..rank + 1);
            for place in ranks {
                let Some(port) = u16::try_from(place).ok().and_then(|place| first.port.checked_add(place))
                else {
                    break;
                };
                let channel = Channel { configured: true, place, ..Channel::default() };
                known.insert(ChannelAddress { host: first.host.clone(), port }, channel);
            }
        }
        Self { known: Mutex::new(known) }
    }

    /// A hand-off named an engine and its side channel.
    pub(crate) fn named(&self, engine_id: &str, named: &NamedChannel, read: ReadSideChannels) -> News {
        let mut known = self.known.lock();
        // An engine that names itself by the same id at another port is another process of it.
        let moved = take_moved(&mut known, engine_id, named, read);
        let Some(address) = place_of(&mut known, named, read, moved) else { return News::default() };
        let Some(channel) = known.get_mut(&address) else { return News::default() };
        if channel.named.as_ref().is_some_and(|(id, before)| id == engine_id && before == named) {
            return News::default();
        }
        if channel.named.as_ref().is_none_or(|(before, _)| before != engine_id) {
            channel.since = Some(Instant::now());
        }
        channel.named = Some((engine_id.to_owned(), named.clone()));
        channel.next = None;
        let replaced = channel.engine_id.take_if(|before| before != engine_id);
        let moved = moved.map(|_place| engine_id.to_owned());
        News { ask: true, replaced: replaced.or(moved) }
    }

    /// Starts the looks that are due.
    pub(crate) fn due(&self, now: Instant) -> Vec<Due> {
        let mut known = self.known.lock();
        let due = known
            .iter_mut()
            .filter(|(_, channel)| !channel.looking && channel.next.is_none_or(|next| next <= now));
        due.map(|(address, channel)| {
            channel.looking = true;
            // A hand-off that comes while the look is under way makes the next one due.
            channel.next = Some(now + Duration::from_secs(3600));
            Due {
                address: address.clone(),
                place: channel.place,
                named: channel.named.clone(),
                engine_id: channel.engine_id.clone(),
            }
        })
        .collect()
    }

    /// Everything is due as soon as the engine is back.
    pub(crate) fn look_again(&self) {
        self.known.lock().values_mut().for_each(|channel| channel.next = None);
    }

    /// A look has ended; whether it went otherwise than the one before.
    pub(crate) fn looked(
        &self,
        address: &ChannelAddress,
        outcome: Outcome,
        now: Instant,
        next: Instant,
    ) -> bool {
        let mut known = self.known.lock();
        let Some(channel) = known.get_mut(address) else { return false };
        channel.looking = false;
        if channel.next.is_some() {
            channel.next = Some(next);
        }
        let before = (std::mem::replace(&mut channel.state, outcome.state()), channel.engine_id.clone());
        match outcome {
            Outcome::Read { engine_id, ranks, dialect } => {
                channel.engine_id = Some(engine_id);
                (channel.ranks, channel.dialect) = (ranks, Some(dialect));
                (channel.read, channel.problem) = (Some(now), None);
                channel.read_at = Some(PeerFault::now("").at);
            }
            Outcome::RegistersItself => channel.problem = None,
            Outcome::NotAsked { reason } | Outcome::Failed { reason } => {
                channel.problem = Some(PeerFault::now(reason));
            }
        }
        before != (channel.state, channel.engine_id.clone())
    }

    /// Forgets a learnt side channel that answers no more while hand-offs have begun to name another
    /// one since: the engine has moved. The engine that was there.
    pub(crate) fn forget_if_moved(&self, address: &ChannelAddress) -> Option<String> {
        let mut known = self.known.lock();
        let channel = known.get(address).filter(|channel| !channel.configured)?;
        let read = channel.read?;
        let moved = known
            .iter()
            .any(|(other, channel)| other != address && channel.since.is_some_and(|since| since > read));
        if moved { known.remove(address)?.engine_id } else { None }
    }

    /// Whether another side channel of the peer leads to the same engine.
    pub(crate) fn is_elsewhere(&self, engine_id: &str, address: &ChannelAddress) -> bool {
        let known = self.known.lock();
        known
            .iter()
            .any(|(other, channel)| other != address && channel.engine_id.as_deref() == Some(engine_id))
    }

    /// The engines that answered.
    pub(crate) fn engine_ids(&self) -> BTreeSet<String> {
        self.known.lock().values().filter_map(|channel| channel.engine_id.clone()).collect()
    }

    pub(crate) fn views(&self) -> Vec<SideChannelView> {
        let known = self.known.lock();
        known.iter().map(|(address, channel)| SideChannelView::of(address, channel)).collect()
    }
}

/// Forgets the learnt side channel that an engine had at another port before; the engine's place.
fn take_moved(
    known: &mut BTreeMap<ChannelAddress, Channel>,
    engine_id: &str,
    named: &NamedChannel,
    read: ReadSideChannels,
) -> Option<u32> {
    if read != ReadSideChannels::Auto || known.contains_key(&named.address) {
        return None;
    }
    let is_former = |(address, channel): &(&ChannelAddress, &Channel)| {
        let names_it = channel.named.as_ref().is_some_and(|(id, _)| id == engine_id);
        let had_it = channel.engine_id.as_deref() == Some(engine_id);
        // At the same port, the hosts may be two names of one.
        !channel.configured && address.port != named.address.port && (names_it || had_it)
    };
    let former = known.iter().find(is_former).map(|(address, _)| address.clone())?;
    known.remove(&former).map(|channel| channel.place)
}

/// The channel that a hand-off means, made if it may be learnt. An operator's word on the same port
/// stands for it: the hosts may be two names of one.
fn place_of(
    known: &mut BTreeMap<ChannelAddress, Channel>,
    named: &NamedChannel,
    read: ReadSideChannels,
    place: Option<u32>,
) -> Option<ChannelAddress> {
    if known.contains_key(&named.address) {
        return Some(named.address.clone());
    }
    let port = named.address.port;
    if let Some((address, _)) = known.iter().find(|(at, channel)| channel.configured && at.port == port) {
        return Some(address.clone());
    }
    if read != ReadSideChannels::Auto {
        return None;
    }
    if known.len() >= MAX_CHANNELS {
        known.retain(|_, channel| channel.configured || channel.looking || channel.engine_id.is_some());
    }
    if known.len() >= MAX_CHANNELS {
        return None;
    }
    let places: BTreeSet<u32> = known.values().map(|channel| channel.place).collect();
    let place = place.or_else(|| (0..).find(|place| !places.contains(place)))?;
    known.insert(named.address.clone(), Channel { place, ..Channel::default() });
    Some(named.address.clone())
}

/// A side channel as operators see it.
#[derive(Clone, Debug, Serialize)]
pub struct SideChannelView {
    /// `host:port`
    pub address: String,
    /// Whether the settings name it; else a hand-off did.
    pub configured: bool,
    /// How the last look went.
    pub state: SideChannelState,
    /// The generation in which it was asked.
    pub generation: Option<Generation>,
    /// The engine that answered.
    pub engine_id: Option<String>,
    /// How many of its ranks the registry has.
    pub ranks: usize,
    /// Unix time of the last good look, in seconds.
    pub read_at: Option<u64>,
    /// Why the last look brought nothing.
    pub problem: Option<PeerFault>,
}

impl SideChannelView {
    fn of(address: &ChannelAddress, channel: &Channel) -> Self {
        Self {
            address: address.to_string(),
            configured: channel.configured,
            state: channel.state,
            generation: channel.dialect,
            engine_id: channel.engine_id.clone(),
            ranks: channel.ranks,
            read_at: channel.read_at,
            problem: channel.problem.clone(),
        }
    }
}

#[cfg(test)]
mod tests;

//! What routing knows of one peer from the router's own requests: what waits there, and how fast it was. Counted
//! without a common lock.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use foldhash::fast::RandomState;
use parking_lot::RwLock;
use tokio::time::Instant;

use super::PeerKey;
use super::rates::{Date, Dated, Learnt, Rate};
use super::score::{DecodeFacts, PairFacts, PrefillFacts};
use super::settings::RoutingSettings;
use crate::pool::peer::Peer;

/// Most partners of which a decode peer remembers the rate.
const MOST_PARTNERS: usize = 512;

/// Bytes of a prompt's JSON for a token, until some are counted.
const BYTES_PER_TOKEN: f64 = 4.0;

static NEXT_KEY: AtomicU32 = AtomicU32::new(0);

/// One peer's facts.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) key: PeerKey,
    /// Prompt tokens that were sent to it and not answered.
    waiting_tokens: AtomicU64,
    /// Prompt tokens to seconds.
    prefill: Learnt,
    /// Bytes of KV for a prompt token; not a number while it is not known.
    token_bytes: AtomicU64,
    /// By prefill partner, bytes to seconds.
    partners: RwLock<HashMap<PeerKey, Dated, RandomState>>,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            key: PeerKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed)),
            waiting_tokens: AtomicU64::new(0),
            prefill: Learnt::default(),
            token_bytes: AtomicU64::new(f64::NAN.to_bits()),
            partners: RwLock::default(),
        }
    }
}

impl Facts {
    /// Tokens more wait there.
    pub(crate) fn enter(&self, tokens: u64) {
        self.waiting_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self, tokens: u64) {
        self.waiting_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }

    pub(crate) fn waiting_tokens(&self) -> u64 {
        self.waiting_tokens.load(Ordering::Relaxed)
    }

    /// A prompt was computed, behind others: so many tokens in all took so long.
    pub(crate) fn prefilled(&self, tokens: u64, took: Duration, now: Instant) {
        self.prefill.learn(tokens as f64, took.as_secs_f64(), Date::of(now));
    }

    /// A prompt of so many tokens has so many bytes of KV.
    pub(crate) fn handed_off(&self, tokens: u64, bytes: u64) {
        if tokens > 0 && bytes > 0 {
            self.token_bytes.store((bytes as f64 / tokens as f64).to_bits(), Ordering::Relaxed);
        }
    }

    /// This decode peer has read so many bytes from that prefill peer in so long.
    pub(crate) fn moved(&self, prefill: PeerKey, bytes: u64, took: Duration, now: Instant) {
        let mut partners = self.partners.write();
        if partners.len() >= MOST_PARTNERS && !partners.contains_key(&prefill) {
            partners.clear();
        }
        partners.entry(prefill).or_default().learn(bytes as f64, took.as_secs_f64(), Date::of(now));
    }

    fn rate_from(&self, prefill: PeerKey, now: Date) -> Option<Rate> {
        self.partners.read().get(&prefill)?.rate(now)
    }

    fn token_bytes(&self) -> Option<f64> {
        let bytes = f64::from_bits(self.token_bytes.load(Ordering::Relaxed));
        (!bytes.is_nan()).then_some(bytes)
    }
}

/// How much a reading counts after so long.
fn freshness(age: Duration, half_life: Duration) -> f64 {
    0.5_f64.powf(age.as_secs_f64() / half_life.as_secs_f64().max(1e-3))
}

/// What is known of a prefill peer; `cached` are the prompt tokens that it probably has.
pub(crate) fn of_prefill(
    peer: &Peer,
    cached: f64,
    settings: &RoutingSettings,
    (now, date): (Instant, Date),
) -> PrefillFacts {
    let load = peer.load.load();
    let others = load.as_ref().map_or(0.0, |load| {
        let more = (load.running + load.waiting).saturating_sub(load.ours);
        more as f64 * freshness(now.saturating_duration_since(load.at), settings.reading_half_life)
    });
    PrefillFacts {
        waiting_tokens: peer.routing.waiting_tokens() as f64,
        others,
        cached_tokens: cached,
        rate: peer.routing.prefill.rate(date),
        share: peer.health.share(now),
    }
}

/// What is known of a decode peer.
pub(crate) fn of_decode(peer: &Peer, settings: &RoutingSettings, now: Instant) -> DecodeFacts {
    let load = peer.load.load();
    let fresh = load
        .as_ref()
        .map_or(0.0, |load| freshness(now.saturating_duration_since(load.at), settings.reading_half_life));
    let of = |number: fn(&crate::pool::load::EngineLoad) -> u64| {
        load.as_ref().map_or(0.0, |load| number(load) as f64 * fresh)
    };
    DecodeFacts {
        prompt_tokens: peer.routing.waiting_tokens() as f64,
        sequences: peer.in_flight() as f64,
        others: of(|load| (load.running + load.waiting).saturating_sub(load.ours)),
        waiting: of(|load| load.waiting),
        kv_usage: load.as_ref().and_then(|load| load.kv_usage),
        freshness: fresh,
        share: peer.health.share(now),
    }
}

/// What is known of a pair for a prompt of so many tokens.
pub(crate) fn of_pair(
    prefill: &Peer,
    decode: &Peer,
    tokens: f64,
    settings: &RoutingSettings,
    now: Date,
) -> PairFacts {
    PairFacts {
        bytes: prefill.routing.token_bytes().map(|each| each * tokens),
        rate: decode.routing.rate_from(prefill.routing.key, now),
        distance: distance(prefill, decode, settings),
    }
}

/// What it costs that two peers differ in labels that both have.
fn distance(prefill: &Peer, decode: &Peer, settings: &RoutingSettings) -> f64 {
    let differs = |label: &str| {
        let (one, other) = (prefill.spec.labels.get(label), decode.spec.labels.get(label));
        one.zip(other).is_some_and(|(one, other)| one != other)
    };
    let costs = settings.locality.iter().filter(|cost| differs(&cost.label));
    costs.map(|cost| cost.cost.as_secs_f64()).sum()
}

/// A prompt that a prefill engine has computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Computed {
    pub(crate) prompt_bytes: usize,
    pub(crate) tokens: u64,
    /// Tokens of it that were not computed.
    pub(crate) cached: u64,
    /// Tokens that waited there when it was sent, with its own as they were estimated.
    pub(crate) waiting: u64,
    pub(crate) took: Duration,
    /// Of its blocks; zero where that is not known.
    pub(crate) kv_bytes: u64,
}

impl Computed {
    /// Keeps what it says of the engine, and of the length of tokens.
    pub(crate) fn learnt_of(&self, peer: &Peer, size: &TokenSize, now: Instant) {
        let estimated = size.tokens(self.prompt_bytes) as u64;
        size.learn(self.prompt_bytes, self.tokens);
        let uncached = self.tokens.saturating_sub(self.cached);
        let ahead = self.waiting.saturating_sub(estimated);
        if uncached > 0 {
            peer.routing.prefilled(ahead + uncached, self.took, now);
        }
        peer.routing.handed_off(self.tokens, self.kv_bytes);
    }
}

/// How many bytes of a prompt's JSON make a token, as engines have counted of late.
#[derive(Debug)]
pub(crate) struct TokenSize(AtomicU64);

impl Default for TokenSize {
    fn default() -> Self {
        Self(AtomicU64::new(BYTES_PER_TOKEN.to_bits()))
    }
}

impl TokenSize {
    /// The bytes of a token.
    pub(crate) fn bytes(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    /// The tokens of a prompt of so many bytes.
    pub(crate) fn tokens(&self, bytes: usize) -> f64 {
        bytes as f64 / self.bytes()
    }

    /// An engine has counted; what two threads count in the same moment may be counted once.
    pub(crate) fn learn(&self, bytes: usize, tokens: u64) {
        if bytes > 0 && tokens > 0 {
            let before = self.bytes();
            let seen = (bytes as f64 / tokens as f64).clamp(0.25, 64.0);
            self.0.store((before * 0.95 + seen * 0.05).to_bits(), Ordering::Relaxed);
        }
    }
}

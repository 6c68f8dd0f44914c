//! The choice of both engines of a request at once, or of one for the other. Looks only; what it returns has been
//! let in.

use std::sync::Arc;

use tokio::time::Instant;

use super::candidates::{Asked, Seat, Wanted};
use super::decide::{self, Stays};
use super::facts;
use super::pick::{Candidate, Keyed, most_alike, pick};
use super::rates::Date;
use super::roster::Roster;
use super::score::{self, Ask, Cost, DecodeFacts, PairFacts, PrefillFacts, Weights};
use super::settings::{Disaggregation, Policy};
use crate::error::{ProxyError, Stage};
use crate::pool::Pool;
use crate::pool::peer::{InFlight, Peer};

/// How often a choice is made anew because somebody else took a peer's last trial or closed it meanwhile.
const TRIES: usize = 8;

/// The engines that a request was let in to.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) decode: InFlight,
    /// None where the decode engine had better compute the prompt.
    pub(crate) prefill: Option<InFlight>,
    pub(crate) stays: Option<Stays>,
    /// What the pair is expected to cost.
    pub(crate) cost: Cost,
}

/// A pair that can hand off, by places among the seats.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored {
    pub(super) prefill: usize,
    pub(super) decode: usize,
    pub(super) cost: Cost,
    pub(super) total: f64,
}

/// The seats of both stages, with what is known of each.
pub(super) struct Table<'a> {
    pub(super) prefill: Vec<(Seat<'a>, PrefillFacts)>,
    pub(super) decode: Vec<(Seat<'a>, DecodeFacts)>,
    pub(super) pairs: Vec<Scored>,
    weights: Weights,
}

impl Table<'_> {
    fn tier(&self, pair: &Scored) -> (u8, u8) {
        (self.decode[pair.decode].0.tier(), self.prefill[pair.prefill].0.tier())
    }

    fn load(&self, pair: &Scored) -> u64 {
        self.decode[pair.decode].0.load.saturating_add(self.prefill[pair.prefill].0.load)
    }
}

impl Pool {
    /// All pairs of the peers that could have a request, with their costs.
    pub(super) fn table<'a>(&self, wanted: &Wanted<'_>, roster: &'a Roster, now: Instant) -> Table<'a> {
        let (settings, date) = (wanted.settings, Date::of(now));
        let weights = settings.weights();
        let seats = self.seats(Stage::Decode, wanted, roster, now);
        let decode: Vec<_> =
            seats.into_iter().map(|seat| (seat, facts::of_decode(seat.peer, settings, now))).collect();
        let seats = self.seats(Stage::Prefill, wanted, roster, now);
        let of_prefill = |seat: Seat<'a>| {
            (seat, facts::of_prefill(seat.peer, wanted.cached(seat.peer), settings, (now, date)))
        };
        let prefill: Vec<_> = seats.into_iter().map(of_prefill).collect();
        let ask = Ask { prompt_tokens: wanted.prompt_tokens };
        let mut pairs = Vec::with_capacity(prefill.len() * decode.len());
        let matrix = self.matrix();
        for (d, (of_decode, d_facts)) in decode.iter().enumerate() {
            for (p, (of_prefill, p_facts)) in prefill.iter().enumerate() {
                if !self.fits_by(&matrix, of_prefill.peer, of_decode.peer) {
                    continue;
                }
                let between =
                    facts::of_pair(of_prefill.peer, of_decode.peer, wanted.prompt_tokens, settings, date);
                let cost = score::cost(&ask, p_facts, d_facts, &between, &weights);
                pairs.push(Scored { prefill: p, decode: d, cost, total: cost.total() });
            }
        }
        Table { prefill, decode, pairs, weights }
    }

    /// The best pair of a table by the policies of the request's model; its place among the pairs.
    pub(super) fn best(&self, table: &Table<'_>, wanted: &Wanted<'_>, roster: &Roster) -> Option<Scored> {
        let first_tier = table.pairs.iter().map(|pair| table.tier(pair)).min()?;
        let mut left: Vec<Scored> =
            table.pairs.iter().filter(|pair| table.tier(pair) == first_tier).copied().collect();
        let [of_prefill, of_decode] = wanted.policies;
        if of_decode != Policy::Joint {
            let place = self.named(Stage::Decode, of_decode, table, &left, wanted, roster)?;
            left.retain(|pair| pair.decode == place);
        }
        if of_prefill != Policy::Joint {
            let place = self.named(Stage::Prefill, of_prefill, table, &left, wanted, roster)?;
            left.retain(|pair| pair.prefill == place);
        }
        let most = most_alike(left.iter().map(|pair| pair.total));
        left.into_iter().filter(|pair| pair.total <= most).min_by_key(|pair| table.load(pair))
    }

    /// Whom the policy of one stage takes out of the pairs that are left, by its place among the seats.
    fn named(
        &self,
        stage: Stage,
        policy: Policy,
        table: &Table<'_>,
        left: &[Scored],
        wanted: &Wanted<'_>,
        roster: &Roster,
    ) -> Option<usize> {
        let mut places: Vec<usize> = Vec::with_capacity(left.len());
        let mut among: Vec<Candidate> = Vec::with_capacity(left.len());
        let seats = match stage {
            Stage::Prefill => table.prefill.len(),
            Stage::Decode => table.decode.len(),
        };
        for place in 0..seats {
            let of_place = |pair: &&Scored| match stage {
                Stage::Prefill => pair.prefill == place,
                Stage::Decode => pair.decode == place,
            };
            let Some(pair) = left.iter().find(of_place) else { continue };
            let (seat, cost) = match stage {
                Stage::Prefill => (&table.prefill[place].0, pair.cost.of_prefill()),
                Stage::Decode => (&table.decode[place].0, pair.cost.decode_queue + pair.cost.decode_memory),
            };
            places.push(place);
            among.push(Candidate { key: seat.peer.routing.key, load: seat.load, cost });
        }
        let taken = self.taken(stage, policy, &among, wanted, roster)?;
        places.get(taken).copied()
    }

    fn taken(
        &self,
        stage: Stage,
        policy: Policy,
        among: &[Candidate],
        wanted: &Wanted<'_>,
        roster: &Roster,
    ) -> Option<usize> {
        let key = self.key_of(stage, wanted);
        let keyed = key.is_some().then(|| Keyed {
            ring: roster.ring(stage),
            total: roster.snapshot.of(stage).iter().map(|peer| peer.in_flight() as u64).sum(),
            factor: wanted.settings.load_factor,
            key,
        });
        pick(policy, among, keyed.as_ref(), |count| self.surroundings.below(count))
    }

    /// A pair for a request, if there is one that can hand off. Whether the decode engine alone had better have it
    /// is part of the choice.
    pub(crate) fn choose_pair(&self, wanted: &Wanted<'_>, rule: &Disaggregation) -> Option<Chosen> {
        let roster = self.roster();
        for _ in 0..TRIES {
            let table = self.table(wanted, &roster, self.surroundings.now());
            let best = self.best(&table, wanted, &roster)?;
            let (d, d_facts) = &table.decode[best.decode];
            let (p, p_facts) = &table.prefill[best.prefill];
            let ask = Ask { prompt_tokens: wanted.prompt_tokens };
            let cached = wanted.cached(d.peer);
            let stays = decide::stays(rule, &ask, &best.cost, (p_facts, d_facts), cached, &table.weights);
            let Some(mut decode) = let_in(d) else { continue };
            let prefill = match stays {
                Some(_) => {
                    decode = decode.with_prompt((wanted.prompt_tokens - cached).max(0.0));
                    None
                }
                None => match let_in(p) {
                    Some(prefill) => Some(prefill.with_prompt(wanted.prompt_tokens)),
                    None => continue,
                },
            };
            return Some(Chosen { decode, prefill, stays, cost: best.cost });
        }
        None
    }

    /// One peer of a stage that fits, by that stage's policy; with a `partner`, what the pair would cost counts.
    ///
    /// # Errors
    /// As [`Pool::choose`].
    pub(crate) fn choose_one(
        &self,
        stage: Stage,
        wanted: &Wanted<'_>,
        partner: Option<&Peer>,
        fits: impl Fn(&Peer) -> bool,
    ) -> Result<InFlight, ProxyError> {
        let roster = self.roster();
        let settings = wanted.settings;
        let (ask, weights) = (Ask { prompt_tokens: wanted.prompt_tokens }, settings.weights());
        let policy = wanted.policies[stage as usize];
        // With a partner the cheapest one is what the joint choice would take.
        let policy =
            if policy == Policy::Joint && partner.is_some() { Policy::PrefixAffinity } else { policy };
        for _ in 0..TRIES {
            let now = self.surroundings.now();
            let date = Date::of(now);
            let mut seats = self.seats(stage, wanted, &roster, now);
            seats.retain(|seat| fits(seat.peer));
            let Some(first_tier) = seats.iter().map(Seat::tier).min() else { break };
            seats.retain(|seat| seat.tier() == first_tier);
            let cost = |peer: &Peer| match (stage, partner) {
                (Stage::Prefill, Some(decode)) => {
                    let p = facts::of_prefill(peer, wanted.cached(peer), settings, (now, date));
                    let between = facts::of_pair(peer, decode, wanted.prompt_tokens, settings, date);
                    score::cost(&ask, &p, &facts::of_decode(decode, settings, now), &between, &weights)
                        .total()
                }
                (Stage::Prefill, None) => 0.0,
                (Stage::Decode, _) => {
                    let d = facts::of_decode(peer, settings, now);
                    score::cost(&ask, &NOBODY, &d, &NOWHERE, &weights).total()
                }
            };
            let among: Vec<Candidate> = seats
                .iter()
                .map(|seat| Candidate { key: seat.peer.routing.key, load: seat.load, cost: cost(seat.peer) })
                .collect();
            let Some(taken) = self.taken(stage, policy, &among, wanted, &roster) else { break };
            if let Some(entered) = let_in(&seats[taken]) {
                let prompt = if stage == Stage::Prefill { wanted.prompt_tokens } else { 0.0 };
                return Ok(entered.with_prompt(prompt));
            }
        }
        self.choose(stage, wanted.model, wanted.tried[stage as usize], fits)
    }
}

impl Pool {
    /// The least busy open peer of a stage that fits and lists the model. When no fitting peer lists
    /// it and some have not told what they serve, any fitting one: the engine answers in its own words whether it
    /// has the model.
    ///
    /// `tried` are those that have failed this request already.
    ///
    /// # Errors
    /// [`ProxyError::NoPeer`] when none is open, [`ProxyError::NoCompatiblePair`] when none of those
    /// that are open fits.
    pub(crate) fn choose(
        &self,
        stage: Stage,
        model: Option<&str>,
        tried: &[Arc<Peer>],
        fits: impl Fn(&Peer) -> bool,
    ) -> Result<InFlight, ProxyError> {
        let roster = self.roster();
        let must_list = model.is_some_and(|model| roster.must_list(stage, model));
        let asked = Asked { model, endpoint: None, tried, must_list: false, share: None };
        loop {
            let mut seats = self.all_seats(stage, &asked, &roster, self.turn(stage), self.surroundings.now());
            if seats.is_empty() {
                return Err(ProxyError::NoPeer(stage));
            }
            seats.retain(|seat| fits(seat.peer) && (seat.serves || !must_list));
            let best = seats.iter().min_by_key(|seat| (seat.tier(), seat.load));
            if let Some(entered) = let_in(best.ok_or(ProxyError::NoCompatiblePair)?) {
                return Ok(entered);
            }
        }
    }
}

const NOBODY: PrefillFacts =
    PrefillFacts { waiting_tokens: 0.0, others: 0.0, cached_tokens: 0.0, rate: None, share: 1.0 };
const NOWHERE: PairFacts = PairFacts { bytes: None, rate: None, distance: 0.0 };

/// Steps in, unless the breaker has shut or somebody has closed the peer meanwhile.
fn let_in(seat: &Seat<'_>) -> Option<InFlight> {
    let peer: &Arc<Peer> = seat.peer;
    let entered = if seat.sound { peer.try_enter()? } else { peer.enter() };
    // Whoever closed it between the look and the step in may not have seen this.
    entered.peer.standing.is_open().then_some(entered)
}

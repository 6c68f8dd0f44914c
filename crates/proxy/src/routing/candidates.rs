//! Which peers of a stage are looked at for one choice, and how well each of them would do. Locks only what belongs
//! to the peers that are looked at.

use std::sync::Arc;

use tokio::time::Instant;

use super::lately::{self, Found};
use super::prefix::Matched;
use super::roster::{FEW, Roster};
use super::settings::{Policy, RoutingSettings};
use crate::error::Stage;
use crate::pool::Pool;
use crate::pool::peer::Peer;
use crate::request::Endpoint;

/// How many of many peers are drawn.
const DRAWN: usize = 1;

/// How often it is drawn at most: some of those that are drawn are not open.
const DRAWS: usize = 4 * DRAWN;

/// One request of so many asks the next in turn even where somebody served well of late: else a fleet that has little
/// to do would never hear of most of its engines. Seldom enough that the handshakes of pairs that meet then stay above
/// the 99th percentile.
const EXPLORES: usize = 256;

/// How much of a prompt the policy `consistent_hash` goes by, in bytes.
const BEGINNING: usize = 1024;

/// What the policy `consistent_hash` goes by.
pub(crate) fn beginning(prompt: &[u8]) -> &[u8] {
    &prompt[..prompt.len().min(BEGINNING)]
}

/// What one request wants of the fleet.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) model: Option<&'a str>,
    pub(crate) endpoint: Endpoint,
    /// Tokens of its prompt, as far as can be estimated.
    pub(crate) prompt_tokens: f64,
    pub(crate) settings: &'a RoutingSettings,
    /// How its prefill and its decode engine are chosen.
    pub(crate) policies: [Policy; 2],
    /// The value of the session header.
    pub(crate) session: Option<&'a [u8]>,
    /// The prompt's beginning.
    pub(crate) beginning: &'a [u8],
    /// Who has probably cached how many bytes of its prompt.
    pub(crate) seen: Matched,
    /// How many bytes make a token.
    pub(crate) token_bytes: f64,
    /// Those that have failed it already, by stage.
    pub(crate) tried: [&'a [Arc<Peer>]; 2],
}

/// Whom a request asks of one stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) model: Option<&'a str>,
    /// Where a prefill engine must hand off, if that matters.
    pub(crate) endpoint: Option<Endpoint>,
    /// Those that have failed it already.
    pub(crate) tried: &'a [Arc<Peer>],
    /// Whether only peers that list the model can have it.
    pub(crate) must_list: bool,
    /// Those that should have it, where not all should.
    pub(crate) share: Option<&'a [Arc<Peer>]>,
}

impl<'a> Wanted<'a> {
    fn asked<'b>(&self, stage: Stage, roster: &'b Roster) -> Asked<'b>
    where
        'a: 'b,
    {
        Asked {
            model: self.model,
            endpoint: Some(self.endpoint),
            tried: self.tried[stage as usize],
            must_list: self.model.is_some_and(|model| roster.must_list(stage, model)),
            share: roster.share(stage, self.model),
        }
    }

    /// Prompt tokens that a peer probably has cached.
    pub(crate) fn cached(&self, peer: &Peer) -> f64 {
        self.seen.of(peer.routing.key) as f64 / self.token_bytes
    }
}

/// One peer that could have the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seat<'a> {
    pub(crate) peer: &'a Arc<Peer>,
    /// Whether nothing speaks against its health; an unsound one is asked where there is no other.
    pub(crate) sound: bool,
    /// Whether it lists the model.
    pub(crate) serves: bool,
    pub(crate) load: u64,
}

impl Seat<'_> {
    /// Peers of a lower tier come first, however busy they are.
    pub(crate) const fn tier(&self) -> u8 {
        (!self.serves as u8) * 2 + (!self.sound) as u8
    }
}

impl Pool {
    /// The peers of a stage that could have a request, in the order of their turns.
    pub(crate) fn seats<'a>(
        &self,
        stage: Stage,
        wanted: &Wanted<'_>,
        roster: &'a Roster,
        now: Instant,
    ) -> Vec<Seat<'a>> {
        let all = roster.snapshot.of(stage);
        let turn = self.turn(stage);
        if all.len() > FEW {
            let few = self.drawn(stage, wanted, roster, turn, now);
            let sound = few.iter().filter(|seat| seat.sound).count();
            if !few.is_empty() && sound as f64 >= self.breaker_floor() * few.len() as f64 {
                return few;
            }
        }
        self.all_seats(stage, &wanted.asked(stage, roster), roster, turn, now)
    }

    /// All of them, however many there are.
    pub(crate) fn all_seats<'a>(
        &self,
        stage: Stage,
        asked: &Asked<'_>,
        roster: &'a Roster,
        turn: usize,
        now: Instant,
    ) -> Vec<Seat<'a>> {
        let all = roster.snapshot.of(stage);
        let start = if all.is_empty() { 0 } else { turn % all.len() };
        let turned = all[start..].iter().chain(&all[..start]);
        let mut seats: Vec<Seat<'a>> = turned.filter_map(|peer| seat(stage, peer, asked, now)).collect();
        if let Some(share) = asked.share {
            let is_in = |seat: &Seat<'_>| share.iter().any(|peer| Arc::ptr_eq(peer, seat.peer));
            // Where none of those can have it that should, others do.
            if seats.iter().any(|seat| seat.sound && is_in(seat)) {
                seats.retain(is_in);
            }
        }
        let sound = seats.iter().filter(|seat| seat.sound).count();
        // Where so many fail, the cause is hardly theirs, and the others could not carry it all.
        if (sound as f64) < self.breaker_floor() * seats.len() as f64 {
            seats.iter_mut().for_each(|seat| seat.sound = false);
        }
        seats
    }

    /// Some of many: who has just become idle, or else the next in turn and some by chance; and whom a key or a cached
    /// prompt names.
    fn drawn<'a>(
        &self,
        stage: Stage,
        wanted: &Wanted<'_>,
        roster: &'a Roster,
        turn: usize,
        now: Instant,
    ) -> Vec<Seat<'a>> {
        let all = roster.snapshot.of(stage);
        let serving = wanted.model.map_or(&[][..], |model| roster.serving(stage, model));
        let asked = wanted.asked(stage, roster);
        let from = match roster.share(stage, wanted.model) {
            Some(share) => share,
            None if serving.is_empty() => all,
            None => serving,
        };
        let mut seats: Vec<Seat<'a>> = Vec::with_capacity(DRAWN + FEW);
        let add = |peer: &'a Arc<Peer>, seats: &mut Vec<Seat<'a>>| {
            if !seats.iter().any(|seat| Arc::ptr_eq(seat.peer, peer)) {
                seats.extend(seat(stage, peer, &asked, now));
            }
        };
        // Who may have it at all shows where a peer takes its seat.
        let keyed = |key| {
            let peer = roster.peer(stage, key)?;
            let is_asked = asked.share.is_none_or(|share| share.iter().any(|other| Arc::ptr_eq(other, peer)));
            is_asked.then_some(peer)
        };
        let by_cost = wanted.policies[stage as usize].goes_by_cache();
        let explores = by_cost && turn.is_multiple_of(EXPLORES);
        // Those that explore come to everyone.
        let turn = if explores { turn / EXPLORES } else { turn };
        if by_cost && !explores {
            lately::last(stage, 1 + DRAWN, &mut seats, |key| match keyed(key) {
                Some(peer) if peer.in_flight() == 0 => match seat(stage, peer, &asked, now) {
                    Some(seat) if seat.tier() == 0 => Found::It(seat),
                    _ => Found::OfOthers,
                },
                None if roster.peer(stage, key).is_some() => Found::OfOthers,
                _ => Found::NoMore,
            });
        }
        let lately = seats.len();
        for step in 0..FEW.min(from.len()) {
            if !seats.is_empty() {
                break;
            }
            add(&from[(turn + step) % from.len()], &mut seats);
        }
        for (key, _) in wanted.seen.peers() {
            if let Some(peer) = keyed(key) {
                add(peer, &mut seats);
            }
        }
        if let Some(key) = self.key_of(stage, wanted) {
            // Whoever cannot have the request gives way to the next on the ring, the same for each request.
            let wanted_seats = seats.len() + 2;
            for key in roster.ring(stage).walk(key).take(64) {
                if let Some(peer) = keyed(key) {
                    add(peer, &mut seats);
                }
                if seats.len() >= wanted_seats {
                    break;
                }
            }
        }
        let mut drawn = lately.saturating_sub(1);
        for _ in 0..DRAWS {
            if drawn >= DRAWN {
                break;
            }
            let before = seats.len();
            add(&from[self.surroundings.below(from.len())], &mut seats);
            drawn += seats.len() - before;
        }
        seats
    }

    /// What a request is known by to a stage's policy, if that goes by a key.
    pub(crate) fn key_of<'a>(&self, stage: Stage, wanted: &Wanted<'a>) -> Option<&'a [u8]> {
        match wanted.policies[stage as usize] {
            Policy::Session => wanted.session,
            Policy::ConsistentHash => Some(wanted.beginning),
            _ => None,
        }
    }
}

fn seat<'a>(stage: Stage, peer: &'a Arc<Peer>, asked: &Asked<'_>, now: Instant) -> Option<Seat<'a>> {
    let has_failed = || asked.tried.iter().any(|other| Arc::ptr_eq(other, peer));
    if !peer.is_open() || !peer.may_have(asked.model) || has_failed() {
        return None;
    }
    if stage == Stage::Prefill && asked.endpoint.is_some_and(|endpoint| !peer.hands_off_on(endpoint)) {
        return None;
    }
    let serves = asked.model.is_none_or(|model| peer.serves(model));
    if asked.must_list && !serves {
        return None;
    }
    let (sound, load) = peer.health.look(peer.in_flight(), now);
    Some(Seat { peer, sound, serves, load })
}

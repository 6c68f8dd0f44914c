//! The steps of one request as they are kept: small, since thousands of them are written one after the other, each where
//! the processor's caches hold nothing of it any more. Peers and reasons stand beside them, once each.

use std::sync::Arc;

use super::{About, Step};

/// Most steps that are kept of one request; what comes after them is counted.
pub(super) const MOST_STEPS: usize = 64;

/// Steps for which room is taken at once: a request without retries has no more.
const USUAL_STEPS: usize = 14;

/// The same of peers.
const USUAL_PEERS: usize = 2;

/// A place in one of the lists beside the steps, which are not longer than these.
type Place = u8;

/// One step.
#[derive(Clone, Copy, Debug)]
struct Event {
    /// Microseconds since the request came.
    at: u64,
    step: Step<Place>,
    peer: Option<Place>,
}

/// What happened to one request.
#[derive(Debug, Default)]
pub(super) struct Track {
    events: Vec<Event>,
    peers: Vec<Arc<str>>,
    reasons: Vec<&'static str>,
    left_out: u32,
    pub(super) about: Option<About>,
}

/// A step as it was told.
#[derive(Debug)]
pub(super) struct Told<'a> {
    /// Microseconds since the request came.
    pub(super) at: u64,
    pub(super) step: Step,
    pub(super) peer: Option<&'a Arc<str>>,
}

impl Track {
    /// Something happened, perhaps with a peer.
    pub(super) fn add(&mut self, at: u64, step: Step, peer: Option<&Arc<str>>) {
        if self.events.len() == MOST_STEPS {
            self.left_out += 1;
            return;
        }
        if self.events.capacity() == 0 {
            self.events.reserve_exact(USUAL_STEPS);
        }
        let peer = peer.map(|peer| {
            let known = self.peers.iter().position(|known| Arc::ptr_eq(known, peer));
            let place = known.unwrap_or_else(|| {
                if self.peers.capacity() == 0 {
                    self.peers.reserve_exact(USUAL_PEERS);
                }
                self.peers.push(Arc::clone(peer));
                self.peers.len() - 1
            });
            place as Place
        });
        let step = step.because(|reason| {
            self.reasons.push(reason);
            (self.reasons.len() - 1) as Place
        });
        self.events.push(Event { at, step, peer });
    }

    /// All that is kept, in order.
    pub(super) fn told(&self) -> impl DoubleEndedIterator<Item = Told<'_>> {
        self.events.iter().map(|event| Told {
            at: event.at,
            step: event.step.because(|place| self.reasons[usize::from(place)]),
            peer: event.peer.map(|place| &self.peers[usize::from(place)]),
        })
    }

    /// How many steps found no room.
    pub(super) const fn left_out(&self) -> u32 {
        self.left_out
    }
}

impl<Why> Step<Why> {
    /// The same step with its reason told otherwise.
    fn because<Other>(self, tell: impl FnOnce(Why) -> Other) -> Step<Other> {
        match self {
            Self::PrefillFailed(why) => Step::PrefillFailed(tell(why)),
            Self::HandOffRefused(why) => Step::HandOffRefused(tell(why)),
            Self::Bypassed(why) => Step::Bypassed(tell(why)),
            Self::DecodeFailed(why) => Step::DecodeFailed(tell(why)),
            Self::Received => Step::Received,
            Self::Read => Step::Read,
            Self::Admitted => Step::Admitted,
            Self::DecodeChosen => Step::DecodeChosen,
            Self::PrefillChosen => Step::PrefillChosen,
            Self::PrefillSent => Step::PrefillSent,
            Self::PrefillAnswered(status) => Step::PrefillAnswered(status),
            Self::HandedOff(blocks) => Step::HandedOff(blocks),
            Self::DecodeSent => Step::DecodeSent,
            Self::DecodeHead(status) => Step::DecodeHead(status),
            Self::FirstByte => Step::FirstByte,
            Self::FirstToken => Step::FirstToken,
            Self::Ended => Step::Ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_is_told_again() {
        let (p, d): (Arc<str>, Arc<str>) = ("p".into(), "d".into());
        let told = [
            (1, Step::Received, None),
            (2, Step::PrefillFailed("timeout"), Some(&p)),
            (3, Step::PrefillAnswered(200), Some(&p)),
            (4, Step::HandedOff(70_000), Some(&p)),
            (5, Step::Bypassed("short"), None),
            (1 << 40, Step::DecodeFailed("reset"), Some(&d)),
        ];
        let mut track = Track::default();
        told.iter().for_each(|(at, step, peer)| track.add(*at, *step, *peer));
        let again: Vec<_> = track.told().map(|told| (told.at, told.step, told.peer)).collect();
        assert_eq!(again, told);
        assert_eq!(track.peers, [p, d], "each once");
        assert!(size_of::<Event>() <= 24);
    }
}

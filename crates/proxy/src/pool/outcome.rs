//! How a peer's exchanges ended: over a sliding window, and by whom its hand-offs were read.
//! Pure: time is passed in.

use std::time::Duration;

use tokio::time::Instant;

use crate::routing::PeerKey;

/// Into how many parts a window is divided.
const PARTS: usize = 10;

/// How many partners of a peer are remembered.
const PARTNERS: usize = 32;

/// How long a hand-off that was read, or was not, speaks for an engine.
const SPEAKS_FOR: Duration = Duration::from_secs(30);

/// Good and bad outcomes of the last while.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    part: Duration,
    began: Instant,
    /// The number of the newest part since `began`.
    newest: u64,
    parts: [[u32; 2]; PARTS],
}

impl Window {
    pub(crate) fn new(length: Duration, now: Instant) -> Self {
        let part = (length / PARTS as u32).max(Duration::from_millis(1));
        Self { part, began: now, newest: 0, parts: [[0; 2]; PARTS] }
    }

    /// A window of another length with the same outcomes, as far as it reaches back.
    pub(crate) fn resized(&mut self, length: Duration, now: Instant) -> Self {
        self.forget(now);
        let mut next = Self::new(length, now);
        next.began = now.checked_sub(next.part * PARTS as u32).unwrap_or(now);
        next.forget(now);
        for age in 0..(PARTS as u64).min(self.newest + 1) {
            let part = self.parts[((self.newest - age) % PARTS as u64) as usize];
            let aged = (self.part * age as u32).as_nanos() / next.part.as_nanos();
            let aged = u64::try_from(aged).unwrap_or(u64::MAX);
            if aged < PARTS as u64 && aged <= next.newest {
                let into = &mut next.parts[((next.newest - aged) % PARTS as u64) as usize];
                *into = [into[0].saturating_add(part[0]), into[1].saturating_add(part[1])];
            }
        }
        next
    }

    pub(crate) fn record(&mut self, good: bool, now: Instant) {
        self.forget(now);
        let count = &mut self.parts[(self.newest % PARTS as u64) as usize][usize::from(good)];
        *count = count.saturating_add(1);
    }

    /// How many were bad, and how many there were.
    pub(crate) fn totals(&mut self, now: Instant) -> (u64, u64) {
        self.forget(now);
        let of = |kind: usize| self.parts.iter().map(|part| u64::from(part[kind])).sum::<u64>();
        (of(0), of(0) + of(1))
    }

    fn forget(&mut self, now: Instant) {
        let number = now.saturating_duration_since(self.began).as_nanos() / self.part.as_nanos();
        let number = u64::try_from(number).unwrap_or(u64::MAX);
        for gone in 0..number.saturating_sub(self.newest).min(PARTS as u64) {
            self.parts[((self.newest + 1 + gone) % PARTS as u64) as usize] = [0; 2];
        }
        if number > self.newest {
            // The parts that were skipped are empty, whichever of them is now the newest.
            if number - self.newest >= PARTS as u64 {
                self.parts = [[0; 2]; PARTS];
            }
            self.newest = number;
        }
    }
}

/// What became of the hand-offs between one peer and its partners, the partner of the last one at the end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reads(Vec<Read>);

#[derive(Clone, Debug)]
struct Read {
    partner: PeerKey,
    good: Option<Instant>,
    bad: Option<Instant>,
}

impl Reads {
    pub(crate) fn record(&mut self, partner: PeerKey, good: bool, now: Instant) {
        let at = self.0.iter().rposition(|read| read.partner == partner).unwrap_or_else(|| {
            if self.0.len() >= PARTNERS {
                let oldest = (0..self.0.len()).min_by_key(|at| self.0[*at].good.max(self.0[*at].bad));
                self.0.swap_remove(oldest.unwrap_or_default());
            }
            self.0.push(Read { partner, good: None, bad: None });
            self.0.len() - 1
        });
        let last = self.0.len() - 1;
        self.0.swap(at, last);
        *(if good { &mut self.0[last].good } else { &mut self.0[last].bad }) = Some(now);
    }

    /// Whether the last that is known from partners other than this one is good.
    fn vouched_by_others(&self, partner: PeerKey, now: Instant) -> bool {
        let others = self.0.iter().filter(|read| read.partner != partner);
        let (good, bad) =
            others.fold((None, None), |(good, bad), read| (read.good.max(good), read.bad.max(bad)));
        good.is_some_and(|at| {
            now.saturating_duration_since(at) <= SPEAKS_FOR && bad.is_none_or(|bad| bad < at)
        })
    }
}

/// Who is to blame for a hand-off that could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    /// Others read from this prefill engine.
    Decode,
    /// This decode engine reads from others.
    Prefill,
    /// Nobody can tell, or only the two together fail.
    Nobody,
}

/// A decode engine reports a failed read as its own failure, though the prefill engine or the way
/// between them may have caused it: whoever works with others is not to blame.
pub(crate) fn blame(prefill: (PeerKey, &Reads), decode: (PeerKey, &Reads), now: Instant) -> Blame {
    let prefill_works = prefill.1.vouched_by_others(decode.0, now);
    let decode_works = decode.1.vouched_by_others(prefill.0, now);
    match (prefill_works, decode_works) {
        (true, false) => Blame::Decode,
        (false, true) => Blame::Prefill,
        (true, true) | (false, false) => Blame::Nobody,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_window_counts_what_is_younger_than_it(
            steps in proptest::collection::vec((0_u64..400, any::<bool>()), 1..60),
        ) {
            let length = Duration::from_millis(1000);
            let began = Instant::now();
            let mut window = Window::new(length, began);
            let mut now = 0;
            let mut all: Vec<(u64, bool)> = Vec::new();
            for (pause, good) in steps {
                now += pause;
                let at = began + Duration::from_millis(now);
                window.record(good, at);
                all.push((now, good));
                // A part goes as a whole: what counts is what lies in the newest ten parts.
                let oldest = (now / 100).saturating_sub(PARTS as u64 - 1);
                let counted = all.iter().filter(|(at, _)| at / 100 >= oldest);
                let bad = counted.clone().filter(|(_, good)| !good).count() as u64;
                prop_assert_eq!(window.totals(at), (bad, counted.count() as u64));
            }
        }
    }

    #[test]
    fn whoever_works_with_others_is_not_to_blame() {
        let now = Instant::now();
        let [p, d, p2, d2, other] = [1, 2, 3, 4, 5].map(PeerKey);
        let reads = |entries: &[(PeerKey, bool)]| {
            let mut reads = Reads::default();
            for (partner, good) in entries {
                reads.record(*partner, *good, now);
            }
            reads
        };
        let of = |of_p: &[(PeerKey, bool)], of_d: &[(PeerKey, bool)], at| {
            blame((p, &reads(of_p)), (d, &reads(of_d)), at)
        };
        assert_eq!(of(&[(other, true)], &[], now), Blame::Decode);
        assert_eq!(of(&[], &[(other, true)], now), Blame::Prefill);
        assert_eq!(of(&[(other, true)], &[(other, true)], now), Blame::Nobody);
        assert_eq!(of(&[], &[], now), Blame::Nobody);
        assert_eq!(of(&[(d, true)], &[(p, true)], now), Blame::Nobody, "nobody vouches for itself");
        assert_eq!(of(&[(d2, false)], &[(p2, true)], now), Blame::Prefill);
        let late = now + SPEAKS_FOR + Duration::from_secs(1);
        assert_eq!(of(&[(other, true)], &[], late), Blame::Nobody, "too long ago");
    }

    #[test]
    fn only_so_many_partners_are_remembered() {
        let now = Instant::now();
        let mut reads = Reads::default();
        for number in 0..100 {
            reads.record(PeerKey(number), true, now + Duration::from_secs(number.into()));
            reads.record(PeerKey(1000), true, now + Duration::from_secs(number.into()));
        }
        assert_eq!(reads.0.len(), PARTNERS);
        assert!(reads.0.iter().any(|read| read.partner == PeerKey(99)));
    }
}

//! What one source has found, over time: an address that is missing is kept for its grace, an empty answer
//! does not empty the fleet at once, a source that fails keeps all it had. Pure; the caller has the clock.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::Instant;

/// One engine's address as a source tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) address: SocketAddr,
    /// Where it is, as far as the source knows.
    pub(crate) labels: BTreeMap<String, String>,
    /// Which process it is, where the source tells.
    pub(crate) instance: Option<String>,
    /// It is still there and must not get anything new.
    pub(crate) leaving: bool,
}

impl Found {
    /// An address about which nothing else is known.
    pub(crate) const fn at(address: SocketAddr) -> Self {
        Self { address, labels: BTreeMap::new(), instance: None, leaving: false }
    }
}

/// How long what is missing stays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Graces {
    /// An address that an answer leaves out.
    pub(crate) missing: Duration,
    /// Everything, when an answer is empty.
    pub(crate) empty: Duration,
}

/// What is worth telling of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// It answers again.
    Recovered,
    /// It has just begun to fail; so many addresses are kept.
    Failing(usize),
    /// Its answer has just become empty; so many addresses are kept for now.
    Empty(usize),
}

/// One source's addresses.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    seen: BTreeMap<SocketAddr, Seen>,
    empty_since: Option<Instant>,
    failing: bool,
}

#[derive(Debug)]
struct Seen {
    found: Found,
    missing_since: Option<Instant>,
}

impl Kept {
    /// Takes an answer; of one that is not whole, what it leaves out is still there.
    pub(crate) fn answer(&mut self, found: Vec<Found>, whole: bool, now: Instant) -> Option<News> {
        let was_empty = self.empty_since.is_some();
        self.empty_since = (found.is_empty() && whole).then(|| self.empty_since.unwrap_or(now));
        if whole {
            let told: std::collections::BTreeSet<SocketAddr> = found.iter().map(|one| one.address).collect();
            for (_, seen) in self.seen.iter_mut().filter(|(address, _)| !told.contains(address)) {
                seen.missing_since.get_or_insert(now);
            }
        }
        for found in found {
            if found.leaving {
                self.seen.remove(&found.address);
            } else {
                self.seen.insert(found.address, Seen { found, missing_since: None });
            }
        }
        let recovered = std::mem::replace(&mut self.failing, !whole) && whole;
        match () {
            () if self.empty_since.is_some() && !was_empty => Some(News::Empty(self.seen.len())),
            () if recovered => Some(News::Recovered),
            () => None,
        }
    }

    /// Takes note of a failure.
    pub(crate) fn failed(&mut self) -> Option<News> {
        let is_news = !std::mem::replace(&mut self.failing, true);
        is_news.then_some(News::Failing(self.seen.len()))
    }

    /// Forgets what is over; when something more will be.
    pub(crate) fn settle(&mut self, now: Instant, graces: Graces) -> Option<Instant> {
        let empty = self.empty_since.map(|since| since + graces.empty);
        let over = |seen: &Seen| {
            let missing = seen.missing_since? + graces.missing;
            Some(empty.map_or(missing, |empty| empty.max(missing)))
        };
        self.seen.retain(|_, seen| over(seen).is_none_or(|over| now < over));
        self.seen.values().filter_map(over).min()
    }

    /// The addresses of now.
    pub(crate) fn found(&self) -> impl Iterator<Item = &Found> {
        self.seen.values().map(|seen| &seen.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACES: Graces = Graces { missing: Duration::from_secs(5), empty: Duration::from_secs(60) };

    fn found(last: u8) -> Found {
        Found::at(SocketAddr::from(([10, 0, 0, last], 8000)))
    }

    fn leaving(last: u8) -> Found {
        Found { leaving: true, ..found(last) }
    }

    /// The last bytes of the addresses that are there `seconds` after the beginning, and when that ends.
    fn look(kept: &mut Kept, origin: Instant, seconds: u64) -> (Vec<u8>, Option<u64>) {
        let next = kept.settle(origin + Duration::from_secs(seconds), GRACES);
        let last = |found: &Found| match found.address.ip() {
            std::net::IpAddr::V4(ip) => ip.octets()[3],
            std::net::IpAddr::V6(_) => 0,
        };
        (kept.found().map(last).collect(), next.map(|at| (at - origin).as_secs()))
    }

    #[test]
    fn a_missing_address_goes_after_its_grace_unless_it_comes_back() {
        let (mut kept, origin) = (Kept::default(), Instant::now());
        let at = |seconds| origin + Duration::from_secs(seconds);
        assert_eq!(kept.answer(vec![found(1), found(2)], true, origin), None);
        assert_eq!(look(&mut kept, origin, 0), (vec![1, 2], None));
        kept.answer(vec![found(1)], true, at(10));
        assert_eq!(look(&mut kept, origin, 14), (vec![1, 2], Some(15)));
        kept.answer(vec![found(2)], true, at(14));
        assert_eq!(look(&mut kept, origin, 16), (vec![1, 2], Some(19)));
        assert_eq!(look(&mut kept, origin, 19), (vec![2], None));
    }

    #[test]
    fn an_empty_answer_empties_after_its_own_grace() {
        let (mut kept, origin) = (Kept::default(), Instant::now());
        let at = |seconds| origin + Duration::from_secs(seconds);
        kept.answer(vec![found(1)], true, origin);
        assert_eq!(kept.answer(Vec::new(), true, at(1)), Some(News::Empty(1)));
        assert_eq!(kept.answer(Vec::new(), true, at(2)), None, "that was said");
        assert_eq!(look(&mut kept, origin, 60), (vec![1], Some(61)));
        assert_eq!(look(&mut kept, origin, 61), (Vec::new(), None));
        assert_eq!(kept.answer(vec![found(1)], true, at(62)), None);
        assert_eq!(kept.answer(Vec::new(), true, at(63)), Some(News::Empty(1)));
    }

    #[test]
    fn who_leaves_by_its_own_word_goes_at_once_even_as_the_last_one() {
        let (mut kept, origin) = (Kept::default(), Instant::now());
        kept.answer(vec![found(1), found(2)], true, origin);
        kept.answer(vec![leaving(1), found(2)], true, origin);
        assert_eq!(look(&mut kept, origin, 0).0, [2]);
        kept.answer(vec![leaving(1), leaving(2)], true, origin);
        assert_eq!(look(&mut kept, origin, 0), (Vec::new(), None));
    }

    #[test]
    fn failures_and_half_answers_take_nothing_away() {
        let (mut kept, origin) = (Kept::default(), Instant::now());
        let later = origin + Duration::from_secs(1000);
        kept.answer(vec![found(1)], true, origin);
        assert_eq!((kept.failed(), kept.failed()), (Some(News::Failing(1)), None));
        assert_eq!(look(&mut kept, origin, 1000), (vec![1], None));
        assert_eq!(kept.answer(vec![found(2)], false, later), None, "it still fails by half");
        assert_eq!(look(&mut kept, origin, 2000).0, [1, 2]);
        assert_eq!(kept.answer(vec![found(2)], true, later), Some(News::Recovered));
        assert_eq!(kept.failed(), Some(News::Failing(2)));
    }
}

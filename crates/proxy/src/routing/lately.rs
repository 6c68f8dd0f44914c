//! The peers that have served well of late, apart for each thread. Of many engines that have nothing to do, the one
//! that served last is the best to ask: its connections are this thread's own, it has met its partners, and what
//! concerns it is still in the processor's caches. The first half is "join the idle queue" (Lu et al., 2011).

use std::cell::RefCell;

use super::PeerKey;
use crate::error::Stage;

/// Most that a thread remembers of a stage.
const MOST: usize = 64;

/// How many of them are looked at for one request.
const LOOKS: usize = 8;

thread_local! {
    /// By stage, the one that served last at the end. Keys are unique in the process: fleets do not mix.
    static LATELY: RefCell<[Vec<PeerKey>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// What one who looks finds.
pub(crate) enum Found<T> {
    /// What was looked for.
    It(T),
    /// This one is not for this request.
    OfOthers,
    /// This one is busy or gone.
    NoMore,
}

/// A peer has served well on this thread.
pub(crate) fn served(stage: Stage, key: PeerKey) {
    // A thread that ends may have none any more.
    let _ = LATELY.try_with(|all| {
        let list = &mut all.borrow_mut()[stage as usize];
        if list.last() == Some(&key) {
            return;
        }
        match list.iter().rposition(|other| *other == key) {
            Some(at) => drop(list.remove(at)),
            None if list.len() == MOST => drop(list.remove(0)),
            None => {}
        }
        list.push(key);
    });
}

/// What `look` finds with those that served last, the very last first, `most` times at most. It must not tell of any
/// that served.
pub(crate) fn last<T>(
    stage: Stage,
    most: usize,
    found: &mut Vec<T>,
    mut look: impl FnMut(PeerKey) -> Found<T>,
) {
    let mut search = |all: &RefCell<[Vec<PeerKey>; 2]>| {
        let list = &mut all.borrow_mut()[stage as usize];
        let (mut at, wanted) = (list.len(), found.len() + most);
        for _ in 0..LOOKS.min(list.len()) {
            if found.len() == wanted {
                break;
            }
            at -= 1;
            match look(list[at]) {
                Found::It(it) => found.push(it),
                Found::OfOthers => {}
                Found::NoMore => drop(list.remove(at)),
            }
        }
    };
    let _ = LATELY.try_with(&mut search);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(keys: &[u32]) {
        keys.iter().for_each(|key| served(Stage::Prefill, PeerKey(*key)));
    }

    fn found(stage: Stage, most: usize, look: impl Fn(u32) -> Found<u32>) -> Vec<u32> {
        let mut found = Vec::new();
        last(stage, most, &mut found, |key| look(key.0));
        found
    }

    fn all() -> Vec<u32> {
        found(Stage::Prefill, MOST, Found::It)
    }

    #[test]
    fn who_served_last_is_asked_first_and_stands_once() {
        told(&[1, 2, 3, 2, 2, 1]);
        assert_eq!(all(), [1, 2, 3]);
        assert_eq!(found(Stage::Prefill, 2, Found::It), [1, 2]);
        let even = |key: u32| if key.is_multiple_of(2) { Found::It(key) } else { Found::OfOthers };
        assert_eq!(found(Stage::Prefill, 2, even), [2]);
        assert!(found(Stage::Decode, 2, Found::It).is_empty(), "the other stage has its own");
        assert!(std::thread::spawn(all).join().unwrap().is_empty(), "each thread has its own");
    }

    #[test]
    fn who_is_busy_is_forgotten_until_it_has_served_again() {
        told(&[1, 2, 3]);
        let idle = |key| if key == 1 { Found::It(key) } else { Found::NoMore };
        assert_eq!(found(Stage::Prefill, 1, idle), [1]);
        assert_eq!(all(), [1]);
        told(&[3]);
        assert_eq!(all(), [3, 1]);
    }

    #[test]
    fn no_more_are_kept_or_looked_at_than_is_said() {
        told(&(0..1000).collect::<Vec<_>>());
        assert_eq!(all(), (992..1000).rev().collect::<Vec<_>>());
        let mut kept = 0;
        while !all().is_empty() {
            kept += all().len();
            found(Stage::Prefill, 1, |_| Found::NoMore);
        }
        assert_eq!(kept, MOST);
    }
}

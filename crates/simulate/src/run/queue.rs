//! What happens when. Of what happens at once, what was entered first comes first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::engine::Seat;

/// Something that happens, by requests' and engines' numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Moment {
    /// A request reaches the router.
    Comes(u32),
    /// It has waited too long.
    Late(u32),
    /// It reaches its prefill engine.
    ToPrefill(u32),
    /// That one's answer reaches the router.
    Prefilled(u32),
    /// It reaches its decode engine.
    ToDecode(u32),
    /// Its first token reaches the router.
    Began(u32),
    /// Its last one does.
    Ended(u32),
    /// An engine ends a step.
    Stepped(usize),
    /// An engine has read a prompt's blocks.
    Pulled { engine: usize, seat: Seat, request: u32 },
    /// An engine's metrics page is read.
    Page(usize),
}

/// All that is to happen.
#[derive(Debug, Default)]
pub(super) struct Moments {
    heap: BinaryHeap<Reverse<(Duration, u64, Moment)>>,
    entered: u64,
}

impl Moments {
    pub(super) fn at(&mut self, when: Duration, what: Moment) {
        self.heap.push(Reverse((when, self.entered, what)));
        self.entered += 1;
    }

    pub(super) fn next(&mut self) -> Option<(Duration, Moment)> {
        self.heap.pop().map(|Reverse((when, _, what))| (when, what))
    }
}

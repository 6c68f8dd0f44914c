//! Whose turn it is among weighted targets, so that at every moment each has had its share of the requests to
//! within one request. The order is made once; taking a turn is one addition.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The turns of some targets, over and over.
#[derive(Debug)]
pub(crate) struct Turns {
    /// Places of targets, as long as the sum of the weights in lowest terms.
    order: Box<[u8]>,
    next: AtomicUsize,
}

impl Turns {
    /// Weights must not all be zero.
    pub(crate) fn of(weights: &[u32]) -> Self {
        Self { order: order(weights), next: AtomicUsize::new(0) }
    }

    /// The place of the target whose turn it is.
    pub(crate) fn take(&self) -> usize {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        self.order.get(turn % self.order.len().max(1)).map_or(0, |place| usize::from(*place))
    }
}

fn gcd(one: u32, other: u32) -> u32 {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// An order in which each target's count differs from its share by less than one after every turn: a turn goes
/// to whoever must have it soonest of those that may have it already. That target's next turn, the `n`-th, may
/// come once its share exceeds `n` and must come before it exceeds `n + 1`; an order that keeps both exists for
/// any weights, and the earliest deadline finds it.
fn order(weights: &[u32]) -> Box<[u8]> {
    let common = weights.iter().fold(0, |common, weight| gcd(common, *weight)).max(1);
    let weights: Vec<u64> = weights.iter().map(|weight| u64::from(weight / common)).collect();
    let total: u64 = weights.iter().sum();
    let mut had = vec![0_u64; weights.len()];
    let mut order = Vec::new();
    for turn in 1..=total {
        let may = |place: &usize| weights[*place] * turn > had[*place] * total;
        // The last turn at which its share is still below `had + 1`.
        let must = |place: &usize| ((had[*place] + 1) * total).div_ceil(weights[*place].max(1));
        let next = (0..weights.len()).filter(|place| weights[*place] > 0).filter(may).min_by_key(must);
        let next = next.unwrap_or(0);
        had[next] += 1;
        order.push(u8::try_from(next).unwrap_or(0));
    }
    order.into()
}

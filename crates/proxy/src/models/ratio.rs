//! How many engines of each stage a model uses, and which: as many as its ratio allows of those that list it,
//! the same ones as long as they are there.

use std::collections::HashSet;

use super::settings::PdRatio;
use super::table::hash;

/// An engine that could take a model's requests in one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate<'a> {
    /// Where it is; one that is a candidate of both stages is there with the same place.
    pub(crate) place: &'a str,
}

/// The places, among the candidates of each stage, of those that take the requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shared {
    pub(crate) prefill: Vec<usize>,
    pub(crate) decode: Vec<usize>,
}

/// Who takes a model's requests. An engine that may do either does one of both, unless it is the only one; of
/// whatever there is too much of then, the first in an order that the model and the places alone determine.
pub(crate) fn divide(
    model: &str,
    ratio: PdRatio,
    prefill: &[Candidate<'_>],
    decode: &[Candidate<'_>],
) -> Shared {
    let (p, d) = (ratio.prefill as usize, ratio.decode as usize);
    let order = |candidates: &[Candidate<'_>]| {
        let rank = |place: &str| hash(&[model.as_bytes(), b"\0", place.as_bytes()].concat());
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        order.sort_by_key(|at| (rank(candidates[*at].place), candidates[*at].place));
        order
    };
    let (mut of_prefill, mut of_decode) = (order(prefill), order(decode));
    let decodes: HashSet<&str> = decode.iter().map(|candidate| candidate.place).collect();
    let places = of_prefill.iter().map(|at| prefill[*at].place);
    let both: Vec<&str> = places.filter(|place| decodes.contains(place)).collect();
    if !both.is_empty() && of_prefill.len() + of_decode.len() - both.len() > 1 {
        let (only_p, only_d) = (prefill.len() - both.len(), decode.len() - both.len());
        // As many of both that (only_p + x) : (only_d + both - x) comes closest to p : d.
        let all = only_p + only_d + both.len();
        let wanted = (2 * all * p + p + d) / (2 * (p + d));
        let least = usize::from(only_p == 0);
        let most = both.len() - usize::from(only_d == 0);
        let taken = wanted.saturating_sub(only_p).clamp(least, most.max(least));
        let (prefills, decodes) = both.split_at(taken);
        let (prefills, decodes): (HashSet<_>, HashSet<_>) =
            (prefills.iter().copied().collect(), decodes.iter().copied().collect());
        of_prefill.retain(|at| !decodes.contains(prefill[*at].place));
        of_decode.retain(|at| !prefills.contains(decode[*at].place));
    }
    let (prefills, decodes) = (of_prefill.len(), of_decode.len());
    of_prefill.truncate((decodes * p).div_ceil(d).max(1));
    of_decode.truncate((prefills * d).div_ceil(p).max(1));
    Shared { prefill: of_prefill, decode: of_decode }
}

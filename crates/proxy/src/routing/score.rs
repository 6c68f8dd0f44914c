//! What a pair is expected to cost a request, in seconds and by named parts. Pure: everything is passed in, and
//! what is not known counts as nothing.

use serde::Serialize;

use super::rates::Rate;

/// The part of its KV blocks that an engine may use before more of it costs anything.
const ROOMY: f64 = 0.7;

/// The least part of a share that counts.
const LEAST_SHARE: f64 = 0.01;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ask {
    /// Tokens of its prompt, as far as can be estimated.
    pub prompt_tokens: f64,
}

/// What is known of a prefill engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillFacts {
    /// Prompt tokens that were sent there and not answered yet.
    pub waiting_tokens: f64,
    /// Requests of others that wait or run there; older readings count less.
    pub others: f64,
    /// Tokens of this prompt that it probably has cached.
    pub cached_tokens: f64,
    /// What prompts cost there.
    pub rate: Option<Rate>,
    /// The part of its share that it is to get, above 0 and at most 1.
    pub share: f64,
}

/// What is known of a decode engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeFacts {
    /// Sequences that were sent there and have not ended.
    pub sequences: f64,
    /// Sequences of others that run there; older readings count less.
    pub others: f64,
    /// Prompt tokens that it computes itself, of requests that were sent there and have shown no token.
    pub prompt_tokens: f64,
    /// Requests that wait inside; older readings count less.
    pub waiting: f64,
    /// The part of its KV blocks in use, from 0 to 1.
    pub kv_usage: Option<f64>,
    /// How much that reading still counts, from 0 to 1.
    pub freshness: f64,
    /// The part of its share that it is to get, above 0 and at most 1.
    pub share: f64,
}

/// What is known of a pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairFacts {
    /// Bytes to be moved for this prompt.
    pub bytes: Option<f64>,
    /// What moving them costs.
    pub rate: Option<Rate>,
    /// Seconds for the labels in which both differ.
    pub distance: f64,
}

/// What stands for what is not known yet, and how much things count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Seconds for one prompt token where no rate is learnt.
    pub prompt_token: f64,
    /// Seconds for one byte where no rate is learnt.
    pub byte: f64,
    /// Seconds for each sequence that a decode engine runs already.
    pub sequence: f64,
    /// Seconds for each request that waits inside a decode engine.
    pub waiting: f64,
    /// Seconds for a decode engine whose KV blocks are all in use.
    pub kv_full: f64,
}

/// The expected cost of a pair, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Until the prefill engine has done what it was sent before.
    pub prefill_queue: f64,
    /// Computing what it has not cached.
    pub prefill: f64,
    /// Moving the blocks.
    pub transfer: f64,
    /// The distance between both.
    pub locality: f64,
    /// What else the decode engine runs.
    pub decode_queue: f64,
    /// How full its KV blocks are.
    pub decode_memory: f64,
    /// What keeps a recovering engine's share small.
    pub recovery: f64,
}

impl Cost {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.of_prefill()
            + self.transfer
            + self.locality
            + self.decode_queue
            + self.decode_memory
            + self.recovery
    }

    /// What the prefill engine has to do with.
    #[must_use]
    pub fn of_prefill(&self) -> f64 {
        self.prefill_queue + self.prefill
    }
}

/// What a pair is expected to cost.
#[must_use]
pub fn cost(ask: &Ask, p: &PrefillFacts, d: &DecodeFacts, pair: &PairFacts, weights: &Weights) -> Cost {
    let known = p.rate.unwrap_or(Rate { start: 0.0, each: weights.prompt_token });
    let tokens = positive(ask.prompt_tokens);
    let uncached = (tokens - positive(p.cached_tokens)).max(0.0);
    // Others' prompts are taken to be like this one.
    let ahead = positive(p.waiting_tokens) + positive(p.others) * tokens;
    let prefill_queue = positive(ahead * known.each);
    let prefill = positive(known.start + uncached * known.each);
    let transfer = pair.bytes.map_or(0.0, |bytes| {
        let rate = pair.rate.unwrap_or(Rate { start: 0.0, each: weights.byte });
        positive(rate.start + positive(bytes) * rate.each)
    });
    let decode_queue = positive(d.sequences + d.others) * weights.sequence
        + positive(d.waiting) * weights.waiting
        // Steps that compute prompts hold up all that runs there.
        + positive(positive(d.prompt_tokens) * known.each);
    let above = d.kv_usage.map_or(0.0, |usage| ((usage.clamp(0.0, 1.0) - ROOMY) / (1.0 - ROOMY)).max(0.0));
    let decode_memory = positive(above * above * d.freshness.clamp(0.0, 1.0) * weights.kv_full);
    let more = |share: f64| 1.0 / share.clamp(LEAST_SHARE, 1.0) - 1.0;
    let recovery = (prefill_queue + prefill) * more(p.share) + (decode_queue + decode_memory) * more(d.share);
    Cost {
        prefill_queue,
        prefill,
        transfer,
        locality: positive(pair.distance),
        decode_queue,
        decode_memory,
        recovery: positive(recovery),
    }
}

/// A number that is one, not below zero and not so large that sums of it end.
fn positive(number: f64) -> f64 {
    if number.is_nan() { 0.0 } else { number.clamp(0.0, 1e12) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WEIGHTS: Weights =
        Weights { prompt_token: 1e-4, byte: 1e-10, sequence: 0.002, waiting: 0.05, kv_full: 1.0 };

    type All = (Ask, PrefillFacts, DecodeFacts, PairFacts);

    fn total(all: &All) -> f64 {
        cost(&all.0, &all.1, &all.2, &all.3, &WEIGHTS).total()
    }

    fn rate() -> impl Strategy<Value = Option<Rate>> {
        proptest::option::of((0.0_f64..1.0, 1e-12_f64..1e-2).prop_map(|(start, each)| Rate { start, each }))
    }

    prop_compose! {
        fn facts()(
            tokens in 0.0_f64..1e6, waiting in 0.0_f64..1e7, p_others in 0.0_f64..1e3, cached in 0.0_f64..1e6,
            p_rate in rate(), p_share in 0.1_f64..=1.0, d_prompts in 0.0_f64..1e6, sequences in 0.0_f64..1e4, d_others in 0.0_f64..1e3,
            d_waiting in 0.0_f64..1e3, kv_usage in proptest::option::of(0.0_f64..=1.0),
        )(
            freshness in 0.0_f64..=1.0, d_share in 0.1_f64..=1.0,
            bytes in proptest::option::of(0.0_f64..1e12), rate in rate(), distance in 0.0_f64..10.0,
            d_prompts in Just(d_prompts), tokens in Just(tokens), waiting in Just(waiting), p_others in Just(p_others), cached in Just(cached),
            p_rate in Just(p_rate), p_share in Just(p_share), sequences in Just(sequences),
            d_others in Just(d_others), d_waiting in Just(d_waiting), kv_usage in Just(kv_usage),
        ) -> All {
            (
                Ask { prompt_tokens: tokens },
                PrefillFacts {
                    waiting_tokens: waiting, others: p_others, cached_tokens: cached, rate: p_rate, share: p_share,
                },
                DecodeFacts {
                    prompt_tokens: d_prompts, sequences, others: d_others, waiting: d_waiting, kv_usage, freshness, share: d_share,
                },
                PairFacts { bytes, rate, distance },
            )
        }
    }

    proptest! {
        #[test]
        fn more_work_never_costs_less(all in facts(), more in 0.0_f64..1e5) {
            let before = total(&all);
            let dearer: [fn(&mut All, f64); 13] = [
                |all, more| all.0.prompt_tokens += more,
                |all, more| all.1.waiting_tokens += more,
                |all, more| all.1.others += more,
                |all, more| all.1.cached_tokens = (all.1.cached_tokens - more).max(0.0),
                |all, more| all.1.share /= 1.0 + more,
                |all, more| all.2.sequences += more,
                |all, more| all.2.others += more,
                |all, more| all.2.prompt_tokens += more,
                |all, more| all.2.waiting += more,
                |all, more| all.2.kv_usage = all.2.kv_usage.map(|usage| (usage + more).min(1.0)),
                |all, more| all.2.share /= 1.0 + more,
                |all, more| all.3.bytes = all.3.bytes.map(|bytes| bytes + more),
                |all, more| all.3.distance += more,
            ];
            for (place, change) in dearer.iter().enumerate() {
                let mut after = all;
                change(&mut after, more);
                prop_assert!(total(&after) >= before * (1.0 - 1e-12), "{place}: {} < {before}", total(&after));
            }
            if let Some(rate) = all.1.rate {
                let mut after = all;
                after.1.rate = Some(Rate { start: rate.start, each: rate.each * (1.0 + more) });
                prop_assert!(total(&after) >= before);
            }
        }

        #[test]
        fn whatever_is_passed_in_a_cost_is_a_number(numbers in proptest::array::uniform12(any::<f64>())) {
            let [a, b, c, d, e, f, g, h, i, j, k, l] = numbers;
            let rate = Some(Rate { start: k, each: l });
            let all = (
                Ask { prompt_tokens: a },
                PrefillFacts { waiting_tokens: b, others: c, cached_tokens: d, rate, share: e },
                DecodeFacts { prompt_tokens: d, sequences: f, others: g, waiting: h, kv_usage: Some(i), freshness: j, share: k },
                PairFacts { bytes: Some(l), rate, distance: a },
            );
            prop_assert!(total(&all).is_finite() && total(&all) >= 0.0, "{}", total(&all));
        }
    }

    #[test]
    fn what_is_not_known_counts_as_nothing() {
        let p = PrefillFacts { waiting_tokens: 0.0, others: 0.0, cached_tokens: 0.0, rate: None, share: 1.0 };
        let d = DecodeFacts {
            prompt_tokens: 0.0,
            sequences: 0.0,
            others: 0.0,
            waiting: 0.0,
            kv_usage: None,
            freshness: 1.0,
            share: 1.0,
        };
        let pair = PairFacts { bytes: None, rate: None, distance: 0.0 };
        let found = cost(&Ask { prompt_tokens: 1000.0 }, &p, &d, &pair, &WEIGHTS);
        assert_eq!(found, Cost { prefill: 0.1, ..Cost::default() });
        let old = DecodeFacts { kv_usage: Some(1.0), freshness: 0.0, ..d };
        assert_eq!(cost(&Ask { prompt_tokens: 1000.0 }, &p, &old, &pair, &WEIGHTS), found);
    }
}

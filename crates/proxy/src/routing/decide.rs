//! Whether a request had better stay on its decode engine: by a fixed number of tokens, then by what both ways are
//! expected to cost. Pure.

use super::score::{Ask, Cost, DecodeFacts, PrefillFacts, Weights};
use super::settings::{Disaggregation, DisaggregationMode};

/// Why a decode engine computes the prompt although a prefill engine could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stays {
    /// So little of it is not cached.
    ShortUncached,
    /// It would be done sooner.
    CheaperAlone,
}

impl Stays {
    /// The name in metrics.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::ShortUncached => "short_uncached",
            Self::CheaperAlone => "cheaper_alone",
        }
    }
}

/// Why the request stays with the decode engine, if so; `cached` are the tokens that it has cached itself.
/// Costs are compared only where the prefill engine's rate is learnt.
pub(crate) fn stays(
    rule: &Disaggregation,
    ask: &Ask,
    cost: &Cost,
    (prefill, decode): (&PrefillFacts, &DecodeFacts),
    cached: f64,
    weights: &Weights,
) -> Option<Stays> {
    if rule.mode != DisaggregationMode::Auto {
        return None;
    }
    let on_decode = (ask.prompt_tokens - cached).max(0.0);
    let on_prefill = (ask.prompt_tokens - prefill.cached_tokens).max(0.0);
    if on_decode.min(on_prefill) < rule.min_uncached_tokens as f64 {
        // Short for a prefill engine that has it cached may be long for the decode engine.
        return (on_decode < rule.min_uncached_tokens as f64).then_some(Stays::ShortUncached);
    }
    let rate = prefill.rate?;
    let running = decode.sequences + decode.others;
    let alone = (on_decode + decode.prompt_tokens) * rate.each / rule.decode_speed;
    // The prompt waits behind what waits there, and what runs there waits for the prompt.
    let alone = alone * (1.0 + rule.interference * running) + decode.waiting * weights.waiting;
    let apart = cost.prefill_queue + cost.prefill + cost.transfer + cost.locality;
    (alone < apart).then_some(Stays::CheaperAlone)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::rates::Rate;
    use super::super::score::{PairFacts, cost};
    use super::*;

    const WEIGHTS: Weights =
        Weights { prompt_token: 1e-4, byte: 1e-10, sequence: 0.002, waiting: 0.05, kv_full: 1.0 };

    const RATE: Option<Rate> = Some(Rate { start: 0.01, each: 1e-4 });

    fn idle(sequences: f64) -> DecodeFacts {
        DecodeFacts {
            sequences,
            others: 0.0,
            prompt_tokens: 0.0,
            waiting: 0.0,
            kv_usage: None,
            freshness: 0.0,
            share: 1.0,
        }
    }

    fn auto() -> Disaggregation {
        Disaggregation { mode: DisaggregationMode::Auto, ..Disaggregation::default() }
    }

    fn found(rule: &Disaggregation, tokens: f64, waiting: f64, sequences: f64, rate: bool) -> Option<Stays> {
        let ask = Ask { prompt_tokens: tokens };
        let rate = RATE.filter(|_| rate);
        let p = PrefillFacts { waiting_tokens: waiting, others: 0.0, cached_tokens: 0.0, rate, share: 1.0 };
        let d = idle(sequences);
        let pair = PairFacts { bytes: None, rate: None, distance: 0.0 };
        stays(rule, &ask, &cost(&ask, &p, &d, &pair, &WEIGHTS), (&p, &d), 0.0, &WEIGHTS)
    }

    #[test]
    fn short_prompts_stay_and_long_ones_go_where_the_decode_engine_is_busy() {
        let rule = auto();
        assert_eq!(found(&rule, 100.0, 0.0, 0.0, false), Some(Stays::ShortUncached));
        assert_eq!(found(&rule, 5000.0, 0.0, 0.0, false), None, "no rate is learnt");
        assert_eq!(
            found(&rule, 5000.0, 0.0, 0.0, true),
            Some(Stays::CheaperAlone),
            "the decode engine is idle"
        );
        assert_eq!(found(&rule, 5000.0, 0.0, 32.0, true), None);
        assert_eq!(found(&rule, 5000.0, 1e6, 32.0, true), Some(Stays::CheaperAlone), "the queue is long");
        let p = PrefillFacts { waiting_tokens: 0.0, others: 0.0, cached_tokens: 0.0, rate: RATE, share: 1.0 };
        let ask = Ask { prompt_tokens: 5000.0 };
        let busy = DecodeFacts { prompt_tokens: 20_000.0, ..idle(0.0) };
        let apart = cost(&ask, &p, &busy, &PairFacts { bytes: None, rate: None, distance: 0.0 }, &WEIGHTS);
        assert_eq!(stays(&rule, &ask, &apart, (&p, &busy), 0.0, &WEIGHTS), None, "prompts wait there too");
        let always = Disaggregation::default();
        assert_eq!(found(&always, 1.0, 1e9, 0.0, true), None);
    }

    proptest! {
        #[test]
        fn a_longer_queue_never_sends_a_request_there(
            tokens in 0.0_f64..1e5, queue in 0.0_f64..1e6, more in 0.0_f64..1e6, sequences in 0.0_f64..100.0,
        ) {
            let (short, long) = (found(&auto(), tokens, queue, sequences, true),
                found(&auto(), tokens, queue + more, sequences, true));
            prop_assert!(short.is_none() || long.is_some());
        }
    }
}

//! Made-up traces: conversations that come at random, whose prompts begin alike, the same for the same seed.

use std::str::FromStr;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use thiserror::Error;

use crate::trace::{Request, Trace};

/// Most requests of a trace.
const MOST: u32 = 10_000_000;

/// What is made up.
#[derive(Clone, Debug, PartialEq)]
pub struct Synthetic {
    /// How many requests there are.
    pub requests: u32,
    /// How many come in a second.
    pub rate: f64,
    /// Tokens of a prompt, or of what a turn adds to it, on average and without the beginning that is shared.
    pub input: u32,
    /// Tokens of an answer, on average.
    pub output: u32,
    /// How much lengths differ: the deviation of their logarithms; all are equal where it is zero.
    pub spread: f64,
    /// Tokens with which prompts begin alike.
    pub shared: u32,
    /// How many such beginnings there are.
    pub beginnings: u32,
    /// How much more often the first ones are used (the exponent of Zipf's law); zero for equally often.
    pub skew: f64,
    /// Requests of a conversation, each of whose prompts goes on where the last one's answer ended.
    pub turns: u32,
    /// Seconds between two turns, on average.
    pub pause: f64,
    /// Tokens of a block, the unit in which prompts are alike.
    pub block: u32,
}

impl Default for Synthetic {
    fn default() -> Self {
        Self {
            requests: 1000,
            rate: 10.0,
            input: 1000,
            output: 200,
            spread: 0.5,
            shared: 1024,
            beginnings: 16,
            skew: 0.0,
            turns: 1,
            pause: 10.0,
            block: 64,
        }
    }
}

/// A description of a workload that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NotAWorkload {
    /// A part is no assignment of one of the names.
    #[error(
        "{part:?} is none of requests, rate, input, output, spread, shared, beginnings, skew, turns, pause, block, with = and a number"
    )]
    Part {
        /// The part.
        part: String,
    },
    /// A number is out of its range.
    #[error("{name} is out of its range")]
    Range {
        /// Whose number.
        name: &'static str,
    },
}

impl FromStr for Synthetic {
    type Err = NotAWorkload;

    fn from_str(text: &str) -> Result<Self, NotAWorkload> {
        let mut made = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let wrong = || NotAWorkload::Part { part: part.to_owned() };
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let value = value.trim();
            let whole = || value.parse::<u32>().map_err(|_| wrong());
            let number = || value.parse::<f64>().map_err(|_| wrong());
            match name.trim() {
                "requests" => made.requests = whole()?,
                "rate" => made.rate = number()?,
                "input" => made.input = whole()?,
                "output" => made.output = whole()?,
                "spread" => made.spread = number()?,
                "shared" => made.shared = whole()?,
                "beginnings" => made.beginnings = whole()?,
                "skew" => made.skew = number()?,
                "turns" => made.turns = whole()?,
                "pause" => made.pause = number()?,
                "block" => made.block = whole()?,
                _ => return Err(wrong()),
            }
        }
        let in_range = [
            ("requests", (1..=MOST).contains(&made.requests)),
            ("rate", (1e-6..=1e6).contains(&made.rate)),
            ("input", (1..=10_000_000).contains(&made.input)),
            ("output", (1..=10_000_000).contains(&made.output)),
            ("spread", (0.0..=3.0).contains(&made.spread)),
            ("shared", made.shared <= 10_000_000),
            ("beginnings", (1..=1_000_000).contains(&made.beginnings)),
            ("skew", (0.0..=5.0).contains(&made.skew)),
            ("turns", (1..=10_000).contains(&made.turns)),
            ("pause", (0.0..=1e6).contains(&made.pause)),
            ("block", (1..=1_000_000).contains(&made.block)),
        ];
        match in_range.iter().find(|(_, fits)| !fits) {
            Some((name, _)) => Err(NotAWorkload::Range { name }),
            None => Ok(made),
        }
    }
}

impl Synthetic {
    /// The trace of a seed.
    #[must_use]
    pub fn trace(&self, seed: u64) -> Trace {
        let mut dice = SmallRng::seed_from_u64(seed);
        let weights: Vec<f64> = (1..=self.beginnings).map(|rank| f64::from(rank).powf(-self.skew)).collect();
        let all: f64 = weights.iter().sum();
        let conversations = self.requests.div_ceil(self.turns);
        let pace = self.rate / f64::from(self.turns);
        let (mut began, mut requests) = (0.0, Vec::with_capacity(self.requests as usize));
        for conversation in 0..conversations {
            if conversation > 0 {
                began += exponential(&mut dice) / pace;
            }
            let mut left = dice.random_range(0.0..1.0) * all;
            let beginning = weights.iter().position(|weight| {
                left -= weight;
                left < 0.0
            });
            let beginning = beginning.unwrap_or(0) as u64;
            let (mut at, mut input) = (began, self.shared);
            for turn in 0..self.turns.min(self.requests - requests.len() as u32) {
                if turn > 0 {
                    at += exponential(&mut dice) * self.pause;
                }
                input += length(&mut dice, self.input, self.spread);
                let output = length(&mut dice, self.output, self.spread);
                let blocks = self.blocks(input, beginning, u64::from(conversation));
                let session = Some(u64::from(conversation));
                requests.push(Request { at: Duration::from_secs_f64(at), input, output, blocks, session });
                input += output;
            }
        }
        requests.sort_by_key(|request| request.at);
        Trace { requests, block_tokens: self.block }
    }

    /// Whole blocks of the shared beginning, then those of the conversation; the last one, which is not whole,
    /// is its own.
    fn blocks(&self, input: u32, beginning: u64, conversation: u64) -> Box<[u64]> {
        let shared = self.shared / self.block;
        let own = (1 << 62) | (conversation << 28);
        let count = input.div_ceil(self.block);
        let id = |at: u32| match at {
            at if at < shared => (beginning << 28) | u64::from(at),
            at if (at + 1) * self.block > input => own | (1 << 27) | u64::from(input),
            at => own | u64::from(at),
        };
        (0..count).map(id).collect()
    }
}

/// Of mean one.
fn exponential(dice: &mut SmallRng) -> f64 {
    -(1.0 - dice.random_range(0.0..1.0_f64)).ln()
}

/// A length with that mean, of the log-normal distribution.
fn length(dice: &mut SmallRng, mean: u32, spread: f64) -> u32 {
    let (one, other) = (1.0 - dice.random_range(0.0..1.0_f64), dice.random_range(0.0..1.0_f64));
    let normal = (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * other).cos();
    let factor = (spread * normal - spread * spread / 2.0).exp();
    (f64::from(mean) * factor).round().clamp(1.0, f64::from(mean) * 20.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many requests begin with which block.
    fn beginnings(trace: &Trace) -> std::collections::BTreeMap<u64, usize> {
        trace.requests.iter().fold(std::collections::BTreeMap::new(), |mut counts, request| {
            *counts.entry(request.blocks[0]).or_default() += 1;
            counts
        })
    }

    #[test]
    fn a_seed_fixes_a_trace_and_its_means_are_as_asked() {
        let made: Synthetic =
            "requests=5000, rate=50, input=500, output=100, shared=128, beginnings=4".parse().unwrap();
        let trace = made.trace(7);
        assert_eq!(trace, made.trace(7));
        assert_ne!(trace, made.trace(8));
        let mean = |of: fn(&Request) -> u32| {
            trace.requests.iter().map(|request| f64::from(of(request))).sum::<f64>() / 5000.0
        };
        assert!((mean(|request| request.input) - 628.0).abs() < 30.0);
        assert!((mean(|request| request.output) - 100.0).abs() < 5.0);
        let last = trace.requests.last().unwrap().at.as_secs_f64();
        assert!((last - 100.0).abs() < 8.0, "{last}");
        assert_eq!(beginnings(&trace).len(), 4);
    }

    #[test]
    fn a_turn_begins_with_the_whole_blocks_of_the_last_one() {
        let made: Synthetic = "requests=40,turns=4,input=300,output=50,shared=0,block=64".parse().unwrap();
        let trace = made.trace(1);
        for session in 0..10 {
            let turns: Vec<&Request> =
                trace.requests.iter().filter(|request| request.session == Some(session)).collect();
            assert_eq!(turns.len(), 4);
            for pair in turns.windows(2) {
                let whole = (pair[0].input / 64) as usize;
                assert_eq!(pair[0].blocks[..whole], pair[1].blocks[..whole]);
                assert!(pair[1].input > pair[0].input + pair[0].output);
            }
        }
    }

    #[test]
    fn skewed_beginnings_are_used_unequally() {
        let made: Synthetic = "requests=4000,beginnings=8,skew=1,shared=64".parse().unwrap();
        let counts = beginnings(&made.trace(3));
        assert!(counts[&0] > 4 * counts[&(7 << 28)], "{counts:?}");
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let part = NotAWorkload::Part { part: "speed=1".to_owned() };
        assert_eq!("rate=1,speed=1".parse::<Synthetic>(), Err(part));
        assert_eq!("rate=0".parse::<Synthetic>(), Err(NotAWorkload::Range { name: "rate" }));
        assert_eq!("".parse::<Synthetic>(), Ok(Synthetic::default()));
    }
}

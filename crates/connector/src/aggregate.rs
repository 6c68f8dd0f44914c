//! The results of an engine's workers as one: an id counts when every worker has reported it.
//!
//! Pure bookkeeping between the workers and the scheduler half.

use std::collections::{BTreeSet, HashMap};

use crate::stats::Stats;
use crate::worker::TransferResults;

/// What one worker has to say after a step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WorkerReport {
    /// What came to an end at the worker.
    pub results: TransferResults,
    /// Blocks whose content did not arrive.
    pub invalid_blocks: BTreeSet<u64>,
    /// Statistics since the last report.
    pub stats: Option<Stats>,
}

/// Unites the reports of several workers, step by step.
#[derive(Debug)]
pub struct Aggregator {
    expected: usize,
    sending: HashMap<String, usize>,
    recving: HashMap<String, usize>,
    /// Receives that failed at some worker and are not complete at all of them.
    failed: BTreeSet<String>,
}

impl Aggregator {
    /// An aggregator that waits for `expected` reports of every id, usually the number of workers.
    pub fn new(expected: usize) -> Self {
        Self { expected, sending: HashMap::new(), recving: HashMap::new(), failed: BTreeSet::new() }
    }

    /// Changes the number of reports for ids that nobody has reported yet.
    pub fn set_expected(&mut self, expected: usize) {
        self.expected = expected;
    }

    /// Unites one step's reports; ids that some worker has not reported yet are held back, invalid
    /// blocks are not.
    pub fn combine(&mut self, reports: impl IntoIterator<Item = WorkerReport>) -> WorkerReport {
        let mut united = WorkerReport::default();
        for report in reports {
            let (expected, results) = (self.expected, report.results);
            count(
                &mut self.sending,
                expected,
                results.finished_sending,
                &mut united.results.finished_sending,
            );
            count(
                &mut self.recving,
                expected,
                results.finished_recving,
                &mut united.results.finished_recving,
            );
            self.failed.extend(results.failed_recving);
            united.invalid_blocks.extend(report.invalid_blocks);
            match (&mut united.stats, report.stats) {
                (Some(all), Some(stats)) => all.merge(&stats),
                (all, stats) => *all = all.take().or(stats),
            }
        }
        let finished: BTreeSet<&String> = united.results.finished_recving.iter().collect();
        let (reported, held) =
            std::mem::take(&mut self.failed).into_iter().partition(|request| finished.contains(request));
        self.failed = held;
        let reported: BTreeSet<String> = reported;
        united.results.failed_recving = reported.into_iter().collect();
        united
    }
}

fn count(
    remaining: &mut HashMap<String, usize>,
    expected: usize,
    reported: Vec<String>,
    finished: &mut Vec<String>,
) {
    for request in reported {
        let left = remaining.entry(request.clone()).or_insert(expected);
        *left = left.saturating_sub(1);
        if *left == 0 {
            remaining.remove(&request);
            finished.push(request);
        }
    }
}

#[cfg(test)]
mod tests;

//! Several workers as one: T10.

use kv_connector::aggregate::{Aggregator, WorkerReport};
use kv_connector::transport::loopback::Fabric;

use crate::support::{Engine, Rank, at, finished, recv};

fn report(rank: &mut Rank, now: u64) -> WorkerReport {
    WorkerReport {
        results: rank.poll(at(now)),
        invalid_blocks: rank.worker.take_invalid_blocks(),
        stats: rank.worker.take_stats(),
    }
}

#[test]
fn t10_both_prefill_ranks_are_told_and_the_request_counts_once() {
    let fabric = Fabric::default();
    let mut p = Engine::new(&fabric, "p").mla(2).ranks();
    p.iter_mut().for_each(|rank| rank.lease("p-request", at(30)));
    let mut d = Engine::new(&fabric, "d").mla(1).rank(0);
    let mut request = recv("p", &[1], &[1], true);
    request.tp_size = 2;
    d.start(&[("r", request)], at(1));
    d.connect(&p, at(1));
    assert_eq!(d.poll(at(1)), finished("r"));
    let mut aggregator = Aggregator::new(2);
    let first = report(&mut p[0], 1);
    assert_eq!(first.results.finished_sending, ["p-request"]);
    let nothing = aggregator.combine([first, WorkerReport::default()]);
    assert!(nothing.results.is_empty());
    let second = report(&mut p[1], 2);
    let united = aggregator.combine([WorkerReport::default(), second]);
    assert_eq!(united.results.finished_sending, ["p-request"]);
    for rank in &mut p {
        assert_eq!(rank.worker.leases().count(), 0);
        assert!(rank.poll(at(31)).is_empty(), "both maps are clean: nothing expires");
    }
}

use super::*;

fn report(sent: &[&str], received: &[&str], failed: &[&str]) -> WorkerReport {
    let names = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
    WorkerReport {
        results: TransferResults {
            finished_sending: names(sent),
            finished_recving: names(received),
            failed_recving: names(failed),
            received: Vec::new(),
        },
        ..WorkerReport::default()
    }
}

#[test]
fn an_id_counts_when_every_worker_has_reported_it() {
    let mut aggregator = Aggregator::new(2);
    assert_eq!(
        aggregator.combine([report(&["a"], &["b"], &[]), report(&[], &[], &[])]),
        report(&[], &[], &[])
    );
    assert_eq!(
        aggregator.combine([report(&["c"], &[], &[]), report(&["a", "c"], &[], &[])]),
        report(&["a", "c"], &[], &[])
    );
    assert_eq!(
        aggregator.combine([report(&[], &[], &[]), report(&[], &["b"], &[])]),
        report(&[], &["b"], &[])
    );
    assert_eq!(aggregator.combine([report(&["a"], &[], &[])]), report(&[], &[], &[]), "counted afresh");
}

#[test]
fn a_failure_is_kept_until_the_receive_is_complete_everywhere() {
    let mut aggregator = Aggregator::new(2);
    assert_eq!(
        aggregator.combine([report(&[], &["r"], &["r"]), report(&[], &[], &[])]),
        report(&[], &[], &[])
    );
    assert_eq!(aggregator.combine([report(&[], &["r"], &[])]), report(&[], &["r"], &["r"]));
    assert_eq!(
        aggregator.combine([report(&[], &["r"], &[]), report(&[], &["r"], &[])]),
        report(&[], &["r"], &[])
    );
}

#[test]
fn invalid_blocks_pass_at_once_and_statistics_are_joined() {
    let mut aggregator = Aggregator::new(3);
    let with = |blocks: &[u64], failures: usize| WorkerReport {
        invalid_blocks: blocks.iter().copied().collect(),
        stats: (failures > 0).then(|| Stats { num_failed_transfers: vec![1; failures], ..Stats::default() }),
        ..WorkerReport::default()
    };
    let united = aggregator.combine([with(&[1, 2], 0), with(&[2, 3], 2), with(&[], 1)]);
    assert_eq!(united, with(&[1, 2, 3], 3));
}

#[test]
fn the_number_of_reports_can_change_for_new_ids() {
    let mut aggregator = Aggregator::new(2);
    aggregator.combine([report(&["old"], &[], &[])]);
    aggregator.set_expected(1);
    assert_eq!(aggregator.combine([report(&["old", "new"], &[], &[])]), report(&["old", "new"], &[], &[]));
}

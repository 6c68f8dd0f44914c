//! Context parallelism: T6, and slices of a context that are dealt out to ranks.

use std::collections::BTreeSet;

use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::scheduler::StepMeta;
use kv_connector::topology::{WorkerRanks, transfer_rank};
use kv_connector::transport::loopback::Fabric;
use kv_connector::worker::WorkerConfig;

use crate::rows;
use crate::support::{Engine, Rank, at, finished, notifications, recv};

/// One rank of a prefill engine with prefill-context parallelism.
fn t6(pcp_rank: u32, pcp_size: u32, dcp_size: u32, tracked: bool) {
    let place = transfer_rank(WorkerRanks { tp_rank: 0, tp_size: 1, pcp_rank, pcp_size, dcp_size });
    let expected = if dcp_size > 1 { (pcp_rank, pcp_size) } else { (0, 1) };
    assert_eq!((place.rank, place.size, place.participates), (expected.0, expected.1, tracked));
    let fabric = Fabric::default();
    let edit = move |config: &mut WorkerConfig| {
        (config.tp_rank, config.tp_size, config.serves) = (place.rank, place.size, place.participates);
        (config.pcp_size, config.dcp_size) = (pcp_size, dcp_size);
    };
    let mut p = Engine::new(&fabric, "p").mla(1).edit(&edit).rank(0);
    assert_eq!(p.worker.published_payload().is_some(), tracked);
    let NixlAgentMetadata::V14(metadata) = p.worker.agent_metadata() else { panic!("v14") };
    assert_eq!((metadata.pcp_size, metadata.dcp_size), (i64::from(pcp_size), i64::from(dcp_size)));
    let meta = StepMeta {
        reqs_in_batch: BTreeSet::from(["r".to_owned()]),
        reqs_to_send: vec![("r".to_owned(), at(30))],
        ..StepMeta::default()
    };
    p.worker.start_load(&meta, at(1)).unwrap();
    assert_eq!(p.worker.leases().count(), usize::from(tracked));
    if tracked {
        assert!(p.poll(at(1)).is_empty());
        // A decode rank that has read it is the real end.
        let mut d = Engine::new(&fabric, "d").mla(1).rank(0);
        let mut request = recv("p", &[], &[1], false);
        (request.remote.request_id, request.tp_size, request.dcp_size) =
            ("r".to_owned(), place.size, dcp_size);
        d.start(&[("d", request)], at(1));
        let job = d.job();
        let ranks: Vec<Rank> = (0..place.size)
            .map(|rank| {
                let edit = move |config: &mut WorkerConfig| {
                    edit(config);
                    config.tp_rank = rank;
                };
                Engine::new(&fabric, "p").mla(1).edit(&edit).rank(0)
            })
            .collect();
        let mut ranks = ranks;
        std::mem::swap(&mut ranks[place.rank as usize], &mut p);
        d.answer(&job, &ranks, at(1)).unwrap();
        d.step(at(1));
        assert_eq!(ranks[place.rank as usize].poll(at(2)).finished_sending, ["r"]);
        return;
    }
    assert_eq!(p.poll(at(1)).finished_sending, ["r"], "reported at once");
    assert!(p.poll(at(40)).is_empty(), "and once");
    p.worker.start_load(&meta, at(1)).unwrap();
    assert!(p.worker.poll_serving(at(1)).unwrap().finished_sending.is_empty());
}

rows! {
    t6_1_the_first_copy_of_a_context_serves => t6(0, 2, 1, true);
    t6_2_the_second_copy_of_a_context_does_not => t6(1, 2, 1, false);
    t6_3_the_first_shard_of_two_serves => t6(0, 2, 2, true);
    t6_4_the_second_shard_of_two_serves => t6(1, 2, 2, true);
    t6_5_shard_0_of_four_serves => t6(0, 4, 4, true);
    t6_6_shard_1_of_four_serves => t6(1, 4, 4, true);
    t6_7_shard_2_of_four_serves => t6(2, 4, 4, true);
    t6_8_shard_3_of_four_serves => t6(3, 4, 4, true);
}

/// An engine with latent attention whose context of `blocks` blocks is dealt out to its ranks.
fn dealt(fabric: &Fabric, name: &str, tp: u32, dcp: u32) -> Vec<Rank> {
    let edit = move |config: &mut WorkerConfig| config.dcp_size = dcp;
    Engine::new(fabric, name).mla(tp).edit(&edit).ranks()
}

/// The blocks that rank `rank` of `dcp` holds of a context: every dcp-th, at ids of its own.
fn share(rank: u32, dcp: u32, blocks: u64) -> Vec<u64> {
    (0..blocks).filter(|position| position % u64::from(dcp) == u64::from(rank % dcp)).collect()
}

/// Moves a context of 11 blocks between engines that deal it out differently.
fn moves(d_size: (u32, u32), p_size: (u32, u32), cached: u64) {
    let fabric = Fabric::default();
    let total = 11;
    let mut p = dealt(&fabric, "p", p_size.0, p_size.1);
    for (index, rank) in (0..).zip(&mut p) {
        // Position in the context is the fill value; the block id is the place in the share.
        for (id, position) in (0..).zip(share(index, p_size.1, total)) {
            let base = rank.memory.base_addresses();
            for base in base {
                rank.memory.write(base + id * 16, &[position as u8 + 1; 16]).unwrap();
            }
        }
        rank.lease("p-request", at(30));
    }
    for (index, mut rank) in (0..).zip(dealt(&fabric, "d", d_size.0, d_size.1)) {
        let own = share(index, d_size.1, total);
        let cached = (cached as usize).min(own.len());
        let local: Vec<u64> = (cached as u64..own.len() as u64).collect();
        let longest = share(0, p_size.1, total).len() as u64;
        let mut request = recv("p", &local, &(0..longest).collect::<Vec<_>>(), true);
        (request.tp_size, request.dcp_size) = p_size;
        request.local_cached_blocks = vec![cached];
        rank.start(&[("r", request)], at(1));
        rank.connect(&p, at(1));
        assert_eq!(rank.poll(at(1)), finished("r"), "{d_size:?} {p_size:?} {cached}");
        for (id, position) in (0..).zip(own).skip(cached) {
            let bytes = rank.memory.read(rank.memory.base_addresses()[0] + id * 16, 16).unwrap();
            assert_eq!(bytes, [position as u8 + 1; 16], "{d_size:?} {p_size:?} {cached} rank {index}");
        }
    }
    for rank in &mut p {
        assert_eq!(rank.poll(at(1)).finished_sending, ["p-request"], "{d_size:?} {p_size:?} {cached}");
    }
}

#[test]
fn dealt_out_contexts_arrive_whole_and_every_prefill_rank_frees() {
    for cached in [0, 1, 2, 3] {
        for sizes in [
            ((1, 1), (4, 4)),
            ((2, 2), (4, 4)),
            ((4, 4), (4, 4)),
            ((4, 4), (2, 2)),
            ((4, 4), (1, 1)),
            ((2, 1), (4, 4)),
        ] {
            moves(sizes.0, sizes.1, cached);
        }
    }
}

#[test]
fn a_rank_whose_slice_is_empty_tells_the_prefill_and_still_reports() {
    let fabric = Fabric::default();
    let p = dealt(&fabric, "p", 4, 4);
    let mut ranks = dealt(&fabric, "d", 2, 2);
    let rank = &mut ranks[0];
    rank.faults.record();
    // One block at position 3 of the rank's share: only remote rank 2 has it.
    let mut request = recv("p", &[6], &[0, 1], true);
    (request.tp_size, request.dcp_size, request.local_cached_blocks) = (4, 4, vec![3]);
    rank.start(&[("r", request)], at(1));
    rank.connect(&p, at(1));
    let told = notifications(&rank.faults.take_journal());
    assert_eq!(told, [("p-0".to_owned(), "p-request:1".to_owned())]);
    assert_eq!(rank.poll(at(1)), finished("r"));
}

//! What received blocks still need: block sizes, host buffers, uncovered tails.

use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::scheduler::StepMeta;
use kv_connector::transport::loopback::Fabric;
use kv_connector::worker::{RankReply, Received, ReceivedGroup, WorkerConfig};

use crate::support::{Engine, HEAD, Rank, at, engine, recv};

/// A prefill rank whose blocks hold half as many tokens, so half as many bytes.
fn half_blocks(fabric: &Fabric) -> Rank {
    Engine::new(fabric, "p").tp(1, 4).edit(&|config: &mut WorkerConfig| config.block_size = 8).rank(0)
}

#[test]
fn smaller_remote_blocks_fill_local_ones_in_order_and_the_tail_is_named() {
    let fabric = Fabric::default();
    let p = [half_blocks(&fabric)];
    for block in 0..6 {
        for base in p[0].memory.base_addresses() {
            p[0].memory.write(base + block * 4 * HEAD, &[block as u8 + 1; 4 * HEAD as usize]).unwrap();
        }
    }
    let mut d = engine(&fabric, "d");
    d.start(&[("r", recv("p", &[3, 5], &[1, 2, 4], true))], at(1));
    d.connect(&p, at(1));
    let results = d.poll(at(1));
    assert_eq!(results.finished_recving, ["r"]);
    let group = ReceivedGroup {
        group: 0,
        blocks: vec![3, 5],
        block_size_ratio: 2,
        covered_sub_blocks: 3,
        regroup: true,
        permute: false,
    };
    let expected = Received { request: "r".to_owned(), groups: vec![group], ..Received::default() };
    assert_eq!(results.received, [expected]);
    let base = d.memory.base_addresses()[0];
    let half = |block: u64, half: u64| d.memory.read(base + (block * 8 + half * 4) * HEAD, 1).unwrap()[0];
    assert_eq!([half(3, 0), half(3, 1), half(5, 0), half(5, 1)], [2, 3, 5, 0]);
}

#[test]
fn equal_blocks_need_nothing() {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    d.start(&[("r", recv("p", &[3], &[1], true))], at(1));
    d.connect(&p, at(1));
    assert!(d.poll(at(1)).received.is_empty());
}

#[test]
fn prefix_hits_take_the_last_remote_blocks() {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    (0..5).for_each(|block| p[0].fill(block));
    d.start(&[("r", recv("p", &[7, 8], &[0, 1, 2, 4], true))], at(1));
    d.connect(&p, at(1));
    assert_eq!(d.poll(at(1)).finished_recving, ["r"]);
    assert!(d.holds(7, 2) && d.holds(8, 4));
}

#[test]
fn logical_blocks_are_expanded_by_each_side_with_its_own_ratio() {
    let fabric = Fabric::default();
    let two = |config: &mut WorkerConfig| config.physical_blocks_per_logical = 2;
    let p = [Engine::new(&fabric, "p").edit(&two).rank(0)];
    (0..8).for_each(|block| p[0].fill(block));
    let mut d = engine(&fabric, "d");
    d.start(&[("r", recv("p", &[10, 11, 12], &[0, 2], true))], at(1));
    d.connect(&p, at(1));
    let results = d.poll(at(1));
    assert!(results.failed_recving.is_empty());
    assert!(d.holds(10, 1) && d.holds(11, 4) && d.holds(12, 5), "the last three of kernel blocks 0 1 4 5");
    assert_eq!(results.received[0].groups[0].covered_sub_blocks, 3);
    assert!(!results.received[0].groups[0].regroup);
}

#[test]
fn blocks_to_save_are_kernel_blocks() {
    let fabric = Fabric::default();
    let two = |config: &mut WorkerConfig| config.physical_blocks_per_logical = 2;
    let p = Engine::new(&fabric, "p").edit(&two).rank(0);
    let meta = StepMeta { reqs_to_save: vec![("r".to_owned(), vec![vec![1, 3]])], ..StepMeta::default() };
    assert_eq!(p.worker.blocks_to_save(&meta), [("r".to_owned(), vec![2, 3, 6, 7])]);
}

/// Latent caches whose layers fall into other cache groups at the peer are read region by region.
#[test]
fn other_cache_groups_at_the_peer_are_read_by_region_and_the_rest_is_zeroed() {
    let fabric = Fabric::default();
    let p = Engine::new(&fabric, "p").mla(1).rank(0);
    (0..5).for_each(|block| p.fill(block));
    let mut d = Engine::new(&fabric, "d").mla(1).rank(0);
    let mut request = recv("p", &[7, 8, 9], &[1, 2, 3], true);
    request.remote.num_tokens = Some(32);
    d.start(&[("r", request)], at(1));
    let job = d.job();
    let NixlAgentMetadata::V14(mut metadata) = p.worker.agent_metadata() else { panic!("v14") };
    metadata.region_group_ids = Some(vec![0, -1]);
    let payload = NixlHandshakePayload {
        compatibility_hash: "hash".to_owned(),
        agent_metadata_bytes: NixlAgentMetadata::V14(metadata).encode(),
    };
    let reply = RankReply { pp_rank: 0, tp_rank: 0, payload: payload.encode(), clock: None };
    d.worker.complete_handshake(&job.engine_id, Ok(vec![reply]), at(1)).unwrap();
    d.step(at(1));
    let results = d.poll(at(1));
    assert_eq!((results.finished_recving, results.failed_recving), (vec!["r".to_owned()], vec![]));
    assert!(d.holds(7, 1) && d.holds(8, 2) && d.holds(9, 3));
    assert!(results.received.is_empty(), "all was covered");
}

use kv_connector::regions::Layout;

use super::*;
use crate::config::{Attention, EngineConfig};

fn small() -> EngineConfig {
    EngineConfig { num_blocks: 16, block_size: 4, kv_heads: 4, ..EngineConfig::default() }
}

fn build(config: &EngineConfig) -> KvCache {
    let geometry = Geometry::of(config);
    let memory = || KvMemory::allocate(&vec![geometry.region_bytes(); geometry.regions]);
    KvCache::new((0..geometry.ranks).map(|_| memory()).collect(), geometry)
}

fn cache() -> KvCache {
    build(&small())
}

fn digest(cache: &KvCache, blocks: &[BlockId], positions: usize) -> u64 {
    cache.read_context(blocks, ContextDigest::default(), positions).unwrap().entropy(0)
}

#[test]
fn content_does_not_depend_on_where_or_in_how_many_pieces() {
    let cache = cache();
    let tokens: Vec<Token> = (10..20).collect();
    cache.compute(&[1, 2, 3], 0, &tokens).unwrap();
    cache.compute(&[7, 5, 9], 0, &tokens[..3]).unwrap();
    cache.compute(&[7, 5, 9], 3, &tokens[3..6]).unwrap();
    cache.compute(&[7, 5, 9], 6, &tokens[6..]).unwrap();
    assert_eq!(digest(&cache, &[1, 2, 3], 10), digest(&cache, &[7, 5, 9], 10));
}

#[test]
fn reading_in_steps_equals_reading_at_once() {
    let cache = cache();
    cache.compute(&[1, 2, 3], 0, &[1; 11]).unwrap();
    let part = cache.read_context(&[1, 2, 3], ContextDigest::default(), 5).unwrap();
    let all = cache.read_context(&[1, 2, 3], part, 11).unwrap();
    assert_eq!(all, cache.read_context(&[1, 2, 3], ContextDigest::default(), 11).unwrap());
}

fn every_byte_matters(cache: &KvCache) {
    cache.compute(&[1, 2], 0, &[5; 8]).unwrap();
    let clean = digest(cache, &[1, 2], 8);
    for rank in &cache.ranks {
        for (region, block) in (0..cache.geometry.regions).flat_map(|region| [(region, 1), (region, 2)]) {
            for index in 0..cache.geometry.block_bytes() {
                let address = cache.address(rank, region, block) + index as u64;
                let byte = rank.memory.read(address, 1).unwrap()[0];
                rank.memory.write(address, &[byte ^ 1]).unwrap();
                assert_ne!(digest(cache, &[1, 2], 8), clean, "region {region} block {block} byte {index}");
                rank.memory.write(address, &[byte]).unwrap();
            }
        }
    }
}

#[test]
fn every_byte_of_every_rank_matters() {
    for tp_size in [1, 2, 4] {
        every_byte_matters(&build(&EngineConfig { tp_size, ..small() }));
        every_byte_matters(&build(&EngineConfig { tp_size, kv_heads: 2, ..small() }));
        every_byte_matters(&build(&EngineConfig { tp_size, attention: Attention::Mla, ..small() }));
    }
}

#[test]
fn topology_layout_and_block_size_do_not_change_what_is_read() {
    let tokens: Vec<Token> = (10..20).collect();
    let read = |config: &EngineConfig| {
        let cache = build(config);
        cache.compute(&[3, 1, 2, 5, 6, 7], 0, &tokens).unwrap();
        digest(&cache, &[3, 1, 2, 5, 6, 7], 10)
    };
    for attention in [Attention::Full, Attention::Mla] {
        let expected = read(&EngineConfig { attention, ..small() });
        for tp_size in [1, 2, 4, 8] {
            for kv_layout in [Layout::Lbhnc, Layout::Lbnhc] {
                for block_size in [2, 4, 8] {
                    let config = EngineConfig { attention, tp_size, block_size, ..small() };
                    assert_eq!(read(&EngineConfig { kv_layout: Some(kv_layout), ..config }), expected);
                }
            }
        }
    }
}

#[test]
fn received_pieces_are_regrouped_and_the_rest_is_zeroed() {
    let config = EngineConfig { num_blocks: 4, layers: 1, kv_heads: 2, head_dim: 1, dtype: 1, ..small() };
    let group = ReceivedGroup {
        blocks: vec![1, 2],
        block_size_ratio: 2,
        covered_sub_blocks: 3,
        regroup: true,
        ..ReceivedGroup::default()
    };
    for permute in [false, true] {
        let kv_layout = Some(if permute { Layout::Lbnhc } else { Layout::Lbhnc });
        let cache = build(&EngineConfig { kv_layout, ..config.clone() });
        let rank = &cache.ranks[0];
        // Two bytes per head and token, named by the head and token that they belong to.
        let piece = |first: u8| [first, first + 1, first + 10, first + 11].map(|name| [name; 2]).concat();
        rank.memory.write(rank.bases[0] + 16, &[piece(0), piece(2), piece(4), vec![99; 8]].concat()).unwrap();
        let group = ReceivedGroup { permute, ..group.clone() };
        let received = Received { groups: vec![group], ..Received::default() };
        cache.finish_received(0, &received).unwrap();
        let names: Vec<u8> =
            rank.memory.read(rank.bases[0] + 16, 32).unwrap().chunks(2).map(|pair| pair[0]).collect();
        let expected: [u8; 16] = match permute {
            false => [0, 1, 2, 3, 10, 11, 12, 13, 4, 5, 0, 0, 14, 15, 0, 0],
            true => [0, 10, 1, 11, 2, 12, 3, 13, 4, 14, 5, 15, 0, 0, 0, 0],
        };
        assert_eq!(names, expected);
    }
}

#[test]
fn stale_predecessor_spoils_what_is_computed_after_it() {
    let cache = cache();
    cache.compute(&[1, 2], 0, &[5, 5, 5, 5, 6, 6, 6, 6]).unwrap();
    let clean = cache.read_block(0, 2).unwrap();
    let stale = vec![vec![0x55; cache.geometry.block_bytes()]];
    cache.write_block(0, 1, &stale).unwrap();
    cache.compute(&[1, 2], 4, &[6; 4]).unwrap();
    assert_ne!(clean, cache.read_block(0, 2).unwrap());
}

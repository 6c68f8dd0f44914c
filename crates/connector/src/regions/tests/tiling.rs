//! Bytes really moved by descriptors: every decode rank ends with exactly its heads of every block.

use proptest::prelude::*;

use super::super::descriptors::{
    local_descriptors as local_list, remote_descriptors, split_local_descriptors,
};
use super::register::{cache, views};
use super::*;
use crate::topology::handshake_ranks;

/// One rank's cache with its registered regions.
struct Memory {
    base: u64,
    bytes: Vec<u8>,
    views: Vec<CacheView>,
    regions: Vec<Region>,
}

#[derive(Debug, Clone, Copy)]
struct Model {
    layout: Layout,
    layers: u64,
    tokens: u64,
    content: u64,
}

const BASE: u64 = 1 << 20;

/// A byte that names its layer, head, token of the sequence and place in the content.
fn mark(layer: u64, head: u64, token: u64, byte: u64) -> u8 {
    u8::try_from((layer * 97 + head * 31 + token * 7 + byte) % 251 + 1).unwrap()
}

impl Memory {
    fn new(model: Model, heads: u64, blocks: u64) -> Self {
        let page = heads * model.tokens * model.content;
        let views =
            views(model.layout, BASE, model.layers, [blocks, heads, model.tokens, model.content], page);
        let len = model.layers * blocks * page;
        let caches: Vec<LayerCache> = views
            .iter()
            .enumerate()
            .map(|(index, view)| {
                cache(&format!("layers.{index}"), LayerKind::Attention, page, view.clone(), (BASE, len))
            })
            .collect();
        let regions = register(&caches, &RegisterConfig::new(blocks)).unwrap().regions;
        Self { base: BASE, bytes: vec![0; usize::try_from(len).unwrap()], views, regions }
    }

    fn at(&self, layer: usize, place: [u64; 4]) -> usize {
        let view = &self.views[layer];
        let offset: u64 = place.iter().zip(&view.strides).map(|(index, stride)| index * stride).sum();
        usize::try_from(view.address + offset - self.base).unwrap()
    }

    /// Visits every byte of the given blocks with its mark.
    fn each(&self, blocks: &[u64], first_head: u64, mut visit: impl FnMut(usize, u8)) {
        for (layer, view) in self.views.iter().enumerate() {
            for (position, block) in (0..).zip(blocks) {
                for head in 0..view.shape[1] {
                    for token in 0..view.shape[2] {
                        for byte in 0..view.shape[3] {
                            let at = self.at(layer, [*block, head, token, byte]);
                            let sequence_token = position * view.shape[2] + token;
                            visit(at, mark(layer as u64, first_head + head, sequence_token, byte));
                        }
                    }
                }
            }
        }
    }
}

fn geometry(rank: u32, tp: u32, heads: u32, model: Model, memory: &Memory) -> LocalGeometry {
    let mut local = side(rank, tp, heads, memory.regions.clone());
    local.layout = model.layout;
    local.block_size = model.tokens;
    local
}

fn rank_announcement(model: Model, memory: &Memory) -> NixlAgentMetadata {
    let int = |value: u64| i64::try_from(value).unwrap();
    NixlAgentMetadata::V14(Box::new(AgentMetadataV14 {
        engine_id: "prefill".to_owned(),
        kv_caches_base_addr: memory.regions.iter().map(|region| region.base_address).collect(),
        num_blocks: int(memory.regions[0].num_blocks),
        block_lens: memory.regions.iter().map(|region| int(region.block_len)).collect(),
        block_strides: memory.regions.iter().map(|region| int(region.block_stride)).collect(),
        kv_cache_layout: model.layout.as_str().to_owned(),
        block_size: int(model.tokens),
        attn_backend_name: "FLASH_ATTN".to_owned(),
        region_names: Some(memory.regions.iter().map(|region| region.name.clone()).collect()),
        ..AgentMetadataV14::default()
    }))
}

/// First head and number of heads of a rank.
fn share(rank: u32, tp: u32, heads: u32) -> (u64, u64) {
    (u64::from(rank * heads / tp), u64::from((heads / tp).max(1)))
}

/// Reads blocks `[2, 0]` of every source into the reader's blocks and compares all bytes.
fn transfer(model: Model, remote_tokens: u64, heads: u32, (local_tp, remote_tp): (u32, u32)) {
    let ratio = model.tokens / remote_tokens;
    let remote_model = Model { tokens: remote_tokens, ..model };
    let remote_blocks: Vec<u64> = (0..2 * ratio).rev().collect();
    let prefill: Vec<Memory> = (0..remote_tp)
        .map(|rank| {
            let (first, count) = share(rank, remote_tp, heads);
            let mut memory = Memory::new(remote_model, count, 2 * ratio + 1);
            let mut marks = Vec::new();
            memory.each(&remote_blocks, first, |at, mark| marks.push((at, mark)));
            marks.into_iter().for_each(|(at, mark)| memory.bytes[at] = mark);
            memory
        })
        .collect();
    for rank in 0..local_tp {
        let (first, count) = share(rank, local_tp, heads);
        let mut memory = Memory::new(model, count, 4);
        let local = geometry(rank, local_tp, heads, model, &memory);
        let sizes = ParallelSizes::tp(remote_tp);
        let list = local_list(&local, ratio).unwrap();
        let mut known: Option<PeerGeometry> = None;
        let mut written = vec![0_u32; memory.bytes.len()];
        for source in handshake_ranks(rank, local.topology.sizes, sizes).unwrap() {
            let remote = &prefill[source as usize];
            let request = PeerRequest { engine_id: "prefill", sizes, known: known.as_ref() };
            let peer = validate_peer(&local, &request, &rank_announcement(remote_model, remote)).unwrap();
            let remotes = remote_descriptors(&local, &peer).unwrap();
            let Some(slot) = peer.mapping.source_ranks.iter().position(|rank| *rank == source) else {
                continue;
            };
            let locals = match peer.mapping.needs_split(false) {
                true => {
                    split_local_descriptors(&local, &peer.mapping, &list, ratio).unwrap().swap_remove(slot)
                }
                false => list.clone(),
            };
            let into = split_into_remote_blocks(
                &local.groups,
                &[vec![1, 3]],
                std::slice::from_ref(&remote_blocks),
                ratio,
            )
            .unwrap();
            let into = DescriptorIndex::local(&local, ratio).unwrap().ids(&into).unwrap();
            let from = DescriptorIndex::remote(&local, &peer)
                .unwrap()
                .ids(std::slice::from_ref(&remote_blocks))
                .unwrap();
            assert_eq!(into.len(), from.len());
            for (into, from) in into.iter().zip(&from) {
                let (into, from) = (locals[*into as usize], remotes[*from as usize]);
                assert_eq!(into.len, from.len);
                let (into_at, from_at) = ((into.address - BASE) as usize, (from.address - BASE) as usize);
                let len = into.len as usize;
                memory.bytes[into_at..into_at + len].copy_from_slice(&remote.bytes[from_at..from_at + len]);
                written[into_at..into_at + len].iter_mut().for_each(|times| *times += 1);
            }
            known = Some(peer);
        }
        if ratio > 1 && model.layout.is_block_contiguous() {
            regroup(&mut memory, model, count, ratio);
        }
        let mut expected = vec![0; memory.bytes.len()];
        memory.each(&[1, 3], first, |at, mark| expected[at] = mark);
        assert_eq!(memory.bytes, expected, "rank {rank}");
        for (at, times) in written.iter().enumerate() {
            assert_eq!(*times, u32::from(expected[at] != 0), "byte {at} of rank {rank}");
        }
    }
}

fn regroup(memory: &mut Memory, model: Model, heads: u64, ratio: u64) {
    let size = |value: u64| usize::try_from(value).unwrap();
    let shape = super::super::convert::BlockShape {
        heads: size(heads),
        tokens: size(model.tokens),
        content_bytes: size(model.content),
    };
    for layer in 0..memory.views.len() {
        for block in [1, 3] {
            let at = memory.at(layer, [block, 0, 0, 0]);
            let block = &mut memory.bytes[at..at + shape.bytes().unwrap()];
            super::super::convert::regroup_heads(block, shape, size(ratio)).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn equal_sizes_move_every_layout(layout in 2_usize..8, layers in 1_u64..4, tp in 1_u32..3, heads in 1_u32..3, tokens in 1_u64..4, content in 1_u64..4) {
        let model = Model { layout: Layout::ALL[layout], layers, tokens, content };
        transfer(model, tokens, heads * tp, (tp, tp));
    }

    #[test]
    fn sources_and_slices_tile_the_remote_content(
        block_outermost in any::<bool>(), layers in 1_u64..4, power in (0_u32..3, 0_u32..3), heads in 0_u32..4,
        tokens in 1_u64..4, content in 1_u64..4,
    ) {
        let layout = if block_outermost { Layout::Blhnc } else { Layout::Lbhnc };
        let (local_tp, remote_tp) = (1 << power.0, 1 << power.1);
        // More remote ranks than heads are refused unless the local side is at least as large.
        let heads: u32 = 1 << heads;
        prop_assume!(local_tp >= remote_tp || remote_tp <= heads);
        transfer(Model { layout, layers, tokens, content }, tokens, heads, (local_tp, remote_tp));
    }

    #[test]
    fn smaller_remote_blocks_are_put_together(
        token_major in any::<bool>(), layers in 1_u64..3, power in (0_u32..3, 0_u32..3), ratio in 2_u64..5,
        tokens in 1_u64..3, content in 1_u64..4,
    ) {
        let (local_tp, remote_tp) = (1_u32 << power.0.max(power.1), 1 << power.1);
        let remote_tp = if token_major { local_tp } else { remote_tp };
        let layout = if token_major { Layout::Lbnhc } else { Layout::Lbhnc };
        transfer(Model { layout, layers, tokens: tokens * ratio, content }, tokens, 4, (local_tp, remote_tp));
    }
}

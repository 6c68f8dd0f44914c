use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::v2::{DenseCache, DenseError, KvOrder, register_dense};
use super::*;

/// Views of `layers` layers in one allocation; `page` is what a block of one layer takes.
pub(super) fn views(
    layout: Layout,
    base: u64,
    layers: u64,
    [blocks, heads, tokens, content]: [u64; 4],
    page: u64,
) -> Vec<CacheView> {
    let mut strides = layout.strides([layers, blocks, heads, tokens, content], 1).unwrap();
    if page != heads * tokens * content {
        assert_eq!(layout, Layout::Blhnc, "only this layout is padded here");
        strides[Axis::Layer as usize] = page;
        strides[Axis::Block as usize] = page * layers;
    }
    (0..layers)
        .map(|layer| CacheView {
            address: base + layer * strides[Axis::Layer as usize],
            shape: vec![blocks, heads, tokens, content],
            strides: strides[1..].to_vec(),
            element_bytes: 1,
        })
        .collect()
}

pub(super) fn cache(
    name: &str,
    kind: LayerKind,
    page_bytes: u64,
    view: CacheView,
    (base, len): (u64, u64),
) -> LayerCache {
    LayerCache {
        name: name.to_owned(),
        spec: Some(LayerSpec { kind, group: 0, page_bytes }),
        view,
        allocation: Allocation { base, len, device: 0, memory: MemoryType::Dram, host_resident: false },
    }
}

/// The caches of a case of `descriptors.json`.
fn caches(case: &Value) -> Vec<LayerCache> {
    let layout = Layout::parse(case["layout"].as_str().unwrap()).unwrap();
    let mut specs = BTreeMap::new();
    for (index, group) in (0..).zip(list(&case["groups"])) {
        let kind = match group["spec"].as_str().unwrap() {
            "MLAAttentionSpec" => LayerKind::Latent,
            _ => LayerKind::Attention,
        };
        let page_bytes = group["page_size_bytes"].as_u64().unwrap();
        let shape: [u64; 4] = numbers(&group["shape_BHNC_bytes"]).try_into().unwrap();
        for name in crate::golden::strings(&group["layers"]) {
            specs.insert(name, (LayerSpec { kind, group: index, page_bytes }, shape));
        }
    }
    let mut caches = Vec::new();
    for allocation in list(&case["allocations_symbolic_base"]) {
        let (base, len) = (allocation["base"].as_u64().unwrap(), allocation["bytes"].as_u64().unwrap());
        let slots = list(&allocation["layers"]);
        let names: Vec<Vec<String>> = slots
            .iter()
            .map(|slot| {
                slot.as_str().map_or_else(|| crate::golden::strings(slot), |name| vec![name.to_owned()])
            })
            .collect();
        let (spec, shape) = specs[&names[0][0]];
        let views = views(layout, base, slots.len() as u64, shape, spec.page_bytes);
        for (aliases, view) in names.iter().zip(views) {
            for name in aliases {
                let (spec, _) = specs[name];
                let mut cache = cache(name, spec.kind, spec.page_bytes, view.clone(), (base, len));
                cache.spec = Some(spec);
                caches.push(cache);
            }
        }
    }
    caches
}

#[test]
fn registrations_equal_vllm() {
    let vectors = vectors("descriptors.json");
    let cases = list(&vectors["register"]);
    assert_eq!(cases.len(), 19);
    for case in cases {
        let name = format!("{} {}", case["name"], case["layout"]);
        let mut config = RegisterConfig::new(case["num_blocks"].as_u64().unwrap());
        config.blocks_per_logical = case["ppl"].as_u64().unwrap();
        let out = register(&caches(case), &config).unwrap();
        let ranges: Vec<_> = out.ranges.iter().map(|range| (range.start, range.len, range.device)).collect();
        let expected: Vec<_> = list(&case["nixl_registered"])
            .iter()
            .map(|entry| {
                let number = |index: usize| entry[index].as_u64().unwrap();
                (number(0), number(1), number(2))
            })
            .collect();
        assert_eq!(ranges, expected, "{name}");
        assert!(out.ranges.iter().all(|range| range.memory.as_str() == case["memory_type"]));
        let each = |pick: fn(&Region) -> u64| out.regions.iter().map(pick).collect::<Vec<_>>();
        assert_eq!(each(|region| region.base_address), numbers(&case["region_base_addrs"]), "{name}");
        assert_eq!(each(|region| region.block_len), numbers(&case["block_lens"]), "{name}");
        assert_eq!(each(|region| region.block_stride), numbers(&case["block_strides"]), "{name}");
        assert_eq!(each(|region| region.num_blocks), numbers(&case["region_num_blocks"]), "{name}");
        let names: Vec<String> = out.regions.iter().map(|region| region.name.clone()).collect();
        assert_eq!(names, crate::golden::strings(&case["region_names"]), "{name}");
        let groups: Vec<i64> = out.regions.iter().map(|region| region.group).collect();
        assert_eq!(groups, signed(&case["region_group_ids"]), "{name}");
        let flags: Vec<bool> =
            list(&case["region_is_mla"]).iter().map(|flag| flag.as_bool().unwrap()).collect();
        assert_eq!(out.replicated, flags, "{name}");
        let local = side(0, 1, 1, out.regions);
        let list = super::super::descriptors::local_descriptors(&local, 1).unwrap();
        assert_eq!(list.len() as u64, case["num_descs"].as_u64().unwrap());
        assert_eq!(list, triples(&case["local_descs"]), "{name}");
    }
}

/// Every byte address of block `block` of a view.
fn block_bytes(view: &CacheView, block: u64) -> BTreeSet<u64> {
    let mut bytes = BTreeSet::new();
    for head in 0..view.shape[1] {
        for token in 0..view.shape[2] {
            for content in 0..view.shape[3] {
                let place = [block, head, token, content];
                let offset: u64 = place.iter().zip(&view.strides).map(|(index, stride)| index * stride).sum();
                bytes.extend(view.address + offset..view.address + offset + view.element_bytes);
            }
        }
    }
    bytes
}

/// Windows hold one block's bytes only, and together exactly those of every block.
fn check_windows(views: &[CacheView], num_blocks: u64, regions: &[Region]) {
    let mut windows: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    for region in regions {
        for block in 0..region.num_blocks {
            let start = region.base_address + block * region.block_stride;
            windows.entry(block).or_default().extend(start..start + region.block_len);
        }
    }
    for block in 0..num_blocks {
        let owned: BTreeSet<u64> = views.iter().flat_map(|view| block_bytes(view, block)).collect();
        assert_eq!(windows[&block], owned, "block {block}");
    }
}

/// Two allocations with 2 + 1 layers, the first of which has a second name.
fn t30(backend: &str, layout: Layout, separate_head_slots: bool) {
    let (num_blocks, block_size) = (8, 16);
    // Four heads of 16 elements of 2 bytes: keys and values together, or one slot for each.
    let [heads, content] = if separate_head_slots { [2, 4 * 16 * 2] } else { [4, 2 * 16 * 2] };
    let page = heads * block_size * content;
    let shape = [num_blocks, heads, block_size, content];
    let raw = [(0x10_0000, page * num_blocks * 2), (0x90_0000, page * num_blocks)];
    let mut views = views(layout, raw[0].0, 2, shape, page);
    views.extend(super::register::views(layout, raw[1].0, 1, shape, page));
    let layer =
        |name: &str, view: usize, raw| cache(name, LayerKind::Attention, page, views[view].clone(), raw);
    let layers = [
        layer("layer0", 0, raw[0]),
        layer("layer1", 1, raw[0]),
        layer("layer2", 2, raw[1]),
        layer("layer3", 0, raw[0]),
    ];
    let config = RegisterConfig::new(num_blocks);
    let out = register(&layers, &config).unwrap();
    assert_eq!(out.ranges.iter().map(|range| (range.start, range.len)).collect::<Vec<_>>(), raw);
    check_windows(&views, num_blocks, &out.regions);
    if layout == Layout::Blhnc {
        assert_eq!(out.regions.len(), 3);
    }
    let without_alias = register(&layers[..3], &config).unwrap();
    assert_eq!(without_alias.regions, out.regions);
    let mut local = side(0, 1, 4, out.regions);
    local.attn_backend = backend.to_owned();
    assert_eq!(local.block_size, block_size);
    let list = super::super::descriptors::local_descriptors(&local, 1).unwrap();
    let bases: BTreeSet<u64> = local.regions.iter().map(|region| region.base_address).collect();
    assert_eq!(list.len() as u64, num_blocks * bases.len() as u64);
    let firsts: BTreeSet<u64> = list.iter().step_by(8).map(|window| window.address).collect();
    assert_eq!(firsts, bases);
}

macro_rules! t30 {
    ($($name:ident: $backend:literal, $layout:ident, $separate:literal;)*) => {$(
        #[test]
        fn $name() {
            t30($backend, Layout::$layout, $separate);
        }
    )*};
}

t30! {
    t30_1_flash_attn_lbhnc_joint: "FLASH_ATTN", Lbhnc, false;
    t30_2_flash_attn_lbhnc_separate: "FLASH_ATTN", Lbhnc, true;
    t30_3_flash_attn_lbnhc_joint: "FLASH_ATTN", Lbnhc, false;
    t30_4_flash_attn_lbnhc_separate: "FLASH_ATTN", Lbnhc, true;
    t30_5_flash_attn_lhbnc_joint: "FLASH_ATTN", Lhbnc, false;
    t30_6_flash_attn_lhbnc_separate: "FLASH_ATTN", Lhbnc, true;
    t30_7_flash_attn_blhnc_joint: "FLASH_ATTN", Blhnc, false;
    t30_8_flash_attn_blhnc_separate: "FLASH_ATTN", Blhnc, true;
    t30_9_flash_attn_blnhc_joint: "FLASH_ATTN", Blnhc, false;
    t30_10_flash_attn_blnhc_separate: "FLASH_ATTN", Blnhc, true;
    t30_11_flash_attn_bhlnc_joint: "FLASH_ATTN", Bhlnc, false;
    t30_12_flash_attn_bhlnc_separate: "FLASH_ATTN", Bhlnc, true;
    t30_13_triton_attn_lbhnc_joint: "TRITON_ATTN", Lbhnc, false;
    t30_14_triton_attn_lbhnc_separate: "TRITON_ATTN", Lbhnc, true;
    t30_15_triton_attn_lbnhc_joint: "TRITON_ATTN", Lbnhc, false;
    t30_16_triton_attn_lbnhc_separate: "TRITON_ATTN", Lbnhc, true;
    t30_17_triton_attn_lhbnc_joint: "TRITON_ATTN", Lhbnc, false;
    t30_18_triton_attn_lhbnc_separate: "TRITON_ATTN", Lhbnc, true;
    t30_19_triton_attn_blhnc_joint: "TRITON_ATTN", Blhnc, false;
    t30_20_triton_attn_blhnc_separate: "TRITON_ATTN", Blhnc, true;
    t30_21_triton_attn_blnhc_joint: "TRITON_ATTN", Blnhc, false;
    t30_22_triton_attn_blnhc_separate: "TRITON_ATTN", Blnhc, true;
    t30_23_triton_attn_bhlnc_joint: "TRITON_ATTN", Bhlnc, false;
    t30_24_triton_attn_bhlnc_separate: "TRITON_ATTN", Bhlnc, true;
}

/// Four padded latent layers in one row.
fn packed_rows() -> Vec<LayerCache> {
    let (base, page, blocks) = (0x10_0000, 37_440, 2);
    let views = views(Layout::Blhnc, base, 4, [blocks, 1, 64, 584], page);
    let name = |index: usize| format!("layer{index}");
    views
        .into_iter()
        .enumerate()
        .map(|(index, view)| cache(&name(index), LayerKind::Latent, page, view, (base, blocks * 4 * page)))
        .collect()
}

#[test]
fn t31_padded_packed_latents_are_one_region() {
    let out = register(&packed_rows(), &RegisterConfig::new(2)).unwrap();
    let local = side(0, 1, 1, out.regions);
    let list = super::super::descriptors::local_descriptors(&local, 1).unwrap();
    let windows: Vec<_> = list.iter().map(|window| (window.address, window.len)).collect();
    assert_eq!(windows, [(0x10_0000, 4 * 37_440), (0x10_0000 + 4 * 37_440, 4 * 37_440)]);
    assert_eq!(out.ranges.len(), 1);
}

#[test]
fn packed_rows_are_announced_or_split_for_a_stage() {
    let mut config = RegisterConfig::new(2);
    config.has_packed_cache = true;
    config.packed_rows = PackedRows::Announced;
    let out = register(&packed_rows(), &config).unwrap();
    assert_eq!(out.regions.len(), 1);
    assert_eq!(out.members, [["layer0", "layer1", "layer2", "layer3"]]);
    assert_eq!(out.packed_members[2], ("layer2".to_owned(), [2 * 37_440, 37_440]));
    config.packed_rows = PackedRows::PerLayer;
    let stage = register(&packed_rows(), &config).unwrap();
    assert_eq!(stage.regions.len(), 4);
    assert_eq!(stage.regions[3].base_address, 0x10_0000 + 3 * 37_440);
    assert_eq!((stage.regions[3].block_len, stage.regions[3].block_stride), (37_440, 4 * 37_440));
    assert_eq!(stage.members.len(), 4);
    let mut with_heads = packed_rows();
    with_heads[0].spec = Some(LayerSpec { kind: LayerKind::Attention, group: 0, page_bytes: 37_440 });
    assert_eq!(register(&with_heads, &config), Err(RegisterError::PackedNeedsLatent));
}

#[test]
fn state_pages_share_allocations_with_attention() {
    let (base, page, blocks) = (4096, 256, 3);
    let flat = CacheView { address: base, shape: vec![page * blocks], strides: vec![1], element_bytes: 1 };
    let attention = CacheView {
        address: base,
        shape: vec![blocks * 2, 1, 8, 16],
        strides: vec![128, 128, 16, 1],
        element_bytes: 1,
    };
    let raw = (base, page * blocks);
    let mut layers = [
        cache("layers.1.ssm", LayerKind::State, page, flat, raw),
        cache("layers.0.attn", LayerKind::Attention, page, attention, raw),
    ];
    if let Some(spec) = &mut layers[0].spec {
        spec.group = 1;
    }
    let mut config = RegisterConfig::new(blocks);
    config.blocks_per_logical = 2;
    let out = register(&layers, &config).unwrap();
    assert_eq!(out.regions.len(), 1);
    let region = &out.regions[0];
    assert_eq!((region.block_len, region.block_stride, region.num_blocks), (128, 128, 6));
    assert_eq!((region.group, region.name.as_str()), (SHARED_GROUP, "layers.0.attn"));
    assert_eq!(out.state_regions, [0]);
}

#[test]
fn host_and_device_memory_are_registered_by_type() {
    let views = views(Layout::Lbhnc, 4096, 2, [2, 1, 4, 4], 16);
    let mut layers = [
        cache("layers.0", LayerKind::Latent, 16, views[0].clone(), (4096, 64)),
        cache("layers.1", LayerKind::Latent, 16, views[1].clone(), (4096, 64)),
    ];
    layers[0].allocation = Allocation { device: 3, memory: MemoryType::Vram, ..layers[0].allocation };
    layers[1].allocation.host_resident = true;
    let mut config = RegisterConfig::new(2);
    let unknown = register(&layers, &config);
    assert_eq!(unknown, Err(RegisterError::HostPool { layer: "layers.1".to_owned() }));
    config.host_num_blocks = Some(2);
    let out = register(&layers, &config).unwrap();
    assert!(out.mixed_memory);
    assert_eq!(out.device, 3);
    let host = MemoryRange { start: 4128, len: 32, device: 0, memory: MemoryType::Dram };
    let device = MemoryRange { start: 4096, len: 64, device: 3, memory: MemoryType::Vram };
    assert_eq!(out.ranges, [host, device]);
    config.skip_host_memory = true;
    assert_eq!(register(&layers, &config).unwrap().ranges, [device]);
    if let Some(spec) = &mut layers[0].spec {
        spec.kind = LayerKind::Attention;
    }
    assert_eq!(register(&layers, &config), Err(RegisterError::MixedMemory));
}

#[test]
fn layers_that_use_another_cache_are_skipped() {
    let view = views(Layout::Lbhnc, 4096, 1, [2, 1, 4, 4], 16).remove(0);
    let mut layers = [
        cache("layers.0", LayerKind::Attention, 16, view.clone(), (4096, 32)),
        cache("layers.1", LayerKind::Attention, 16, view, (4096, 32)),
    ];
    layers[1].spec = None;
    let out = register(&layers, &RegisterConfig::new(2)).unwrap();
    assert_eq!(out.regions.len(), 1);
    assert_eq!(out.regions[0].group, 0);
}

#[test]
fn caches_that_do_not_fit_are_refused() {
    let view = views(Layout::Lbhnc, 4096, 1, [2, 1, 4, 4], 16).remove(0);
    let layer = |view: CacheView| [cache("layer", LayerKind::Attention, 16, view, (4096, 64))];
    let name = || "layer".to_owned();
    let few = register(&layer(view.clone()), &RegisterConfig::new(3));
    assert_eq!(few, Err(RegisterError::Segments { layer: name(), bytes: 32, segment: 48 }));
    let mut short = layer(view.clone());
    short[0].allocation.len = 50;
    let few = register(&short, &RegisterConfig::new(3));
    assert_eq!(few, Err(RegisterError::TooFewBlocks { layer: name(), expected: 3, got: 2 }));
    assert_eq!(
        register(&layer(view.clone()), &RegisterConfig::new(0)),
        Err(RegisterError::Sizes { layer: name() })
    );
    let huge = CacheView { shape: vec![2, u64::MAX, 2, 2], ..view };
    assert_eq!(register(&layer(huge), &RegisterConfig::new(2)), Err(RegisterError::Sizes { layer: name() }));
}

#[test]
fn layer_names_sort_by_number() {
    let mut names =
        ["layers.10", "layers.2", "layers.2.b", "layers.02", "a1b", "1", "a", "layers.184467440737095516160"];
    names.sort_by(|a, b| natural_order(a, b));
    assert_eq!(
        names,
        ["1", "a", "a1b", "layers.2", "layers.02", "layers.2.b", "layers.10", "layers.184467440737095516160"]
    );
}

#[test]
fn v2_registers_keys_and_values_apart_unless_blocks_come_first() {
    let layer = |name: &str, address, bytes| DenseCache {
        name: name.to_owned(),
        address,
        bytes,
        num_blocks: 4,
        device: 1,
        memory: MemoryType::Vram,
    };
    let layers = [layer("a", 1000, 800), layer("b", 5000, 800), layer("alias", 1000, 800)];
    let out = register_dense(&layers, KvOrder::KeysFirst).unwrap();
    let bases: Vec<_> = out.regions.iter().map(|region| (region.base_address, region.block_len)).collect();
    assert_eq!(bases, [(1000, 100), (1400, 100), (5000, 100), (5400, 100)]);
    assert_eq!(out.ranges.len(), 4);
    assert!(!out.halves);
    let out = register_dense(&layers, KvOrder::BlocksFirst).unwrap();
    assert_eq!(out.regions.iter().map(|region| region.block_len).collect::<Vec<_>>(), [200, 200]);
    assert!(out.halves);
    let unequal = [layer("a", 1000, 800), layer("b", 5000, 400)];
    let error = DenseError::Size { region: 1, expected: 800, got: 400 };
    assert_eq!(register_dense(&unequal, KvOrder::BlocksFirst), Err(error));
    assert_eq!(register_dense(&unequal, KvOrder::Latent).unwrap().regions[1].block_len, 100);
    assert_eq!(register_dense(&[], KvOrder::Latent), Err(DenseError::NoBlocks));
    let overflow = [layer("a", u64::MAX, 800)];
    assert_eq!(register_dense(&overflow, KvOrder::Latent), Err(DenseError::Overflow { region: 0 }));
}

proptest! {
    #[test]
    fn windows_of_a_block_cover_exactly_its_bytes(
        layout in 2_usize..8, layers in 1_u64..4, blocks in 1_u64..6, heads in 1_u64..4,
        tokens in 1_u64..5, content in 1_u64..5, padding in 0_u64..64,
    ) {
        let layout = Layout::ALL[layout];
        let page = heads * tokens * content;
        let views = views(layout, 4096, layers, [blocks, heads, tokens, content], page);
        // A padded end of an allocation is shorter than a block's row.
        let raw = (4096, layers * blocks * page + padding % page);
        let caches: Vec<LayerCache> = views.iter().enumerate()
            .map(|(index, view)| cache(&format!("layers.{index}"), LayerKind::Attention, page, view.clone(), raw))
            .collect();
        let out = register(&caches, &RegisterConfig::new(blocks)).unwrap();
        prop_assert_eq!(out.ranges.len(), 1);
        check_windows(&views, blocks, &out.regions);
    }

    #[test]
    fn hostile_views_give_errors_and_never_panic(
        shape in proptest::collection::vec(any::<u64>(), 0..4),
        strides in proptest::collection::vec(any::<u64>(), 0..4),
        numbers in any::<[u64; 5]>(), host in any::<bool>(), latent in any::<bool>(), packed in 0_u8..3,
    ) {
        let [address, page, base, len, blocks] = numbers;
        let view = CacheView { address, shape, strides, element_bytes: 2 };
        let kind = if latent { LayerKind::Latent } else { LayerKind::State };
        let mut cache = cache("layer", kind, page, view, (base, len));
        cache.allocation.host_resident = host;
        let mut config = RegisterConfig::new(blocks);
        config.host_num_blocks = Some(blocks);
        config.has_packed_cache = true;
        config.packed_rows = [PackedRows::Ignored, PackedRows::Announced, PackedRows::PerLayer][usize::from(packed)];
        if let Ok(out) = register(&[cache], &config) {
            prop_assert!(out.regions.len() <= 1 << 20);
        }
    }
}

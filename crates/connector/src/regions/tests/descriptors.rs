use super::super::descriptors::{
    DescriptorError, local_descriptors as local_list, remote_descriptors, split_local_descriptors,
};
use super::*;

/// The local side of a case of `descriptors.json`.
fn local_side(case: &Value) -> LocalGeometry {
    let number = |key: &str, default: u64| case.get(key).map_or(default, |value| value.as_u64().unwrap());
    let small = |key: &str, default: u64| u32::try_from(number(key, default)).unwrap();
    let (bases, lens, blocks) = (numbers(&case["bases"]), numbers(&case["lens"]), numbers(&case["nblk"]));
    let strides = case.get("strides").map_or_else(|| lens.clone(), numbers);
    let groups = case.get("gids").map_or_else(|| vec![0; bases.len()], signed);
    let regions = (0..bases.len())
        .map(|i| Region { group: groups[i], ..region(bases[i], lens[i], strides[i], blocks[i]) })
        .collect();
    let mut local = side(small("tp_rank", 0), small("tp", 1), small("heads", 4), regions);
    if case.get("mla").is_some_and(|mla| mla.as_bool().unwrap()) {
        local.topology = LocalTopology::mla(small("tp_rank", 0), small("tp", 1));
    }
    local.groups = kinds(case.get("groups"));
    local.block_size = number("bs", 16);
    local.blocks_per_logical = number("ppl", 1);
    local.replicated = case
        .get("is_mla")
        .map_or(vec![], |flags| list(flags).iter().map(|flag| flag.as_bool().unwrap()).collect());
    local
}

/// The remote side of such a case.
fn remote_side(local: &LocalGeometry, case: &Value, tp: u32) -> PeerGeometry {
    let number = |key: &str, default: u64| case.get(key).map_or(default, |value| value.as_u64().unwrap());
    let (bases, lens) = (numbers(&case["bases"]), numbers(&case["lens"]));
    let strides = case.get("strides").map_or_else(|| lens.clone(), numbers);
    let num_blocks = number("nblk", 0);
    let counts = case.get("rnb").map_or_else(|| vec![num_blocks; bases.len()], numbers);
    let groups = case.get("gids").map_or_else(|| vec![0; bases.len()], signed);
    let regions = (0..bases.len())
        .map(|i| RemoteRegion {
            base_address: bases[i],
            block_len: lens[i],
            block_stride: strides[i],
            num_blocks: counts[i],
            group: groups[i],
        })
        .collect();
    let mut peer = unchecked_peer(local, tp, regions, num_blocks);
    peer.topology.block_size = number("bs", 16);
    peer.topology.blocks_per_logical = number("ppl", 1);
    peer.block_size_ratio = local.block_size / peer.topology.block_size;
    peer.device = number("dev", 0);
    if let Some(sizes) = case.get("ssm") {
        peer.state_sizes = numbers(sizes).try_into().unwrap();
    }
    peer
}

fn small(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn check_splits(local: &LocalGeometry, peer: &PeerGeometry, list: &[Descriptor], case: &Value) {
    let expected = case.get("local_split_descs_per_source_rank");
    assert_eq!(peer.mapping.needs_split(local.topology.is_mla), expected.is_some(), "{}", case["name"]);
    if let Some(expected) = expected {
        let splits = split_local_descriptors(local, &peer.mapping, list, peer.block_size_ratio).unwrap();
        let expected: Vec<_> = crate::golden::list(expected).iter().map(triples).collect();
        assert_eq!(splits, expected, "{}", case["name"]);
    }
}

#[test]
fn attention_descriptors_equal_vllm() {
    let vectors = vectors("descriptors.json");
    let cases = list(&vectors["fa"]);
    assert_eq!(cases.len(), 30);
    for case in cases {
        let name = &case["name"];
        let local = local_side(&case["local"]);
        let peer = remote_side(&local, &case["remote"], small(&case["remote_tp_size"]));
        let mapping = &peer.mapping;
        assert_eq!(mapping.tp_ratio, case["tp_ratio"].as_i64().unwrap(), "{name}");
        assert_eq!(peer.block_size_ratio, case["block_size_ratio"].as_u64().unwrap(), "{name}");
        assert_eq!(mapping.rank_offset_factor, case["rank_offset_factor"].as_u64().unwrap(), "{name}");
        let sources: Vec<u64> = mapping.source_ranks.iter().map(|rank| u64::from(*rank)).collect();
        assert_eq!(sources, numbers(&case["source_ranks"]), "{name}");
        let locals = local_list(&local, peer.block_size_ratio).unwrap();
        assert_eq!(locals, triples(&case["local_descs"]), "{name}");
        assert_eq!(remote_descriptors(&local, &peer).unwrap(), triples(&case["remote_descs"]), "{name}");
        check_splits(&local, &peer, &locals, case);
        // The same peer passes every rule and is described the same way.
        let request = PeerRequest { engine_id: "prefill", sizes: peer.topology.sizes, known: None };
        assert_eq!(validate_peer(&local, &request, &announced(&peer)), Ok(peer), "{name}");
    }
}

fn states(case: &Value, sizes: &Value, num_blocks: u64) -> StateGeometry {
    let number = |key: &str| case[key].as_u64().unwrap();
    let widths = numbers(&case["local_proj_dims"]);
    StateGeometry {
        conv: ConvSplit::new(&widths, number("conv_rows"), number("conv_dtype_size")).unwrap(),
        sizes: numbers(sizes).try_into().unwrap(),
        num_blocks,
        regions: vec![],
        scratch_regions: vec![],
        ple: None,
    }
}

fn pairs(value: &Value) -> Vec<(u64, u64)> {
    list(value).iter().map(numbers).map(|pair| (pair[0], pair[1])).collect()
}

#[test]
fn state_descriptors_equal_vllm() {
    let vectors = vectors("descriptors.json");
    let cases = list(&vectors["mamba"]);
    assert_eq!(cases.len(), 5);
    for case in cases {
        let name = &case["name"];
        let mut local = local_side(&case["local"]);
        let logical = local.regions[0].num_blocks / local.blocks_per_logical;
        let states = states(&case["local_conv"], &case["local_conv"]["ssm_sizes"], logical);
        assert_eq!(states.conv.local_offsets(), pairs(&case["local_conv_offsets"]), "{name}");
        local.states = Some(states);
        let peer = remote_side(&local, &case["remote"], small(&case["remote_tp_size"]));
        let attention: usize = local.regions.iter().map(|region| region.num_blocks as usize).sum();
        let locals = local_list(&local, 1).unwrap();
        assert_eq!(locals[attention..], triples(&case["local_descs"]), "{name}");
        let remotes = remote_descriptors(&local, &peer).unwrap();
        let mut expected = triples(&case["remote_fa_descs"]);
        expected.extend(triples(&case["remote_descs"]));
        assert_eq!(remotes, expected, "{name}");
        check_splits(&local, &peer, &locals, case);
        let request = PeerRequest { engine_id: "prefill", sizes: peer.topology.sizes, known: None };
        assert_eq!(validate_peer(&local, &request, &announced(&peer)), Ok(peer), "{name}");
    }
}

/// The local side of a case of `topology_v032.json`.
fn v032_side(input: &Value, regions: Vec<Region>) -> LocalGeometry {
    let (rank, tp) = (small(&input["tp_rank"]), small(&input["tp_size"]));
    let mut local = side(rank, tp, small(&input["total_num_kv_heads"]), regions);
    if input["is_mla"].as_bool().unwrap() {
        local.topology = LocalTopology::mla(rank, tp);
    }
    local.groups = kinds(input.get("groups"));
    local.replicated = list(&input["region_is_mla"]).iter().map(|flag| flag.as_bool().unwrap()).collect();
    local
}

fn cases_of(prefix: &str) -> Vec<Value> {
    let vectors = vectors("topology_v032.json");
    let cases = list(&vectors["descriptor_cases"]).iter();
    cases.filter(|case| case["kind"].as_str().unwrap().starts_with(prefix)).cloned().collect()
}

#[test]
fn local_lists_of_the_second_set_equal_vllm() {
    let cases = cases_of("build_fa_local");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let input = &case["in"];
        let [bases, lens, strides, counts] =
            ["base", "block_len", "stride", "region_num_blocks"].map(|key| numbers(&input[key]));
        let regions = (0..bases.len()).map(|i| region(bases[i], lens[i], strides[i], counts[i])).collect();
        let mut local = side(0, 1, 8, regions);
        local.device = input["device_id"].as_u64().unwrap();
        let ratio = input["block_size_ratio"].as_u64().unwrap();
        assert_eq!(local_list(&local, ratio).unwrap(), triples(&case["out"]), "{}", case["kind"]);
        assert_eq!(
            super::super::local_descriptors(&local.regions, local.device, ratio),
            triples(&case["out"]),
            "{}",
            case["kind"]
        );
    }
}

#[test]
fn remote_lists_of_the_second_set_equal_vllm() {
    let cases = cases_of("build_fa_remote");
    assert_eq!(cases.len(), 18);
    for case in cases {
        let input = &case["in"];
        let lens = numbers(&input["local_block_len"]);
        let mut local = v032_side(input, dense(&vec![0; lens.len()], &lens, 1));
        let [bases, remote_lens, strides] =
            ["remote_base", "remote_block_lens", "remote_strides"].map(|key| numbers(&input[key]));
        let num_blocks = input["remote_num_blocks"].as_u64().unwrap();
        let counts =
            input["remote_region_num_blocks"].as_array().map(|_| numbers(&input["remote_region_num_blocks"]));
        let regions = (0..bases.len())
            .map(|i| RemoteRegion {
                base_address: bases[i],
                block_len: remote_lens[i],
                block_stride: strides[i],
                num_blocks: counts.as_ref().map_or(num_blocks, |counts| counts[i]),
                group: 0,
            })
            .collect();
        let mut peer = unchecked_peer(&local, small(&input["remote_tp_size"]), regions, num_blocks);
        peer.block_size_ratio = input["block_size_ratio"].as_u64().unwrap();
        peer.device = input["remote_device_id"].as_u64().unwrap();
        assert_eq!(remote_descriptors(&local, &peer).unwrap(), triples(&case["out"]), "{}", case["kind"]);
        // Vectors leave the block sizes open; any pair with that ratio will do.
        local.block_size = 16;
        peer.topology.block_size = 16 / peer.block_size_ratio;
        let request = PeerRequest { engine_id: "prefill", sizes: peer.topology.sizes, known: None };
        match validate_peer(&local, &request, &announced(&peer)) {
            Ok(validated) => assert_eq!(validated, peer, "{}", case["kind"]),
            Err(PeerError::SharedHeads { remote: 8, heads: 4 }) => {
                assert_eq!(case["kind"], "build_fa_remote: P8 D2 GQA 4 heads dedup");
            }
            Err(error) => panic!("{}: {error}", case["kind"]),
        }
    }
}

#[test]
fn head_slices_of_local_lists_equal_vllm() {
    let cases = cases_of("local_splits");
    assert_eq!(cases.len(), 5);
    for case in cases {
        let input = &case["in"];
        let flags = list(&input["region_is_mla"]).len();
        let blocks = input["blocks_per_region"].as_u64().unwrap();
        let list = triples(&input["src_blocks"]);
        let mut local = v032_side(input, dense(&vec![0; flags], &vec![1; flags], blocks));
        assert_eq!(input["num_fa_descs"].as_u64().unwrap(), blocks * flags as u64);
        if local.groups.contains(&GroupKind::Ssm) {
            let conv = ConvSplit { part_bytes: vec![] };
            local.states = Some(StateGeometry {
                conv,
                sizes: [0, 0],
                num_blocks: 2,
                regions: vec![],
                scratch_regions: vec![],
                ple: None,
            });
        }
        let sizes = ParallelSizes::tp(small(&input["remote_tp_size"]));
        let mapping = local.topology.tp_mapping(sizes, &local.groups).unwrap();
        assert_eq!(mapping.tp_ratio, input["tp_ratio"].as_i64().unwrap());
        let needs = case["out"]["needs_split"].as_bool().unwrap();
        assert_eq!(mapping.needs_split(local.topology.is_mla), needs, "{}", case["kind"]);
        let splits = split_local_descriptors(&local, &mapping, &list, 1).unwrap();
        let expected: Vec<_> = crate::golden::list(&case["out"]["handles"]).iter().map(triples).collect();
        assert_eq!(splits, expected, "{}", case["kind"]);
    }
}

#[test]
fn state_parts_of_the_second_set_equal_vllm() {
    let cases = cases_of("mamba conv offsets");
    assert_eq!(cases.len(), 1);
    let (input, out) = (&cases[0]["in"], &cases[0]["out"]);
    let number = |key: &str| input[key].as_u64().unwrap();
    let conv = ConvSplit::new(&numbers(&input["local_proj_dims"]), number("conv_rows"), number("dtype_size"))
        .unwrap();
    assert_eq!(conv.local_offsets(), pairs(&out["local"]));
    let remote = out["remote"].as_object().unwrap();
    assert_eq!(remote.len(), 5);
    for (key, expected) in remote {
        let (share, ratio) = key.strip_prefix("off").unwrap().split_once("_ratio").unwrap();
        let offsets = conv.remote_offsets(share.parse().unwrap(), ratio.parse().unwrap());
        assert_eq!(offsets, Some(pairs(expected)), "{key}");
    }
    let conv = |rows: &[u64]| ConvSplit::new(rows, 3, 2).unwrap();
    let local_of = |rank, tp, sizes: &Value| {
        let mut local = side(rank, tp, 8, dense(&[1000], &[1], 0));
        local.groups = vec![GroupKind::Attention, GroupKind::Ssm];
        local.states = Some(StateGeometry {
            conv: conv(&[8, 2, 2]),
            sizes: numbers(sizes).try_into().unwrap(),
            num_blocks: 2,
            regions: vec![],
            scratch_regions: vec![],
            ple: None,
        });
        local
    };
    let local_cases = cases_of("build_mamba_local");
    assert_eq!(local_cases.len(), 1);
    let mut local = local_of(0, 1, &local_cases[0]["in"]["ssm_sizes"]);
    local.regions[0].block_stride = 400;
    assert_eq!(local_list(&local, 1).unwrap(), triples(&local_cases[0]["out"]));
    let remote_cases = cases_of("build_mamba_remote");
    assert_eq!(remote_cases.len(), 3);
    for case in remote_cases {
        let input = &case["in"];
        let ratio = input["tp_ratio"].as_i64().unwrap();
        let (tp, remote_tp) = if ratio > 0 { (small(&input["tp_ratio"]), 1) } else { (1, 2) };
        let local = local_of(small(&input["tp_rank"]), tp, &input["local_ssm_sizes"]);
        let remote = RemoteRegion {
            base_address: 1000,
            block_len: 0,
            block_stride: numbers(&input["remote_stride"])[0],
            num_blocks: 0,
            group: 0,
        };
        let mut peer =
            unchecked_peer(&local, remote_tp, vec![remote], input["remote_num_blocks"].as_u64().unwrap());
        peer.topology.blocks_per_logical = input["remote_phys_per_logical"].as_u64().unwrap();
        peer.state_sizes = numbers(&input["remote_ssm_sizes"]).try_into().unwrap();
        peer.device = 1;
        assert_eq!(remote_descriptors(&local, &peer).unwrap(), triples(&case["out"]), "{input}");
    }
}

#[test]
fn convolution_states_decompose_by_model() {
    let parts = |split: ConvSplit| split.part_bytes;
    assert_eq!(ConvSplit::mamba1(8, 8, 3, 2).map(parts), Ok(vec![48]));
    assert_eq!(ConvSplit::mamba1(8, 4, 3, 2), Err(ConvError::Shape { width: 8, temporal: 4 }));
    assert_eq!(ConvSplit::mamba2(12, 4, 2, 2, 3, 2).map(parts), Ok(vec![48, 12, 12]));
    assert_eq!(ConvSplit::mamba2(8, 4, 2, 2, 3, 2), Err(ConvError::Shape { width: 8, temporal: 8 }));
    assert_eq!(ConvSplit::gated_delta_net(14, 3, 2, 3, 2).map(parts), Ok(vec![24, 24, 36]));
    assert_eq!(ConvSplit::gated_delta_net(7, 3, 2, 3, 2), Err(ConvError::Shape { width: 7, temporal: 6 }));
    assert_eq!(ConvSplit::new(&[u64::MAX], 3, 2), Err(ConvError::Overflow));
}

#[test]
fn embedding_pages_follow_the_state_and_must_be_equal() {
    let mut local = side(0, 1, 2, dense(&[1000, 9000], &[64, 64], 4));
    local.groups = vec![GroupKind::Attention, GroupKind::Ssm, GroupKind::Ple];
    local.blocks_per_logical = 2;
    local.states = Some(StateGeometry {
        conv: ConvSplit::mamba1(4, 4, 1, 2).unwrap(),
        sizes: [8, 16],
        num_blocks: 2,
        regions: vec![0],
        scratch_regions: vec![],
        ple: Some((1, 24)),
    });
    let list = local_list(&local, 1).unwrap();
    let tail: Vec<_> = list[8..].iter().map(|entry| (entry.address, entry.len)).collect();
    assert_eq!(tail, [(1000, 8), (1128, 8), (1008, 16), (1136, 16), (9000, 48), (9128, 48)]);
    let remote = |base_address| RemoteRegion {
        base_address,
        block_len: 64,
        block_stride: 64,
        num_blocks: 4,
        group: 0,
    };
    let mut peer = unchecked_peer(&local, 1, vec![remote(50_000), remote(60_000)], 4);
    peer.topology.blocks_per_logical = 2;
    peer.state_sizes = [8, 16];
    let unequal = remote_descriptors(&local, &peer);
    assert_eq!(unequal, Err(DescriptorError::PlePages { local: 48, remote: 0 }));
    assert_eq!(unequal.unwrap_err().kind(), crate::topology::ErrorKind::Value);
    peer.ple_block_len = Some(24);
    let list = remote_descriptors(&local, &peer).unwrap();
    let tail: Vec<_> = list[12..].iter().map(|entry| (entry.address, entry.len)).collect();
    assert_eq!(tail, [(60_000, 48), (60_128, 48)]);
    // Two source ranks share the state, but the page is the same on both.
    let mapping = local.topology.tp_mapping(ParallelSizes::tp(2), &local.groups).unwrap();
    let local_entries = local_list(&local, 1).unwrap();
    let splits = split_local_descriptors(&local, &mapping, &local_entries, 1).unwrap();
    assert_eq!(splits.len(), 2);
    assert_eq!(splits[1][8], Descriptor { address: 1004, len: 4, device: 0 });
    assert_eq!(splits[1][12..], local_entries[12..]);
    let index = DescriptorIndex::local(&local, 1).unwrap();
    assert_eq!(index.ids(&[vec![1], vec![1], vec![0]]), Ok(vec![1, 5, 9, 11, 12]));
}

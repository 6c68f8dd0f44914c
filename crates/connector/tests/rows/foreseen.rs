//! What is foreseen of a pair from its published payloads is what becomes of its handshakes.

use kv_connector::fit::{EngineTraits, Fit, Misfit, PublishedEngine, PublishedRank, Side, Unknown, judge};
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::protocol::{Generation, TransferMode};
use kv_connector::regions::{LocalGeometry, Region};
use kv_connector::scheduler::StepMeta;
use kv_connector::transport::loopback::{Fabric, LoopbackAgent};
use kv_connector::transport::{Descriptor, KvMemory, MemoryType};
use kv_connector::worker::{HandshakeFailure, RankReply, Worker, WorkerConfig};
use proptest::prelude::*;

use crate::support::{HEAD, at, recv};

/// One engine of the sample.
#[derive(Debug, Clone)]
struct Setup {
    generation: Generation,
    tp: u32,
    dcp: u32,
    heads: u32,
    mla: bool,
    block_size: u32,
    per_logical: u32,
    token_major: bool,
    permute: bool,
    hma: bool,
    host_buffer: bool,
    hash: &'static str,
    enforce: bool,
    backend: &'static str,
    layers: usize,
    /// The last rank is not published.
    lacks_one: bool,
}

/// An engine that fits every other one like it.
fn plain() -> Setup {
    Setup {
        generation: Generation::V14,
        tp: 1,
        dcp: 1,
        heads: 8,
        mla: false,
        block_size: 16,
        per_logical: 1,
        token_major: false,
        permute: false,
        hma: false,
        host_buffer: false,
        hash: "a",
        enforce: true,
        backend: "CPU_ATTN",
        layers: 2,
        lacks_one: false,
    }
}

struct Built {
    setup: Setup,
    name: &'static str,
    workers: Vec<Worker<LoopbackAgent>>,
    traits: EngineTraits,
    payloads: Vec<(String, NixlAgentMetadata)>,
}

fn build(setup: &Setup, name: &'static str, fabric: &Fabric) -> Built {
    let worker = |rank: u32| {
        let per_rank = if setup.mla { 1 } else { u64::from((setup.heads / setup.tp).max(1)) };
        let block_len = per_rank * HEAD * u64::from(setup.block_size) / 8;
        let memory = KvMemory::allocate(&vec![(block_len * 4) as usize; setup.layers]);
        let regions: Vec<Region> = (0..)
            .zip(memory.base_addresses())
            .map(|(layer, base_address): (usize, u64)| Region {
                name: format!("model.layers.{layer}"),
                base_address,
                block_len,
                block_stride: block_len,
                num_blocks: 4,
                memory: MemoryType::Dram,
                group: 0,
            })
            .collect();
        let mut config = WorkerConfig::new(setup.generation, name, setup.hash.to_owned());
        (config.tp_rank, config.tp_size, config.dcp_size) = (rank, setup.tp, setup.dcp);
        (config.total_kv_heads, config.is_mla) = (if setup.mla { 1 } else { setup.heads }, setup.mla);
        (config.block_size, config.physical_blocks_per_logical) = (setup.block_size, setup.per_logical);
        let layout = match (setup.generation, setup.token_major) {
            (Generation::V14, false) => "LBHNC",
            (Generation::V14, true) => "LBNHC",
            (Generation::V2, false) => "HND",
            (Generation::V2, true) => "NHD",
        };
        config.kv_cache_layout = layout.to_owned();
        (config.enforce_compatibility, config.hma_required) = (setup.enforce, setup.hma);
        config.attn_backend_name = setup.backend.to_owned();
        let geometry = LocalGeometry {
            permute_received: setup.permute,
            host_buffer: setup.host_buffer,
            ..config.geometry(regions).unwrap()
        };
        let ranges = geometry.regions.iter().map(|region| {
            let range = Descriptor { address: region.base_address, len: region.span(), device: 0 };
            (region.memory, range)
        });
        let ranges = ranges.collect();
        let agent = LoopbackAgent::in_fabric(&format!("{name}-{rank}"), memory, fabric);
        Worker::with_geometry(config, agent, geometry, ranges).unwrap()
    };
    let workers: Vec<_> = (0..setup.tp).map(worker).collect();
    let published = workers.iter().take(workers.len() - usize::from(setup.lacks_one));
    let payloads = published.map(|worker| {
        let outer = NixlHandshakePayload::decode(&worker.handshake_payload()).unwrap();
        let inner = NixlAgentMetadata::decode(setup.generation, &outer.agent_metadata_bytes).unwrap();
        (outer.compatibility_hash, inner)
    });
    let payloads = payloads.collect();
    let traits = EngineTraits {
        tp_size: Some(setup.tp),
        pp_size: Some(1),
        dcp_size: Some(setup.dcp),
        transfer_mode: Some(TransferMode::Pull),
        kv_heads: Some(if setup.mla { 1 } else { setup.heads }),
        is_mla: Some(setup.mla),
        permute_received: Some(setup.permute),
        hma_required: Some(setup.hma),
        host_buffer: Some(setup.host_buffer),
        enforce_compat: Some(setup.enforce),
        ..EngineTraits::default()
    };
    Built { setup: setup.clone(), name, workers, traits, payloads }
}

impl Built {
    fn published<'a>(&'a self, traits: &'a EngineTraits) -> PublishedEngine<'a> {
        let ranks = (0..).zip(&self.payloads).map(|(tp_rank, (hash, metadata))| PublishedRank {
            pp_rank: 0,
            tp_rank,
            compatibility_hash: hash,
            metadata,
        });
        PublishedEngine { engine_id: self.name, model: None, traits, ranks: ranks.collect() }
    }

    /// Shakes hands with the published ranks of a prefill engine, on every rank.
    fn connects_to(&mut self, prefill: &Self) -> bool {
        let published = prefill.payloads.len();
        self.workers.iter_mut().all(|worker| {
            let mut request = recv(prefill.name, &[1], &[1], true);
            (request.tp_size, request.dcp_size) = (prefill.setup.tp, prefill.setup.dcp);
            let meta = StepMeta { reqs_to_recv: vec![("r".to_owned(), request)], ..StepMeta::default() };
            worker.start_load(&meta, at(1)).unwrap();
            let Some(job) = worker.take_handshake_jobs().pop() else { return false };
            let replies = job.ranks.iter().map(|&(pp_rank, tp_rank)| {
                let known = prefill.workers.iter().take(published).nth(tp_rank as usize);
                let payload = known.ok_or(HandshakeFailure::UnknownEngine)?.handshake_payload();
                Ok(RankReply { pp_rank, tp_rank, payload, clock: None })
            });
            let replies = replies.collect();
            worker.complete_handshake(&job.engine_id, replies, at(1)).is_ok()
        })
    }
}

/// What is foreseen, and what becomes of it.
fn foreseen(prefill: &Setup, decode: &Setup) -> (Result<Fit, Misfit>, bool) {
    let fabric = Fabric::default();
    let (p, mut d) = (build(prefill, "p", &fabric), build(decode, "d", &fabric));
    let verdict = judge(&p.published(&p.traits), &d.published(&d.traits));
    let connects = d.connects_to(&p);
    (verdict, connects)
}

fn setup() -> impl Strategy<Value = Setup> {
    let mostly = |value: bool| prop_oneof![5 => Just(value), 1 => Just(!value)];
    let shape = (
        prop_oneof![4 => Just(Generation::V14), 1 => Just(Generation::V2)],
        prop_oneof![3 => Just(1_u32), 3 => Just(2), 2 => Just(4), 1 => Just(3)],
        prop_oneof![6 => Just(false), 1 => Just(true)],
        prop_oneof![4 => Just(16_u32), 1 => Just(8), 1 => Just(32)],
        prop_oneof![6 => Just(1_u32), 1 => Just(2)],
        mostly(false),
        any::<bool>(),
    );
    let rest = (
        mostly(false),
        mostly(false),
        prop_oneof![6 => Just("a"), 1 => Just("b")],
        mostly(true),
        prop_oneof![4 => Just("CPU_ATTN"), 1 => Just("FLASH_ATTN")],
        prop_oneof![8 => Just(2_usize), 1 => Just(3)],
        prop_oneof![12 => Just(false), 1 => Just(true)],
    );
    (shape, rest).prop_map(|(shape, rest)| {
        let (generation, tp, dealt, block_size, per_logical, token_major, permute) = shape;
        let (hma, host_buffer, hash, enforce, backend, layers, lacks_one) = rest;
        let newest = generation == Generation::V14;
        Setup {
            generation,
            tp,
            dcp: if dealt && newest { tp } else { 1 },
            block_size,
            per_logical: if newest { per_logical } else { 1 },
            token_major,
            permute,
            hma,
            host_buffer,
            hash,
            enforce,
            backend,
            layers,
            lacks_one: lacks_one && tp > 1,
            ..plain()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_verdict_is_the_outcome(
        prefill in setup(),
        decode in setup(),
        model in prop_oneof![6 => Just((8_u32, false)), 1 => Just((2, false)), 1 => Just((1, false)), 2 => Just((1, true))],
        alike in prop_oneof![Just(false), Just(true)],
    ) {
        let of_model = |setup: &Setup| Setup { heads: model.0, mla: model.1, ..setup.clone() };
        let prefill = of_model(&prefill);
        // Engines with nothing in common are refused for the first thing; alike ones get further.
        let decode = match alike {
            true => Setup { tp: decode.tp, dcp: if prefill.dcp > 1 { decode.tp } else { 1 }, permute: decode.permute,
                            block_size: decode.block_size, token_major: decode.token_major, lacks_one: false, ..prefill.clone() },
            false => of_model(&decode),
        };
        let (verdict, connects) = foreseen(&prefill, &decode);
        match &verdict {
            Ok(Fit::Passes) => prop_assert!(connects, "{verdict:?} for {prefill:?} and {decode:?}"),
            // A v2 engine can read newer metadata, but never a newer hand-off.
            Err(Misfit::Generations { .. }) => {}
            Err(_) => prop_assert!(!connects, "{verdict:?} for {prefill:?} and {decode:?}"),
            Ok(Fit::Unknown(_)) => prop_assert!(false, "everything was told: {verdict:?}"),
        }
    }

    #[test]
    fn what_is_not_told_is_never_told_wrong(prefill in setup(), decode in setup(), told in any::<[bool; 4]>()) {
        // No engine starts with heads that cannot be dealt out over its ranks.
        let legal = |setup: Setup| match setup.tp {
            3 => Setup { tp: 2, dcp: 1, ..setup },
            _ => setup,
        };
        let (prefill, decode) = (legal(prefill), legal(decode));
        let fabric = Fabric::default();
        let (p, mut d) = (build(&prefill, "p", &fabric), build(&decode, "d", &fabric));
        let less = |traits: &EngineTraits| EngineTraits {
            kv_heads: traits.kv_heads.filter(|_| told[0]),
            is_mla: traits.is_mla.filter(|_| told[1]),
            hma_required: traits.hma_required.filter(|_| told[2]),
            host_buffer: traits.host_buffer.filter(|_| told[3]),
            ..traits.clone()
        };
        let (of_p, of_d) = (less(&p.traits), less(&d.traits));
        let verdict = judge(&p.published(&of_p), &d.published(&of_d));
        let connects = d.connects_to(&p);
        match &verdict {
            Ok(Fit::Passes) => prop_assert!(connects, "{prefill:?} and {decode:?}"),
            // A v2 engine can read newer metadata, but never a newer hand-off.
            Err(Misfit::Generations { .. }) => {}
            Err(_) => prop_assert!(!connects, "{verdict:?} for {prefill:?} and {decode:?}"),
            Ok(Fit::Unknown(_)) => {}
        }
    }
}

#[test]
fn every_reason_has_a_name_and_a_text() {
    let refused = |prefill: Setup, decode: Setup| {
        let (verdict, connects) = foreseen(&prefill, &decode);
        let misfit = verdict.unwrap_err();
        assert!(!connects, "{misfit}");
        (misfit.label(), misfit.to_string())
    };
    let (label, text) = refused(plain(), Setup { hash: "b", ..plain() });
    assert_eq!(
        (label, text.as_str()),
        ("hashes_differ", "the compatibility hashes differ: prefill a, decode b")
    );
    let v2 = Setup { generation: Generation::V2, ..plain() };
    assert_eq!(refused(v2, plain()).0, "generations_differ");
    assert_eq!(refused(Setup { tp: 3, ..plain() }, Setup { tp: 2, ..plain() }).0, "topologies_differ");
    assert_eq!(refused(Setup { block_size: 32, ..plain() }, plain()).0, "block_sizes_differ");
    assert_eq!(refused(Setup { token_major: true, ..plain() }, plain()).0, "layouts_differ");
    assert_eq!(refused(Setup { layers: 3, ..plain() }, plain()).0, "regions_differ");
    let lacks_one = Setup { tp: 2, lacks_one: true, ..plain() };
    let (label, text) = refused(lacks_one, plain());
    assert_eq!((label, text.as_str()), ("rank_missing", "rank 0/1 of the prefill engine is not published"));
}

#[test]
fn what_no_handshake_is_needed_for_is_refused_at_once() {
    let fabric = Fabric::default();
    let (p, d) = (build(&plain(), "p", &fabric), build(&plain(), "d", &fabric));
    let (one, other) = (p.published(&p.traits), d.published(&d.traits));
    assert_eq!(judge(&one, &one), Err(Misfit::OwnEngine));
    let named = PublishedEngine { model: Some("m"), ..one.clone() };
    let renamed = PublishedEngine { model: Some("n"), ..other.clone() };
    assert_eq!(judge(&named, &renamed).unwrap_err().label(), "models_differ");
    assert_eq!(judge(&named, &other), Ok(Fit::Passes));
    let push = EngineTraits { transfer_mode: Some(TransferMode::Push), ..p.traits.clone() };
    assert_eq!(judge(&p.published(&push), &other).unwrap_err().label(), "modes_differ");
    let pushed_to = EngineTraits { transfer_mode: Some(TransferMode::Push), ..d.traits.clone() };
    assert_eq!(judge(&p.published(&push), &d.published(&pushed_to)), Ok(Fit::Passes));
    let stages = EngineTraits { pp_size: Some(2), ..p.traits.clone() };
    assert_eq!(judge(&p.published(&stages), &other).unwrap_err().label(), "topologies_differ");
    let unpublished = PublishedEngine { ranks: Vec::new(), ..one.clone() };
    assert_eq!(judge(&unpublished, &other), Ok(Fit::Unknown(Unknown::Payloads(Side::Prefill))));
    let mut torn = build(&Setup { tp: 2, ..plain() }, "p", &fabric);
    torn.payloads[1].0 = "b".to_owned();
    assert_eq!(judge(&torn.published(&torn.traits), &other).unwrap_err().label(), "ranks_disagree");
}

//! Host and device regions on one rank: T28, T29.

use kv_connector::protocol::Generation;
use kv_connector::regions::Region;
use kv_connector::transport::TransferState::{Done, Failed, InProgress};
use kv_connector::transport::loopback::{Call, Fabric, LoopbackAgent};
use kv_connector::transport::{KvMemory, MemoryType, TransferOp};
use kv_connector::worker::{Worker, WorkerConfig, WorkerSetupError};

use crate::support::{Rank, at, failed, finished, notifications, recv, releases, transfers};

const BLOCK: u64 = 32;
const BLOCKS: u64 = 4;

/// A rank with one region per kind of memory named; latent attention.
fn rank(fabric: &Fabric, name: &str, kinds: &[MemoryType], edit: fn(&mut WorkerConfig)) -> Rank {
    let memory = KvMemory::allocate(&vec![(BLOCK * BLOCKS) as usize; kinds.len()]);
    let regions =
        memory.base_addresses().into_iter().zip(kinds).enumerate().map(|(layer, (base_address, kind))| {
            Region {
                name: format!("layer{layer}"),
                base_address,
                block_len: BLOCK,
                block_stride: BLOCK,
                num_blocks: BLOCKS,
                memory: *kind,
                group: 0,
            }
        });
    let mut config = WorkerConfig::new(Generation::V14, name, "hash".to_owned());
    (config.is_mla, config.total_kv_heads) = (true, 1);
    edit(&mut config);
    let agent = LoopbackAgent::in_fabric(name, memory.clone(), fabric);
    let faults = agent.faults();
    faults.record();
    let worker = Worker::new(config, agent, regions.collect()).unwrap();
    Rank { worker, memory, faults, heads: (0, 1) }
}

const MIXED: [MemoryType; 2] = [MemoryType::Dram, MemoryType::Vram];

fn pair(fabric: &Fabric, edit: fn(&mut WorkerConfig)) -> ([Rank; 1], Rank) {
    let p = [rank(fabric, "p", &[MemoryType::Vram; 2], |_| {})];
    (p, rank(fabric, "d", &MIXED, edit))
}

#[test]
fn t28_the_prefill_is_told_when_both_reads_are_done() {
    let fabric = Fabric::default();
    let (mut p, mut d) = pair(&fabric, |_| {});
    p[0].lease("p-request", at(30));
    for base in p[0].memory.base_addresses() {
        p[0].memory.write(base + BLOCK, &[7; BLOCK as usize]).unwrap();
    }
    d.faults.script_transfers([vec![InProgress, Done], vec![Done]]);
    d.start(&[("r", recv("p", &[0], &[1], true))], at(1));
    d.connect(&p, at(1));
    let journal = d.faults.take_journal();
    // Local id 0 is block 0 of the host region, id 4 block 0 of the device region.
    let expected = [(TransferOp::Read, vec![0], vec![1], None), (TransferOp::Read, vec![0], vec![5], None)];
    assert_eq!(transfers(&journal), expected);
    assert!(d.poll(at(1)).is_empty());
    assert!(notifications(&d.faults.take_journal()).is_empty(), "one half is still under way");
    assert_eq!(d.poll(at(1)), finished("r"));
    let told = notifications(&d.faults.take_journal());
    assert_eq!(told, [("p".to_owned(), "p-request:1".to_owned())]);
    assert_eq!(p[0].poll(at(1)).finished_sending, ["p-request"]);
    for base in d.memory.base_addresses() {
        assert_eq!(d.memory.read(base, BLOCK).unwrap(), [7; BLOCK as usize]);
    }
    assert!(d.poll(at(1)).is_empty());
    assert!(notifications(&d.faults.take_journal()).is_empty(), "told once");
}

#[test]
fn t29_a_failed_half_tells_the_prefill_nothing() {
    let fabric = Fabric::default();
    let (p, mut d) = pair(&fabric, |_| {});
    d.faults.script_transfers([vec![Failed], vec![Done]]);
    d.start(&[("r", recv("p", &[0], &[1], true))], at(1));
    d.connect(&p, at(1));
    assert_eq!(d.poll(at(1)), failed("r"));
    assert!(d.poll(at(2)).is_empty());
    assert!(notifications(&d.faults.take_journal()).is_empty());
}

#[test]
fn a_half_that_cannot_be_started_releases_or_keeps_what_was_made() {
    for (call, skipped, posted) in [(Call::MakeTransfer, 1, 0), (Call::Post, 0, 0), (Call::Post, 1, 1)] {
        let fabric = Fabric::default();
        let (p, mut d) = pair(&fabric, |_| {});
        d.faults.fail_after(call, skipped, 1);
        d.start(&[("r", recv("p", &[0], &[1], true))], at(1));
        d.connect(&p, at(1));
        let journal = d.faults.take_journal();
        assert_eq!(releases(&journal), transfers(&journal).len() - posted, "{call:?}");
        assert_eq!(d.poll(at(1)), failed("r"));
        assert_eq!(d.worker.take_stats().unwrap().num_failed_transfers, [1]);
        assert!(notifications(&d.faults.take_journal()).is_empty());
        assert_eq!(d.faults.released_in_progress(), 0);
    }
}

#[test]
fn a_rank_that_shares_the_host_pool_leaves_it_to_rank_0() {
    let fabric = Fabric::default();
    let (p, mut d) = pair(&fabric, |config| {
        (config.tp_rank, config.tp_size, config.shared_host_pool) = (1, 2, true);
    });
    d.start(&[("r", recv("p", &[0], &[1], true))], at(1));
    d.connect(&p, at(1));
    let expected = [(TransferOp::Read, vec![0], vec![5], None)];
    assert_eq!(transfers(&d.faults.take_journal()), expected);
    assert_eq!(d.poll(at(1)), finished("r"));
    assert_eq!(notifications(&d.faults.take_journal()), [("p".to_owned(), "p-request:2".to_owned())]);
}

#[test]
fn mixed_memory_needs_latent_attention_in_pull_mode() {
    let fabric = Fabric::default();
    let build = |edit: fn(&mut WorkerConfig)| {
        let memory = KvMemory::allocate(&[128, 128]);
        let regions = memory.base_addresses().into_iter().zip(MIXED).map(|(base_address, memory)| Region {
            name: "l".to_owned(),
            base_address,
            block_len: 32,
            block_stride: 32,
            num_blocks: 4,
            memory,
            group: 0,
        });
        let mut config = WorkerConfig::new(Generation::V14, "e", String::new());
        config.is_mla = true;
        edit(&mut config);
        let agent = LoopbackAgent::in_fabric("e", memory.clone(), &fabric);
        Worker::new(config, agent, regions.collect()).map(|_| ())
    };
    assert_eq!(build(|_| {}), Ok(()));
    assert_eq!(build(|config| config.is_mla = false), Err(WorkerSetupError::MixedMemory));
    let push = build(|config| config.mode = kv_connector::protocol::TransferMode::Push);
    assert_eq!(push, Err(WorkerSetupError::MixedMemory));
}

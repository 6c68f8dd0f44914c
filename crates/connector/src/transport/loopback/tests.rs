//! What only the loopback transport has; what all transports promise is in `contract.rs`.

use proptest::prelude::*;

use super::*;
use crate::transport::contract::{BLOCK, BLOCKS, blocks, ended};

fn agent(name: &str) -> (LoopbackAgent, u64) {
    let memory = KvMemory::allocate(&[(BLOCK * BLOCKS) as usize]);
    let base = memory.base_addresses()[0];
    let mut agent = LoopbackAgent::new(name, memory).unwrap();
    let all = Descriptor { address: base, len: BLOCK * BLOCKS, device: 0 };
    agent.register_memory(MemoryType::Dram, &[all]).unwrap();
    (agent, base)
}

#[test]
fn a_wrong_secret_opens_nothing() {
    let (source, source_base) = agent("source");
    let (mut reader, base) = agent("reader");
    let mut blob = AgentBlob::decode(&source.agent_metadata()).unwrap();
    blob.secret = [0; 16];
    let name = reader.add_remote_agent(&blob.encode()).unwrap();
    let local = reader.prepare_local(MemoryType::Dram, &blocks(base)).unwrap();
    let remote = reader.prepare_remote(&name, MemoryType::Dram, &blocks(source_base)).unwrap();
    let transfer =
        reader.make_transfer(TransferOp::Read, (local, &[0]), (remote, &[0]), Some(b"x:1")).unwrap();
    reader.post(transfer).unwrap();
    assert_eq!(ended(&mut reader, transfer), TransferState::Failed);
    assert!(source.shared().take_notifications().is_empty());
}

#[test]
fn calls_and_transfers_fail_as_scripted() {
    let (source, source_base) = agent("source");
    let (mut reader, base) = agent("reader");
    let name = reader.add_remote_agent(&source.agent_metadata()).unwrap();
    let local = reader.prepare_local(MemoryType::Dram, &blocks(base)).unwrap();
    let remote = reader.prepare_remote(&name, MemoryType::Dram, &blocks(source_base)).unwrap();
    let faults = reader.faults();
    faults.fail_next(Call::MakeTransfer, 1);
    let mut make = || reader.make_transfer(TransferOp::Read, (local, &[0]), (remote, &[0]), None);
    assert_eq!(make(), Err(TransportError::Scripted(Call::MakeTransfer)));
    let transfer = make().unwrap();
    faults.fail_next(Call::Post, 1);
    assert_eq!(reader.post(transfer), Err(TransportError::Scripted(Call::Post)));
    faults.fail_next_transfers(1);
    reader.post(transfer).unwrap();
    assert_eq!(ended(&mut reader, transfer), TransferState::Failed);
    faults.fail_next(Call::ReleaseTransfer, 1);
    assert!(reader.release_transfer(transfer).is_err());
    assert_eq!(reader.release_transfer(transfer), Ok(()));
    assert_eq!(reader.live_handles(), 2);
}

#[test]
fn memory_is_bounds_checked() {
    let memory = KvMemory::allocate(&[16, 16]);
    let [first, second] = memory.base_addresses()[..] else { panic!("two regions") };
    assert!(second > first + 16);
    memory.write(first + 8, &[1; 8]).unwrap();
    assert_eq!(memory.read(first + 15, 1).unwrap(), [1]);
    for (address, len) in [(first, 17), (first + 16, 1), (first - 1, 1), (0, 1), (u64::MAX, 2)] {
        assert!(memory.read(address, len).is_err(), "{address:#x}+{len}");
        assert!(memory.write(address, &vec![0; len as usize]).is_err());
    }
    assert!(memory.contains(second + 16, 0));
    let shared = memory.clone();
    shared.write(second, &[5]).unwrap();
    assert_eq!(memory.read(second, 1).unwrap(), [5]);
}

proptest! {
    #[test]
    fn foreign_blobs_and_frames_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        prop_assert!(AgentBlob::decode(&bytes).is_none());
        let _decided = wire::read_frame(&mut &bytes[..]);
        let _decided = wire::read_hello(&mut &bytes[..], &[0; 16]);
    }
}

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

const BLOCK: u64 = 64;
const BLOCKS: u64 = 8;

fn agent(name: &str) -> (LoopbackAgent, u64) {
    let memory = KvMemory::allocate(&[(BLOCK * BLOCKS) as usize]);
    let base = memory.base_addresses()[0];
    let mut agent = LoopbackAgent::new(name, memory).unwrap();
    let all = Descriptor { address: base, len: BLOCK * BLOCKS, device: 0 };
    agent.register_memory(MemoryType::Dram, &[all]).unwrap();
    (agent, base)
}

fn blocks(base: u64) -> Vec<Descriptor> {
    (0..BLOCKS).map(|i| Descriptor { address: base + i * BLOCK, len: BLOCK, device: 0 }).collect()
}

/// Waits for something another thread does; five seconds are far beyond any of it.
fn eventually<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < Duration::from_secs(5), "nothing happened");
        std::thread::yield_now();
    }
}

fn ended(agent: &mut LoopbackAgent, transfer: TransferId) -> TransferState {
    eventually(|| Some(agent.poll(transfer).unwrap()).filter(|state| *state != TransferState::InProgress))
}

struct Pair {
    reader: LoopbackAgent,
    source: LoopbackAgent,
    local: ListId,
    remote: ListId,
    reader_base: u64,
    source_base: u64,
    source_name: AgentName,
}

fn pair() -> Pair {
    let (mut reader, reader_base) = agent("reader");
    let (source, source_base) = agent("source");
    let source_name = reader.add_remote_agent(&source.agent_metadata()).unwrap();
    let local = reader.prepare_local(MemoryType::Dram, &blocks(reader_base)).unwrap();
    let remote = reader.prepare_remote(&source_name, MemoryType::Dram, &blocks(source_base)).unwrap();
    Pair { reader, source, local, remote, reader_base, source_base, source_name }
}

#[test]
fn a_read_moves_the_selected_blocks_and_then_notifies() {
    let mut pair = pair();
    for block in 0..BLOCKS {
        let content = vec![block as u8 + 1; BLOCK as usize];
        pair.source.memory().write(pair.source_base + block * BLOCK, &content).unwrap();
    }
    let transfer = pair
        .reader
        .make_transfer(TransferOp::Read, (pair.local, &[0, 5]), (pair.remote, &[7, 2]), Some(b"r:1"))
        .unwrap();
    assert!(pair.source.take_notifications().is_empty());
    assert_eq!(pair.reader.post(transfer), Ok(TransferState::InProgress));
    assert_eq!(ended(&mut pair.reader, transfer), TransferState::Done);
    let read = |block: u64| pair.reader.memory().read(pair.reader_base + block * BLOCK, BLOCK).unwrap();
    assert_eq!([read(0)[0], read(5)[63], read(1)[0]], [8, 3, 0]);
    let telemetry = pair.reader.telemetry(transfer).unwrap();
    assert_eq!((telemetry.bytes, telemetry.descriptors), (2 * BLOCK, 2));
    let messages = eventually(|| Some(pair.source.take_notifications()).filter(|m| !m.is_empty()));
    assert_eq!(messages.len(), 1);
    assert_eq!(messages[0].1, b"r:1");
    assert!(messages[0].0.0.starts_with("reader#"));
    pair.reader.release_transfer(transfer).unwrap();
    assert_eq!(pair.reader.poll(transfer), Err(TransportError::UnknownHandle(transfer.0)));
}

#[test]
fn a_write_moves_bytes_the_other_way() {
    let mut pair = pair();
    pair.reader.memory().write(pair.reader_base, &[9; 64]).unwrap();
    let transfer = pair
        .reader
        .make_transfer(TransferOp::Write, (pair.local, &[0]), (pair.remote, &[3]), Some(b"d:1"))
        .unwrap();
    pair.reader.post(transfer).unwrap();
    assert_eq!(ended(&mut pair.reader, transfer), TransferState::Done);
    assert_eq!(pair.source.memory().read(pair.source_base + 3 * BLOCK, BLOCK).unwrap(), [9; 64]);
    let messages = eventually(|| Some(pair.source.take_notifications()).filter(|m| !m.is_empty()));
    assert_eq!(messages[0].1, b"d:1");
}

#[test]
fn notifications_arrive_in_order_without_a_transfer() {
    let mut pair = pair();
    for message in [&b"HB:a"[..], b"a:1", b""] {
        pair.reader.send_notification(&pair.source_name, message).unwrap();
    }
    let mut arrived = Vec::new();
    eventually(|| {
        arrived.extend(pair.source.take_notifications().into_iter().map(|(_, message)| message));
        (arrived.len() == 3).then_some(())
    });
    assert_eq!(arrived, [&b"HB:a"[..], b"a:1", b""]);
}

#[test]
fn a_source_that_is_gone_fails_the_transfer() {
    let mut pair = pair();
    drop(pair.source);
    let transfer =
        pair.reader.make_transfer(TransferOp::Read, (pair.local, &[0]), (pair.remote, &[0]), None).unwrap();
    pair.reader.post(transfer).unwrap();
    assert_eq!(ended(&mut pair.reader, transfer), TransferState::Failed);
    assert_eq!(pair.reader.telemetry(transfer), None);
}

#[test]
fn a_source_that_dies_between_two_reads_fails_the_second() {
    let mut pair = pair();
    let read = |reader: &mut LoopbackAgent| {
        let transfer =
            reader.make_transfer(TransferOp::Read, (pair.local, &[0]), (pair.remote, &[0]), None).unwrap();
        reader.post(transfer).unwrap();
        ended(reader, transfer)
    };
    assert_eq!(read(&mut pair.reader), TransferState::Done);
    drop(pair.source);
    assert_eq!(read(&mut pair.reader), TransferState::Failed);
}

#[test]
fn memory_that_is_not_registered_cannot_be_read() {
    let memory = KvMemory::allocate(&[64, 64]);
    let bases = memory.base_addresses();
    let mut source = LoopbackAgent::new("source", memory).unwrap();
    let registered = Descriptor { address: bases[0], len: 64, device: 0 };
    source.register_memory(MemoryType::Dram, &[registered]).unwrap();
    let (mut reader, base) = agent("reader");
    let name = reader.add_remote_agent(&source.agent_metadata()).unwrap();
    let local = reader.prepare_local(MemoryType::Dram, &blocks(base)).unwrap();
    let hidden = Descriptor { address: bases[1], len: 64, device: 0 };
    let beyond = Descriptor { address: u64::MAX - 3, len: 64, device: 0 };
    let remote = reader.prepare_remote(&name, MemoryType::Dram, &[hidden, beyond, registered]).unwrap();
    for (id, state) in [(0, TransferState::Failed), (1, TransferState::Failed), (2, TransferState::Done)] {
        let transfer = reader.make_transfer(TransferOp::Read, (local, &[0]), (remote, &[id]), None).unwrap();
        reader.post(transfer).unwrap();
        assert_eq!(ended(&mut reader, transfer), state, "descriptor {id}");
    }
    assert!(source.register_memory(MemoryType::Dram, &[beyond]).is_err());
    assert!(source.prepare_local(MemoryType::Dram, &[hidden]).is_err());
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
fn selections_are_checked_before_anything_moves() {
    let mut pair = pair();
    let (local, remote) = (pair.local, pair.remote);
    let mut make = |l: (ListId, &[u64]), r: (ListId, &[u64])| {
        pair.reader.make_transfer(TransferOp::Read, l, r, None).map(|_| ())
    };
    let out = Err(TransportError::IndexOutOfRange { index: 8, len: 8 });
    assert_eq!(make((local, &[0]), (remote, &[8])), out);
    assert_eq!(make((local, &[0, 1]), (remote, &[0])), Err(TransportError::Mismatch));
    assert_eq!(make((remote, &[0]), (local, &[0])), Err(TransportError::Mismatch));
    assert_eq!(make((ListId(99), &[0]), (remote, &[0])), Err(TransportError::UnknownHandle(99)));
    let shorter = Descriptor { address: pair.source_base, len: 8, device: 0 };
    let short = pair.reader.prepare_remote(&pair.source_name, MemoryType::Dram, &[shorter]).unwrap();
    let transfer = pair.reader.make_transfer(TransferOp::Read, (local, &[0]), (short, &[0]), None);
    assert_eq!(transfer, Err(TransportError::Mismatch));
}

#[test]
fn calls_and_transfers_fail_as_scripted() {
    let mut pair = pair();
    let faults = pair.reader.faults();
    faults.fail_next(Call::MakeTransfer, 1);
    let mut make =
        || pair.reader.make_transfer(TransferOp::Read, (pair.local, &[0]), (pair.remote, &[0]), None);
    assert_eq!(make(), Err(TransportError::Scripted(Call::MakeTransfer)));
    let transfer = make().unwrap();
    faults.fail_next(Call::Post, 1);
    assert_eq!(pair.reader.post(transfer), Err(TransportError::Scripted(Call::Post)));
    faults.fail_next_transfers(1);
    pair.reader.post(transfer).unwrap();
    assert_eq!(ended(&mut pair.reader, transfer), TransferState::Failed);
    faults.fail_next(Call::ReleaseTransfer, 1);
    assert!(pair.reader.release_transfer(transfer).is_err());
    assert_eq!(pair.reader.release_transfer(transfer), Ok(()));
    assert_eq!(pair.reader.live_handles(), 2);
}

#[test]
fn a_removed_peer_is_unknown_and_can_be_added_again() {
    let mut pair = pair();
    pair.reader.remove_remote_agent(&pair.source_name).unwrap();
    let unknown = TransportError::UnknownAgent(pair.source_name.0.clone());
    assert_eq!(pair.reader.send_notification(&pair.source_name, b"x"), Err(unknown.clone()));
    assert_eq!(pair.reader.remove_remote_agent(&pair.source_name), Err(unknown));
    let again = pair.reader.add_remote_agent(&pair.source.agent_metadata()).unwrap();
    pair.reader.send_notification(&again, b"x").unwrap();
    eventually(|| Some(pair.source.take_notifications()).filter(|m| !m.is_empty()));
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

//! What every transport promises, as tests that run against each of them.

use std::time::{Duration, Instant};

use super::{
    AgentName, Descriptor, KvMemory, ListId, MemoryType, TransferId, TransferOp, TransferState, Transport,
    TransportError,
};

pub(super) const BLOCK: u64 = 64;
pub(super) const BLOCKS: u64 = 8;

/// Makes agents of one transport that can reach each other.
pub(super) trait Rig: Default {
    type Agent: Transport;

    /// False, and said so, where the transport cannot run.
    fn is_ready() -> bool {
        true
    }

    /// An agent over zeroed regions of these lengths, none of them registered.
    fn agent(&mut self, name: &str, region_lens: &[usize]) -> (Self::Agent, KvMemory);
}

/// Waits for something another thread does; ten seconds are far beyond any of it.
pub(super) fn eventually<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < Duration::from_secs(10), "nothing happened");
        std::thread::yield_now();
    }
}

pub(super) fn ended(agent: &mut impl Transport, transfer: TransferId) -> TransferState {
    eventually(|| Some(agent.poll(transfer).unwrap()).filter(|state| *state != TransferState::InProgress))
}

pub(super) fn blocks(base: u64) -> Vec<Descriptor> {
    (0..BLOCKS).map(|i| Descriptor { address: base + i * BLOCK, len: BLOCK, device: 0 }).collect()
}

fn whole(base: u64) -> Descriptor {
    Descriptor { address: base, len: BLOCK * BLOCKS, device: 0 }
}

/// An agent with one registered region of eight blocks.
pub(super) fn engine<R: Rig>(rig: &mut R, name: &str) -> (R::Agent, KvMemory, u64) {
    let (mut agent, memory) = rig.agent(name, &[(BLOCK * BLOCKS) as usize]);
    let base = memory.base_addresses()[0];
    agent.register_memory(MemoryType::Dram, &[whole(base)]).unwrap();
    (agent, memory, base)
}

pub(super) struct Pair<R: Rig> {
    pub(super) rig: R,
    pub(super) reader: R::Agent,
    pub(super) reader_memory: KvMemory,
    pub(super) reader_base: u64,
    pub(super) source: R::Agent,
    pub(super) source_memory: KvMemory,
    pub(super) source_base: u64,
    pub(super) source_name: AgentName,
    pub(super) local: ListId,
    pub(super) remote: ListId,
}

impl<R: Rig> Pair<R> {
    pub(super) fn new() -> Self {
        let mut rig = R::default();
        let (mut reader, reader_memory, reader_base) = engine(&mut rig, "reader");
        let (source, source_memory, source_base) = engine(&mut rig, "source");
        let source_name = reader.add_remote_agent(&source.agent_metadata()).unwrap();
        let local = reader.prepare_local(MemoryType::Dram, &blocks(reader_base)).unwrap();
        let remote = reader.prepare_remote(&source_name, MemoryType::Dram, &blocks(source_base)).unwrap();
        Self {
            rig,
            reader,
            reader_memory,
            reader_base,
            source,
            source_memory,
            source_base,
            source_name,
            local,
            remote,
        }
    }

    /// A posted read of one block into the block of the same number.
    pub(super) fn post_read(&mut self, block: u64) -> TransferId {
        let ids = [block];
        let (local, remote) = ((self.local, &ids[..]), (self.remote, &ids[..]));
        let transfer = self.reader.make_transfer(TransferOp::Read, local, remote, None).unwrap();
        self.reader.post(transfer).unwrap();
        transfer
    }
}

fn messages(agent: &mut impl Transport, count: usize) -> Vec<(AgentName, Vec<u8>)> {
    let mut arrived = Vec::new();
    eventually(|| {
        arrived.extend(agent.take_notifications());
        (arrived.len() >= count).then_some(())
    });
    arrived
}

pub(super) fn a_read_moves_the_selected_blocks_and_then_notifies<R: Rig>() {
    let mut pair = Pair::<R>::new();
    for block in 0..BLOCKS {
        let content = vec![block as u8 + 1; BLOCK as usize];
        pair.source_memory.write(pair.source_base + block * BLOCK, &content).unwrap();
    }
    let (local, remote) = ((pair.local, &[0, 5][..]), (pair.remote, &[7, 2][..]));
    let transfer = pair.reader.make_transfer(TransferOp::Read, local, remote, Some(b"r:1")).unwrap();
    assert!(pair.source.take_notifications().is_empty());
    assert_eq!(pair.reader.telemetry(transfer), None);
    assert_eq!(pair.reader.post(transfer), Ok(TransferState::InProgress));
    assert_eq!(ended(&mut pair.reader, transfer), TransferState::Done);
    let read = |block: u64| pair.reader_memory.read(pair.reader_base + block * BLOCK, BLOCK).unwrap();
    assert_eq!([read(0), read(5), read(1)], [vec![8; 64], vec![3; 64], vec![0; 64]]);
    let telemetry = pair.reader.telemetry(transfer).unwrap();
    assert_eq!((telemetry.bytes, telemetry.descriptors), (2 * BLOCK, 2));
    assert!(telemetry.transfer >= telemetry.post);
    let arrived = messages(&mut pair.source, 1);
    assert_eq!((arrived.len(), &arrived[0].1[..]), (1, &b"r:1"[..]));
    assert!(arrived[0].0.0.starts_with("reader#"));
    pair.reader.release_transfer(transfer).unwrap();
    assert_eq!(pair.reader.poll(transfer), Err(TransportError::UnknownHandle(transfer.0)));
    assert_eq!(pair.reader.release_transfer(transfer), Err(TransportError::UnknownHandle(transfer.0)));
}

pub(super) fn a_write_moves_bytes_the_other_way<R: Rig>() {
    let mut pair = Pair::<R>::new();
    pair.reader_memory.write(pair.reader_base, &[9; 64]).unwrap();
    let (local, remote) = ((pair.local, &[0][..]), (pair.remote, &[3][..]));
    let transfer = pair.reader.make_transfer(TransferOp::Write, local, remote, Some(b"d:1")).unwrap();
    pair.reader.post(transfer).unwrap();
    assert_eq!(ended(&mut pair.reader, transfer), TransferState::Done);
    assert_eq!(messages(&mut pair.source, 1)[0].1, b"d:1");
    assert_eq!(pair.source_memory.read(pair.source_base + 3 * BLOCK, BLOCK).unwrap(), [9; 64]);
}

pub(super) fn many_transfers_run_at_once<R: Rig>() {
    let mut pair = Pair::<R>::new();
    pair.source_memory.write(pair.source_base, &[4; (BLOCK * BLOCKS) as usize]).unwrap();
    let transfers: Vec<TransferId> = (0..BLOCKS).map(|block| pair.post_read(block)).collect();
    for transfer in transfers {
        assert_eq!(ended(&mut pair.reader, transfer), TransferState::Done);
        pair.reader.release_transfer(transfer).unwrap();
    }
    let all = pair.reader_memory.read(pair.reader_base, BLOCK * BLOCKS).unwrap();
    assert_eq!(all, [4; (BLOCK * BLOCKS) as usize]);
}

pub(super) fn notifications_arrive_in_order_without_a_transfer<R: Rig>() {
    let mut pair = Pair::<R>::new();
    let sent = [&b"HB:a"[..], b"a:1", b"", b"\xff\0\xfe"];
    for message in sent {
        pair.reader.send_notification(&pair.source_name, message).unwrap();
    }
    let arrived: Vec<Vec<u8>> =
        messages(&mut pair.source, 4).into_iter().map(|(_, message)| message).collect();
    assert_eq!(arrived, sent);
}

pub(super) fn a_source_that_is_gone_fails_the_transfer<R: Rig>() {
    let pair = Pair::<R>::new();
    let Pair { rig, mut reader, source, local, remote, .. } = pair;
    drop(source);
    let transfer = reader.make_transfer(TransferOp::Read, (local, &[0]), (remote, &[0]), None).unwrap();
    reader.post(transfer).unwrap();
    assert_eq!(ended(&mut reader, transfer), TransferState::Failed);
    assert_eq!(reader.telemetry(transfer), None);
    drop(rig);
}

pub(super) fn a_source_that_dies_between_two_reads_fails_the_second<R: Rig>() {
    let mut pair = Pair::<R>::new();
    let first = pair.post_read(0);
    assert_eq!(ended(&mut pair.reader, first), TransferState::Done);
    let Pair { rig, mut reader, source, local, remote, source_name, .. } = pair;
    drop(source);
    let second = reader.make_transfer(TransferOp::Read, (local, &[0]), (remote, &[0]), None).unwrap();
    reader.post(second).unwrap();
    assert_eq!(ended(&mut reader, second), TransferState::Failed);
    assert_eq!(reader.remove_remote_agent(&source_name), Ok(()));
    assert!(!reader.knows_remote_agent(&source_name));
    drop(rig);
}

/// A transport may refuse to prepare what it cannot read, or fail the transfer.
pub(super) fn memory_that_is_not_registered_cannot_be_read<R: Rig>() {
    let mut rig = R::default();
    let (mut source, memory) = rig.agent("source", &[64, 64]);
    let bases = memory.base_addresses();
    memory.write(bases[1], &[5; 64]).unwrap();
    let registered = Descriptor { address: bases[0], len: 64, device: 0 };
    source.register_memory(MemoryType::Dram, &[registered]).unwrap();
    let (mut reader, reader_memory, base) = engine(&mut rig, "reader");
    let name = reader.add_remote_agent(&source.agent_metadata()).unwrap();
    let local = reader.prepare_local(MemoryType::Dram, &blocks(base)).unwrap();
    let hidden = Descriptor { address: bases[1], len: 64, device: 0 };
    let beyond = Descriptor { address: u64::MAX - 3, len: 64, device: 0 };
    for (range, outcome) in
        [(hidden, TransferState::Failed), (beyond, TransferState::Failed), (registered, TransferState::Done)]
    {
        let Ok(remote) = reader.prepare_remote(&name, MemoryType::Dram, &[range]) else {
            assert_eq!(outcome, TransferState::Failed, "{range:?} was refused");
            continue;
        };
        let transfer = reader.make_transfer(TransferOp::Read, (local, &[0]), (remote, &[0]), None).unwrap();
        reader.post(transfer).unwrap();
        assert_eq!(ended(&mut reader, transfer), outcome, "{range:?}");
    }
    assert_eq!(reader_memory.read(base, BLOCK).unwrap(), [0; 64]);
    let not_registered =
        |range: Descriptor| Err(TransportError::NotRegistered { address: range.address, len: range.len });
    assert_eq!(source.register_memory(MemoryType::Dram, &[beyond]).map(|_| ()), not_registered(beyond));
    assert_eq!(source.prepare_local(MemoryType::Dram, &[hidden]).map(|_| ()), not_registered(hidden));
}

pub(super) fn selections_are_checked_before_anything_moves<R: Rig>() {
    let mut pair = Pair::<R>::new();
    let (local, remote) = (pair.local, pair.remote);
    let mut make = |l: (ListId, &[u64]), r: (ListId, &[u64])| {
        pair.reader.make_transfer(TransferOp::Read, l, r, None).map(|_| ())
    };
    let out = Err(TransportError::IndexOutOfRange { index: 8, len: 8 });
    assert_eq!(make((local, &[0]), (remote, &[8])), out);
    assert_eq!(make((local, &[8]), (remote, &[0])), out);
    assert_eq!(make((local, &[0, 1]), (remote, &[0])), Err(TransportError::Mismatch));
    assert_eq!(make((remote, &[0]), (local, &[0])), Err(TransportError::Mismatch));
    assert_eq!(make((ListId(99), &[0]), (remote, &[0])), Err(TransportError::UnknownHandle(99)));
    let shorter = Descriptor { address: pair.source_base, len: 8, device: 0 };
    let short = pair.reader.prepare_remote(&pair.source_name, MemoryType::Dram, &[shorter]).unwrap();
    let transfer = pair.reader.make_transfer(TransferOp::Read, (local, &[0]), (short, &[0]), None);
    assert_eq!(transfer, Err(TransportError::Mismatch));
}

pub(super) fn handles_are_known_until_they_are_released<R: Rig>() {
    let mut pair = Pair::<R>::new();
    let transfer = pair.post_read(1);
    assert_eq!(pair.reader.release_list(pair.local), Ok(()));
    assert_eq!(pair.reader.release_list(pair.local), Err(TransportError::UnknownHandle(pair.local.0)));
    assert_eq!(ended(&mut pair.reader, transfer), TransferState::Done, "it goes on without its list");
    let again = pair.reader.make_transfer(TransferOp::Read, (pair.local, &[0]), (pair.remote, &[0]), None);
    assert_eq!(again, Err(TransportError::UnknownHandle(pair.local.0)));
    let (mut other, _memory, base) = engine(&mut pair.rig, "other");
    let registration = other.register_memory(MemoryType::Dram, &[blocks(base)[0]]).unwrap();
    assert_eq!(other.deregister_memory(registration), Ok(()));
    assert_eq!(other.deregister_memory(registration), Err(TransportError::UnknownHandle(registration.0)));
}

pub(super) fn a_removed_peer_is_unknown_and_can_be_added_again<R: Rig>() {
    let mut pair = Pair::<R>::new();
    assert!(pair.reader.knows_remote_agent(&pair.source_name));
    let made = pair.reader.make_transfer(TransferOp::Read, (pair.local, &[0]), (pair.remote, &[0]), None);
    pair.reader.remove_remote_agent(&pair.source_name).unwrap();
    assert!(!pair.reader.knows_remote_agent(&pair.source_name));
    let unknown = TransportError::UnknownAgent(pair.source_name.0.clone());
    assert_eq!(pair.reader.post(made.unwrap()), Err(unknown.clone()));
    assert_eq!(pair.reader.send_notification(&pair.source_name, b"x"), Err(unknown.clone()));
    assert_eq!(pair.reader.prepare_remote(&pair.source_name, MemoryType::Dram, &[]), Err(unknown.clone()));
    assert_eq!(pair.reader.remove_remote_agent(&pair.source_name), Err(unknown));
    let again = pair.reader.add_remote_agent(&pair.source.agent_metadata()).unwrap();
    assert_eq!(again, pair.source_name);
    pair.reader.send_notification(&again, b"x").unwrap();
    assert_eq!(messages(&mut pair.source, 1)[0].1, b"x");
    let list = pair.reader.prepare_remote(&again, MemoryType::Dram, &blocks(pair.source_base)).unwrap();
    let transfer =
        pair.reader.make_transfer(TransferOp::Read, (pair.local, &[2]), (list, &[2]), None).unwrap();
    pair.reader.post(transfer).unwrap();
    assert_eq!(ended(&mut pair.reader, transfer), TransferState::Done);
}

pub(super) fn foreign_blobs_are_refused<R: Rig>() {
    let mut rig = R::default();
    let (mut agent, _memory, _base) = engine(&mut rig, "agent");
    for blob in [&b""[..], b"hello", b"nixlSerDes|Agent", &[0xff; 300]] {
        assert_eq!(agent.add_remote_agent(blob), Err(TransportError::BadAgentMetadata));
    }
}

/// Makes a test of every function above for the transport of a [`Rig`].
macro_rules! transport_contract {
    ($rig:ty; $($name:ident),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                if <$rig as $crate::transport::contract::Rig>::is_ready() {
                    $crate::transport::contract::$name::<$rig>();
                }
            }
        )+
    };
    ($rig:ty) => {
        $crate::transport::contract::transport_contract! { $rig;
            a_read_moves_the_selected_blocks_and_then_notifies,
            a_write_moves_bytes_the_other_way,
            many_transfers_run_at_once,
            notifications_arrive_in_order_without_a_transfer,
            a_source_that_is_gone_fails_the_transfer,
            a_source_that_dies_between_two_reads_fails_the_second,
            memory_that_is_not_registered_cannot_be_read,
            selections_are_checked_before_anything_moves,
            handles_are_known_until_they_are_released,
            a_removed_peer_is_unknown_and_can_be_added_again,
            foreign_blobs_are_refused,
        }
    };
}
pub(super) use transport_contract;

mod loopback {
    use crate::transport::KvMemory;
    use crate::transport::contract::Rig;
    use crate::transport::loopback::{Fabric, LoopbackAgent};

    mod sockets {
        use super::*;

        #[derive(Default)]
        struct Sockets;

        impl Rig for Sockets {
            type Agent = LoopbackAgent;

            fn agent(&mut self, name: &str, region_lens: &[usize]) -> (LoopbackAgent, KvMemory) {
                let memory = KvMemory::allocate(region_lens);
                (LoopbackAgent::new(name, memory.clone()).unwrap(), memory)
            }
        }

        transport_contract!(Sockets);
    }

    mod fabric {
        use super::*;

        impl Rig for Fabric {
            type Agent = LoopbackAgent;

            fn agent(&mut self, name: &str, region_lens: &[usize]) -> (LoopbackAgent, KvMemory) {
                let memory = KvMemory::allocate(region_lens);
                (LoopbackAgent::in_fabric(name, memory.clone(), self), memory)
            }
        }

        transport_contract!(Fabric);
    }
}

use std::path::PathBuf;
use std::time::Instant;

use super::*;
use crate::transport::KvMemory;
use crate::transport::contract::{self, Pair, Rig, eventually};

/// Where scripts/nixl-setup installs, unless it was told otherwise.
fn installed() -> LibrarySource {
    let home = std::env::var_os("KVBATON_NIXL_HOME").map(PathBuf::from).unwrap_or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
        cache.unwrap_or_default().join("kvbaton/nixl-1.5.1")
    });
    LibrarySource::Folders(vec![home.join("python")])
}

/// None, and said so, where NIXL is not installed and nobody insists on it.
fn library() -> Option<NixlLibrary> {
    match NixlLibrary::load(&installed()) {
        Ok(library) => Some(library),
        Err(error) if std::env::var_os("KVBATON_REQUIRE_NIXL").is_some() => panic!("{error}"),
        Err(error) => {
            eprintln!("skipped: {error} (scripts/nixl-setup installs it)");
            None
        }
    }
}

fn polling(name: &str) -> NixlConfig {
    NixlConfig { progress: Progress::Polling(Duration::from_micros(200)), ..NixlConfig::new(name) }
}

#[derive(Default)]
struct Nixl;

impl Rig for Nixl {
    type Agent = NixlAgent;

    fn is_ready() -> bool {
        library().is_some()
    }

    fn agent(&mut self, name: &str, region_lens: &[usize]) -> (NixlAgent, KvMemory) {
        let memory = KvMemory::allocate_addressable(region_lens).unwrap();
        let library = library().expect("checked before");
        let agent = NixlAgent::new(polling(name), &library, NixlMemory::of(&memory).unwrap()).unwrap();
        (agent, memory)
    }
}

contract::transport_contract!(Nixl);

#[test]
fn a_missing_library_is_said_with_the_line_that_installs_it() {
    for source in [
        LibrarySource::Path("/nowhere/libnixl_capi.so".into()),
        LibrarySource::Folders(vec!["/nowhere".into(), "/".into()]),
        LibrarySource::Folders(vec![]),
    ] {
        let error = NixlLibrary::load(&source).unwrap_err();
        assert!(matches!(error, NixlError::NotAvailable { .. }));
        let text = error.to_string();
        assert!(text.starts_with("NIXL not available: "), "{text}");
        assert!(text.contains("pip install --no-deps nixl-cu12==1.5.1"), "{text}");
    }
}

#[test]
fn the_installed_library_tells_its_version_and_loads_twice() {
    let Some(library) = library() else { return };
    assert_eq!(library.version(), Some(NixlVersion { major: 1, minor: 5, patch: 1 }));
    assert!(library.path().is_absolute());
    assert_eq!(NixlLibrary::load(&LibrarySource::Path(library.path().into())), Ok(library));
}

#[test]
fn versions_talk_within_their_ucx_generation() {
    let version = |text| NixlVersion::parse(text).unwrap();
    for (one, other, talk) in [
        ("1.5.1", "1.4.0", true),
        ("1.5.1", "1.9.12", true),
        ("1.3.1", "0.6.0", false),
        ("1.3.1", "1.0.0", true),
        ("1.4.0", "1.3.1", false),
        ("1.5.1", "2.0.0", false),
        ("0.8.0", "0.7.1", true),
    ] {
        assert_eq!(version(one).talks_with(version(other)), talk, "{one} {other}");
        assert_eq!(version(other).talks_with(version(one)), talk, "{other} {one}");
    }
    assert_eq!(NixlVersion::parse("1.5.1rc2"), NixlVersion::parse("1.5.1"));
    assert_eq!([NixlVersion::parse("1.5"), NixlVersion::parse("a.b.c"), NixlVersion::parse("")], [None; 3]);
    assert_eq!(version("1.5.1").to_string(), "1.5.1");
}

#[test]
fn peers_of_unknown_or_unfit_version_are_never_loaded() {
    let Some(library) = library() else { return };
    // As an agent of vLLM's would be: a name that tells nothing.
    let foreign = |name: &str| {
        let memory = NixlMemory::none();
        let config = NixlConfig { name: name.into(), ..polling(name) };
        let mut unversioned = library.clone();
        unversioned.forget_version();
        NixlAgent::new(config, &unversioned, memory).unwrap()
    };
    let peers = PeerVersions::default();
    let config = NixlConfig { peers: peers.clone(), ..polling("careful") };
    let mut agent = NixlAgent::new(config, &library, NixlMemory::none()).unwrap();
    let peer = foreign("peer");
    let blob = peer.agent_metadata();
    let unknown = TransportError::UnknownVersion(peer.name().to_owned());
    assert_eq!(agent.add_remote_agent(&blob), Err(unknown));
    let name = peers.announce(&blob, NixlVersion { major: 1, minor: 3, patch: 1 }).unwrap();
    assert_eq!(agent.add_remote_agent(&blob), Err(TransportError::IncompatibleVersion(name.0.clone())));
    assert!(!agent.knows_remote_agent(&name));
    assert_eq!(agent.send_notification(&name, b"x"), Err(TransportError::UnknownAgent(name.0.clone())));
    peers.announce(&blob, NixlVersion { major: 1, minor: 4, patch: 0 }).unwrap();
    assert_eq!(agent.add_remote_agent(&blob), Ok(name.clone()));
    peers.forget(&name);
    assert!(agent.add_remote_agent(&blob).is_err());
    let config = NixlConfig { peers: PeerVersions::allowing_unknown(), ..polling("careless") };
    let mut careless = NixlAgent::new(config, &library, NixlMemory::none()).unwrap();
    assert_eq!(careless.add_remote_agent(&blob), Ok(name));
    assert_eq!(peers.announce(b"no blob", library.version().unwrap()), Err(TransportError::BadAgentMetadata));
}

#[test]
fn an_agent_does_not_add_itself() {
    let Some(library) = library() else { return };
    let mut agent = NixlAgent::new(polling("self"), &library, NixlMemory::none()).unwrap();
    let own = agent.agent_metadata();
    assert_eq!(agent.add_remote_agent(&own), Err(TransportError::BadAgentMetadata));
}

#[test]
fn a_damaged_blob_does_not_spoil_the_right_one() {
    if library().is_none() {
        return;
    }
    let mut pair = Pair::<Nixl>::new();
    pair.reader.remove_remote_agent(&pair.source_name).unwrap();
    let blob = pair.source.agent_metadata();
    for len in (0..blob.len()).step_by(7) {
        assert_eq!(pair.reader.add_remote_agent(&blob[..len]), Err(TransportError::BadAgentMetadata));
    }
    assert_eq!(pair.reader.add_remote_agent(&blob), Ok(pair.source_name));
}

#[test]
fn memory_with_made_up_addresses_is_refused() {
    let memory = KvMemory::allocate(&[64]);
    assert!(!memory.is_addressable());
    assert_eq!(NixlMemory::of(&memory).unwrap_err(), NixlError::NotAddressable);
}

#[test]
fn an_agent_without_memory_notifies() {
    let Some(library) = library() else { return };
    let mut pair = Pair::<Nixl>::new();
    let mut notifier = NixlAgent::new(polling("notifier"), &library, NixlMemory::none()).unwrap();
    let source = notifier.add_remote_agent(&pair.source.agent_metadata()).unwrap();
    notifier.send_notification(&source, b"cmpl-1:1").unwrap();
    // It leaves at once: what it has sent still goes out.
    drop(notifier);
    let arrived = eventually(|| pair.source.take_notifications().pop());
    assert_eq!(arrived.1, b"cmpl-1:1");
    assert!(arrived.0.0.starts_with("notifier#"));
}

#[test]
fn calls_return_at_once_while_bytes_move_and_unfinished_handles_stay() {
    let Some(library) = library() else { return };
    const LEN: usize = 128 << 20;
    let engine = |name: &str| {
        let memory = KvMemory::allocate_addressable(&[LEN]).unwrap();
        let reachable = NixlMemory::of(&memory).unwrap();
        let mut agent = NixlAgent::new(NixlConfig::new(name), &library, reachable).unwrap();
        let range = Descriptor { address: memory.base_addresses()[0], len: LEN as u64, device: 0 };
        agent.register_memory(MemoryType::Dram, &[range]).unwrap();
        (agent, memory, range)
    };
    let (source, source_memory, source_range) = engine("source");
    let (mut reader, memory, range) = engine("reader");
    source_memory.write(source_range.address + LEN as u64 - 3, &[7; 3]).unwrap();
    let name = reader.add_remote_agent(&source.agent_metadata()).unwrap();
    let local = reader.prepare_local(MemoryType::Dram, &[range]).unwrap();
    let remote = reader.prepare_remote(&name, MemoryType::Dram, &[source_range]).unwrap();
    let transfer = reader.make_transfer(TransferOp::Read, (local, &[0]), (remote, &[0]), None).unwrap();
    let in_flight = TransportError::InProgress(transfer.0);
    // A loaded machine may not let this thread run while the bytes move; not five times, though.
    let seen_in_flight = (0..5).any(|_| {
        let started = Instant::now();
        reader.post(transfer).unwrap();
        let called = started.elapsed();
        let again = reader.post(transfer);
        if again.is_ok() {
            contract::ended(&mut reader, transfer);
            return false;
        }
        assert_eq!(again, Err(in_flight.clone()));
        let released = reader.release_transfer(transfer);
        assert_eq!(contract::ended(&mut reader, transfer), TransferState::Done);
        released == Err(in_flight.clone()) && called < started.elapsed() / 4
    });
    assert!(seen_in_flight, "posting waited for the bytes");
    assert_eq!(memory.read(range.address + LEN as u64 - 4, 4).unwrap(), [0, 7, 7, 7]);
    assert_eq!(reader.release_transfer(transfer), Ok(()));
    assert_eq!(reader.live_handles(), 2);
}

#[test]
fn an_agent_may_be_dropped_in_the_middle() {
    if library().is_none() {
        return;
    }
    for _ in 0..3 {
        let mut pair = Pair::<Nixl>::new();
        pair.post_read(0);
        pair.reader.send_notification(&pair.source_name, b"x").unwrap();
        drop(pair);
    }
}

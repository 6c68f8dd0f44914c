//! Against real agents of NIXL in this process, where it is installed.

use std::path::PathBuf;
use std::time::Instant;

use super::*;
use crate::notify::tests::{notice, registered};
use crate::registry::RegistryLimits;

const VERSION: NixlVersion = NixlVersion { major: 1, minor: 5, patch: 1 };

/// Where scripts/nixl-setup installs; none, and said so, where nothing is and nobody insists on it.
fn installed() -> Option<PathBuf> {
    let home = std::env::var_os("KVBATON_NIXL_HOME").map(PathBuf::from).unwrap_or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
        cache.unwrap_or_default().join("kvbaton/nixl-1.5.1")
    });
    if home.join("complete").exists() {
        return Some(home.join("python"));
    }
    assert!(std::env::var_os("KVBATON_REQUIRE_NIXL").is_none(), "NIXL is required but not installed");
    eprintln!("skipped: NIXL is not installed (scripts/nixl-setup installs it)");
    None
}

fn router(library: PathBuf) -> Agent {
    Agent::start(&Nixl { library: Some(library), version: None }).unwrap()
}

/// An engine's rank, as far as notifications go.
fn rank(library: &std::path::Path, name: &str) -> NixlAgent {
    let library = NixlLibrary::load(&source(library)).unwrap();
    let config = NixlConfig { progress: Progress::Polling(TURN), ..NixlConfig::new(name) };
    NixlAgent::new(config, &library, NixlMemory::none()).unwrap()
}

/// What a rank has heard, small talk left out, once it has heard so much small talk.
fn heard(rank: &mut NixlAgent, small_talk: usize) -> Vec<String> {
    let (started, mut all) = (Instant::now(), Vec::new());
    while all.iter().filter(|text| *text == "HB:").count() < small_talk {
        all.extend(rank.take_notifications().into_iter().map(|(_, text)| String::from_utf8(text).unwrap()));
        assert!(started.elapsed() < Duration::from_secs(20), "heard only {all:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    all.retain(|text| text != "HB:");
    all
}

#[tokio::test]
async fn every_rank_hears_the_word_once() {
    let Some(library) = installed() else { return };
    let (mut first, mut second) = (rank(&library, "p-0"), rank(&library, "p-1"));
    let mut router = router(library);
    assert_eq!(router.version(), Some(VERSION));
    let registry = Registry::new(RegistryLimits::default());
    let engine = registered(&registry, "e", &[&first.agent_metadata(), &second.agent_metadata()]);
    for _ in 0..2 {
        router.tell(&notice("e", &engine), VERSION).unwrap();
        router.probe(&notice("e", &engine)).unwrap();
    }
    for rank in [&mut first, &mut second] {
        assert_eq!(heard(rank, 2), ["cmpl-r-0-aaaaaaaa:1", "cmpl-r-0-aaaaaaaa:1"]);
    }
    assert_eq!(router.engines.len(), 1);
}

#[tokio::test]
async fn a_restarted_engine_is_met_anew_and_one_that_left_is_forgotten() {
    let Some(library) = installed() else { return };
    let (mut before, mut after) = (rank(&library, "p"), rank(&library, "p"));
    let mut router = router(library);
    let registry = Registry::new(RegistryLimits::default());
    let engine = registered(&registry, "e", &[&before.agent_metadata()]);
    router.tell(&notice("e", &engine), VERSION).unwrap();
    router.probe(&notice("e", &engine)).unwrap();
    assert_eq!(heard(&mut before, 1).len(), 1);

    let engine = registered(&registry, "e", &[&after.agent_metadata()]);
    router.tell(&notice("e", &engine), VERSION).unwrap();
    router.probe(&notice("e", &engine)).unwrap();
    assert_eq!(heard(&mut after, 1).len(), 1);
    assert!(before.take_notifications().is_empty());
    let known: Vec<_> = router.engines["e"].ranks.values().map(|known| known.name.0.clone()).collect();
    assert_eq!(known, [after.name()]);

    router.forget_the_gone(&registry);
    assert_eq!(router.engines.len(), 1, "it is still registered");
    assert!(registry.remove("e"));
    router.forget_the_gone(&registry);
    assert!(router.engines.is_empty());
    // Registered again, it is loaded again.
    let engine = registered(&registry, "e", &[&after.agent_metadata()]);
    router.tell(&notice("e", &engine), VERSION).unwrap();
    router.probe(&notice("e", &engine)).unwrap();
    assert_eq!(heard(&mut after, 1).len(), 1);
}

#[tokio::test]
async fn an_engine_that_is_gone_is_refused_and_forgotten() {
    let Some(library) = installed() else { return };
    let (mut first, second) = (rank(&library, "p-0"), rank(&library, "p-1"));
    let mut router = router(library);
    let registry = Registry::new(RegistryLimits::default());
    let engine = registered(&registry, "e", &[&first.agent_metadata(), &second.agent_metadata()]);
    drop(second);
    let word = notice("e", &engine);
    let refused = router.tell(&word, VERSION).and_then(|()| router.probe(&word));
    assert!(refused.is_err());
    assert!(router.engines.is_empty());
    assert!(heard(&mut first, 0).len() <= 2);
}

#[tokio::test]
async fn what_is_no_metadata_of_nixl_is_not_loaded() {
    let Some(library) = installed() else { return };
    let mut router = router(library);
    let registry = Registry::new(RegistryLimits::default());
    let engine = registered(&registry, "e", &[b"not a blob"]);
    let refused = router.tell(&notice("e", &engine), VERSION);
    assert_eq!(refused, Err(TransportError::BadAgentMetadata));
    assert!(router.engines.is_empty());
}

#[test]
fn a_library_that_is_not_there_is_named() {
    let missing = Nixl { library: Some("/nonexistent/libnixl_capi.so".into()), version: None };
    let error = Agent::start(&missing).unwrap_err();
    assert!(matches!(error, NoAgent::Nixl(NixlError::NotAvailable { .. })), "{error}");
    assert!(matches!(Agent::start(&Nixl::default()).unwrap_err(), NoAgent::NoLibrary));
}

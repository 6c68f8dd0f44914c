use http::HeaderMap;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::*;
use crate::pool::{PeerSpec, Role};
use crate::request_id::RequestId;
use crate::settings::Settings;

fn router() -> Proxy {
    let proxy = Proxy::start(Settings::default(), TaskTracker::new(), CancellationToken::new());
    for (role, name) in [(Role::Prefill, "p1"), (Role::Prefill, "p2"), (Role::Decode, "d1")] {
        // Nobody listens there, and nobody is asked before the test has ended.
        let spec =
            PeerSpec { name: Some(name.to_owned()), ..PeerSpec::new(role, format!("http://{name}:1")) };
        proxy.core.pool.add(spec).unwrap();
    }
    proxy
}

/// What has changed since the last look. Without an await nothing else runs, so that nothing else changes.
fn look(pulse: &mut Pulse) -> Value {
    let json = pulse.look().unwrap();
    assert!(!json.contains('\n'));
    serde_json::from_str(&json).unwrap()
}

fn members(frame: &Value) -> Vec<&str> {
    frame.as_object().unwrap().keys().map(String::as_str).collect()
}

#[tokio::test(start_paused = true)]
async fn first_everything_then_what_has_changed() {
    let proxy = router();
    let mut pulse = proxy.pulse().unwrap();
    let first = look(&mut pulse);
    assert_eq!(members(&first), ["now_ms", "peers", "router", "pairs", "hand_offs", "matrix"]);
    let ids: Vec<&str> =
        first["peers"].as_array().unwrap().iter().map(|p| p["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["p1", "p2", "d1"]);
    assert_eq!(first["matrix"]["rows"], serde_json::json!([[0, 1], [0, 1]]));
    assert_eq!(first["matrix"]["kinds"][0]["verdict"], "unknown");

    let peer = proxy.core.pool.get("d1").unwrap();
    peer.traffic.record(&"p1".into(), Some(Duration::from_millis(3)));
    let busy = peer.enter();
    let second = look(&mut pulse);
    assert_eq!(members(&second), ["now_ms", "peers", "pairs"]);
    assert_eq!((second["peers"].as_array().unwrap().len(), &second["peers"][0]["in_flight"]), (1, &1.into()));
    let pair = &second["pairs"][0];
    assert_eq!(
        (&pair["prefill"], &pair["decode"], &pair["mean_ms"]),
        (&"p1".into(), &"d1".into(), &3.0.into())
    );
    drop(busy);

    let account = proxy.account(&RequestId::accept(None), "completions", &HeaderMap::new());
    let third = look(&mut pulse);
    assert_eq!((&third["requests"][0]["state"], &third["router"]["running"]), (&"running".into(), &1.into()));
    drop(account);
    assert!(proxy.remove_peer("p2").is_some());
    let fourth = look(&mut pulse);
    assert_eq!((&fourth["requests"][0]["state"], &fourth["gone"][0]), (&"ended".into(), &"p2".into()));
    assert_eq!(pulse.look(), None, "nothing has changed");
}

#[tokio::test(start_paused = true)]
async fn frames_are_never_less_than_a_quarter_of_a_second_apart() {
    let proxy = router();
    let mut pulse = proxy.pulse().unwrap();
    let began = Instant::now();
    let first = pulse.next().await.unwrap();
    assert!(first.whole && began.elapsed() < PAUSE);
    let peer = proxy.core.pool.get("d1").unwrap();
    for _ in 0..5 {
        let before = Instant::now();
        let _busy = peer.enter();
        let frame = pulse.next().await.unwrap();
        assert!(!frame.whole && before.elapsed() >= PAUSE);
    }
}

#[tokio::test]
async fn viewers_are_bounded_and_end_with_the_router() {
    let proxy = router();
    let mut all: Vec<Pulse> = (0..MOST_VIEWERS).map(|_| proxy.pulse().unwrap()).collect();
    assert_eq!(proxy.pulse().err(), Some(TooManyViewers { limit: MOST_VIEWERS }));
    all.pop();
    let mut last = proxy.pulse().unwrap();
    proxy.drain();
    assert_eq!(last.next().await, None);
}

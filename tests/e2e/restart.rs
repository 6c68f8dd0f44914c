//! A router without a store forgets its engines with its process, and has them again with their next
//! signs of life.

use std::net::SocketAddr;
use std::time::Duration;

use kvbaton::Running;
use kvbaton::config::{Config, Embedded};
use tokio::net::TcpListener;

use crate::support::{Answer, Log, bounded, engine_config, http_client, listen};

/// How often the engine speaks to the registry.
const INTERVAL: Duration = Duration::from_millis(500);

async fn router(listener: TcpListener) -> Running {
    let mut config = Config { listen: listener.local_addr().unwrap(), ..Config::default() };
    config.fleet.embedded = Embedded::Never;
    config.shutdown.settle = Duration::ZERO;
    config.build_on(listener).await.unwrap().spawn().await.unwrap()
}

async fn known(addr: SocketAddr, engine_id: &str) -> Answer {
    let url = format!("http://{addr}/registry/v1/engines/{engine_id}/ranks/0/0");
    let ask = async {
        loop {
            let answer = Answer::read(http_client().get(&url)).await;
            if answer.status == 200 {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    bounded("the engine is known", ask).await
}

#[tokio::test]
async fn a_router_that_is_started_anew_learns_its_engines_from_their_signs_of_life() {
    // The engine ends before the router does, which may look at it meanwhile.
    let log = Log::capture(Vec::new(), vec!["an engine is not usable"]);
    let listener = listen().await;
    let addr = listener.local_addr().unwrap();
    let first = router(listener).await;
    let mut config = engine_config(addr);
    config.registry_refresh = INTERVAL;
    let engine = engine_sim::spawn(config, listen().await).await.unwrap();
    let before = known(addr, engine.engine_id()).await;

    assert!(first.drain().await);
    let second = router(TcpListener::bind(addr).await.unwrap()).await;
    let answer = Answer::read(http_client().get(format!("http://{addr}/readyz"))).await.json();
    assert_eq!(answer["store"], serde_json::json!({"kind": "memory", "up": true, "age_seconds": 0.0}));
    // Its next sign of life is not recognised, and it registers at once: there is no second interval.
    let revision = second.proxy().registry().revision();
    let after = known(addr, engine.engine_id()).await;
    assert_eq!(after.body, before.body);
    let kvbaton_proxy::Changes::After(changes) = second.proxy().registry().changes_since(revision) else {
        panic!("the changes are known");
    };
    assert!(changes.iter().all(|change| change.kind == kvbaton_proxy::ChangeKind::Registered), "{changes:?}");

    engine.shutdown().await;
    assert!(second.drain().await);
    log.check();
}

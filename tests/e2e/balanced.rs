//! One address with several prefill engines behind it: ranks that a front spreads, each with an id of its own.

use std::net::SocketAddr;

use engine_sim::{ArmedFault, Fault, Leg};
use futures_util::future::join_all;
use kvbaton_proxy::PeerSpec;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::support::{COMPLETIONS, Cluster, PROMPT, completion, listen, single_text};

/// Each new connection goes to the next of them. Ends when dropped.
fn spread(listener: TcpListener, engines: Vec<SocketAddr>) -> JoinSet<()> {
    let mut front = JoinSet::new();
    front.spawn(async move {
        let mut connections = JoinSet::new();
        for engine in engines.iter().cycle() {
            let (mut near, _) = listener.accept().await.unwrap();
            let engine = *engine;
            connections.spawn(async move {
                // What ends a connection is either side's doing.
                if let Ok(mut far) = TcpStream::connect(engine).await {
                    let _ = copy_bidirectional(&mut near, &mut far).await;
                }
            });
        }
    });
    front
}

fn address_of(peer: &PeerSpec) -> SocketAddr {
    peer.url.trim_start_matches("http://").parse().unwrap()
}

#[tokio::test]
async fn item_63_hand_offs_of_all_engines_behind_one_address_are_relayed_and_released() {
    let (listener, behind) = (listen().await, std::sync::Arc::new(parking_lot::Mutex::new(Vec::new())));
    let (url, named) = (format!("http://{}", listener.local_addr().unwrap()), behind.clone());
    let one_address = move |config: &mut kvbaton::config::Config| {
        config.pairing.adopt_registered = false;
        named.lock().extend(config.prefill.iter().map(address_of));
        config.prefill = vec![PeerSpec::new(kvbaton_proxy::Role::Prefill, url.clone())];
        // No connection is used twice, so that each request may meet the other engine.
        config.timeouts.pool_idle = std::time::Duration::ZERO;
    };
    let cluster = Cluster::builder().prefill(2).config(one_address).unready().start().await;
    let _front = spread(listener, behind.lock().clone());
    cluster.wait_ready().await;

    let bodies: Vec<_> = (0..12).map(|number| completion(&format!("{number} {PROMPT}"), 4)).collect();
    let answers = join_all(bodies.iter().map(|body| cluster.post(COMPLETIONS, body))).await;
    for (body, answer) in bodies.iter().zip(answers) {
        assert_eq!(answer.generated(), single_text(COMPLETIONS, body).await);
    }
    let granted = |engine: &engine_sim::Engine| engine.stats().prefill_requests;
    assert!(cluster.prefill.iter().all(|engine| granted(engine) > 0), "both engines are met");
    assert_eq!(cluster.relayed().await, 12.0);
    let peers = cluster.get("/admin/peers").await.json();
    let prefill: Vec<_> =
        peers["peers"].as_array().unwrap().iter().filter(|peer| peer["role"] == "prefill").collect();
    let mut ids: Vec<_> = cluster.prefill.iter().map(|engine| json!(engine.engine_id())).collect();
    ids.sort_by_key(ToString::to_string);
    assert_eq!((prefill.len(), &prefill[0]["engine_ids"]), (1, &json!(ids)), "{peers}");

    // What the decode engine refuses is freed at the engine that holds it.
    let before: Vec<_> = cluster.prefill.iter().map(granted).collect();
    for _ in 0..4 {
        let body = json!({"error": {"message": "no", "type": "x", "param": null, "code": 400}});
        let fault = Fault::Refuse { status: 400, body };
        cluster.d().faults().arm(ArmedFault { fault, leg: Leg::Decode, sticky: false });
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, 400);
        cluster.wait_no_blocks().await;
    }
    assert!(cluster.prefill.iter().zip(before).all(|(engine, before)| granted(engine) > before));
    assert!(cluster.prefill.iter().all(|engine| engine.stats().kv_expired == 0));
    cluster.finish().await;
}

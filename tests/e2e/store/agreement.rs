//! What one router is told, all of them know; of two that want the same, one gets it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::routers::{Engines, Routers, payload, spawn_pair};
use crate::support::{COMPLETIONS, PROMPT, completion, http_client, single_text};

fn path(engine_id: &str) -> String {
    format!("/registry/v1/engines/{engine_id}")
}

fn rank(engine_id: &str, tp_rank: usize) -> String {
    format!("{}/ranks/0/{tp_rank}", path(engine_id))
}

fn registration(base_url: &str, ttl_seconds: f64) -> Value {
    json!({"base_url": base_url, "role": "prefill", "model": "m", "ttl_seconds": ttl_seconds})
}

#[tokio::test]
async fn an_engine_registered_at_one_router_is_used_by_all_and_leaves_all() {
    let Some(routers) = Routers::start(Engines::Used, &[]).await else { return };
    let engines = spawn_pair(routers.balancer.address(), |_| {}).await;
    for engine in &engines {
        routers.all_know(engine.engine_id(), true).await;
    }
    let seen = routers.engine(0, engines[0].engine_id()).await.json();
    for router in 1..3 {
        let other = routers.engine(router, engines[0].engine_id()).await.json();
        for field in ["revision", "generation", "base_url", "registered_at", "ranks", "compatibility_hash"] {
            assert_eq!(other[field], seen[field], "{field}");
        }
    }
    let body = completion(PROMPT, 6);
    let expected = single_text(COMPLETIONS, &body).await;
    routers.all("a pair is known", async |router| routers.get(router, "/readyz").await.status == 200).await;
    for router in 0..3 {
        let answer = routers.send(router, "POST", COMPLETIONS, &body).await;
        assert_eq!(answer.generated(), expected);
    }
    assert_eq!(engines[1].stats().kv_pulls, 3);
    let ids: Vec<String> = engines.iter().map(|engine| engine.engine_id().to_owned()).collect();
    for engine in engines {
        engine.shutdown().await;
    }
    for id in &ids {
        routers.all_know(id, false).await;
    }
    assert_eq!(routers.etcd.engines_keys().await, Vec::<String>::new());
    routers.finish(Vec::new()).await;
}

#[tokio::test]
async fn a_change_is_known_everywhere_within_a_second() {
    let Some(routers) = Routers::start(Engines::Known, &[]).await else { return };
    // The best of several: what the machine is busy with besides must not decide.
    let mut best = Duration::MAX;
    for number in 0..5 {
        let id = format!("e{number}");
        let began = Instant::now();
        let created =
            routers.send(number % 3, "PUT", &path(&id), &registration("http://10.0.0.1:1", 60.0)).await;
        assert_eq!(created.status, 201, "{created:?}");
        routers.all_know(&id, true).await;
        best = best.min(began.elapsed());
    }
    assert!(best < Duration::from_secs(1), "{best:?}");
    // Each one took the address of the one before.
    assert_eq!(routers.engine(1, "e4").await.json()["generation"], 5);
    for number in 0..4 {
        routers.all_know(&format!("e{number}"), false).await;
    }
    routers.finish(Vec::new()).await;
}

#[tokio::test]
async fn payloads_of_any_size_come_back_byte_for_byte_everywhere() {
    let Some(routers) = Routers::start(Engines::Known, &[]).await else { return };
    let sizes = [0, 1, 500_000, 524_288, 3_500_000];
    let put = async |tp_rank: usize, bytes: Vec<u8>, status: u16| {
        let url = format!("http://{}{}", routers.addrs[0], rank("big", tp_rank));
        let request = http_client().put(url).header("content-type", "application/msgpack").body(bytes);
        let answer = crate::support::Answer::read(request).await;
        assert_eq!(answer.status, status, "{answer:?}");
    };
    for (tp_rank, size) in sizes.iter().enumerate() {
        put(tp_rank, payload("big", 1, *size), 201).await;
    }
    let same_everywhere = async |mark: u8| {
        for (tp_rank, size) in sizes.iter().enumerate() {
            let expected = payload("big", mark, *size);
            let what = format!("rank {tp_rank} is of mark {mark}");
            let is_there = async |router| {
                let answer = routers.get(router, &rank("big", tp_rank)).await;
                answer.status == 200 && answer.body == expected
            };
            routers.all(&what, is_there).await;
        }
    };
    same_everywhere(1).await;
    let keys = routers.etcd.engines_keys().await.len();
    for (tp_rank, size) in sizes.iter().enumerate() {
        put(tp_rank, payload("big", 2, *size), 200).await;
    }
    same_everywhere(2).await;
    assert_eq!(routers.etcd.engines_keys().await.len(), keys, "what nobody names any more is gone");
    routers.finish(Vec::new()).await;
}

#[tokio::test]
async fn of_two_engines_that_race_for_an_id_one_gets_it() {
    let Some(routers) = Routers::start(Engines::Known, &[]).await else { return };
    for round in 0..10 {
        let id = format!("race{round}");
        let at = |host: u8| registration(&format!("http://10.0.{host}.{round}:1"), 60.0);
        let (path, bodies) = (path(&id), [at(1), at(2), at(3)]);
        let (a, b, c) = tokio::join!(
            routers.send(0, "PUT", &path, &bodies[0]),
            routers.send(1, "PUT", &path, &bodies[1]),
            routers.send(2, "PUT", &path, &bodies[2]),
        );
        let answers = [a, b, c];
        let winners: Vec<usize> = (0..3).filter(|index| answers[*index].status == 201).collect();
        assert_eq!(winners.len(), 1, "{answers:#?}");
        for loser in (0..3).filter(|index| *index != winners[0]) {
            assert_eq!(answers[loser].status, 409, "{:?}", answers[loser]);
            assert_eq!(answers[loser].json()["error"]["code"], "engine_id_taken");
        }
        let url = &bodies[winners[0]]["base_url"];
        let what = "the winner's address";
        routers.all(what, async |router| routers.engine(router, &id).await.json()["base_url"] == *url).await;
    }
    routers.finish(Vec::new()).await;
}

#[tokio::test]
async fn of_two_engines_that_race_for_an_address_one_is_left() {
    let Some(routers) = Routers::start(Engines::Known, &[]).await else { return };
    for round in 0..10 {
        let body = registration(&format!("http://10.1.0.{round}:1"), 60.0);
        let ids = [format!("left{round}"), format!("right{round}")];
        let (left, right) = (path(&ids[0]), path(&ids[1]));
        let (left, right) =
            tokio::join!(routers.send(0, "PUT", &left, &body), routers.send(1, "PUT", &right, &body));
        let answers = [left, right];
        for answer in &answers {
            let is_taken = answer.status == 409 && answer.json()["error"]["code"] == "address_taken";
            assert!(answer.status == 201 || is_taken, "{answer:?}");
        }
        let holder = async |router: usize| {
            let list = routers.get(router, "/registry/v1/engines").await.json();
            let at_it =
                list["engines"].as_array().unwrap().iter().filter(|e| e["base_url"] == body["base_url"]);
            at_it.map(|engine| engine["engine_id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        routers.all("one is left", async |router| holder(router).await.len() == 1).await;
        // All have seen both changes once they have seen a later one.
        let mark = format!("mark{round}");
        let later = json!({"state": "ready"});
        assert_eq!(routers.send(2, "PUT", &path(&mark), &later).await.status, 201);
        routers.all_know(&mark, true).await;
        let left_over = holder(0).await;
        assert_eq!(left_over.len(), 1);
        let winner = ids.iter().position(|id| *id == left_over[0]).unwrap();
        assert_eq!(answers[winner].status, 201);
        for router in 1..3 {
            assert_eq!(holder(router).await, left_over);
        }
    }
    routers.finish(Vec::new()).await;
}

#[tokio::test]
async fn a_silent_engine_leaves_all_routers_and_a_state_reaches_all() {
    let Some(routers) = Routers::start(Engines::Known, &[]).await else { return };
    let body = registration("http://10.0.0.9:1", 1.0);
    let created = routers.send(0, "PUT", &path("quiet"), &body).await;
    assert_eq!(created.status, 201);
    let revision = created.json()["revision"].clone();
    let beat = json!({"state": "draining"});
    let beaten = routers.send(1, "POST", &format!("{}/heartbeat", path("quiet")), &beat).await;
    assert_eq!(beaten.status, 200, "{beaten:?}");
    let is_draining = async |router| routers.engine(router, "quiet").await.json()["state"] == "draining";
    routers.all("it drains", is_draining).await;
    routers.all_know("quiet", false).await;
    let gone = routers.send(2, "POST", &format!("{}/heartbeat", path("quiet")), &beat).await;
    assert_eq!((gone.status, gone.json()["error"]["code"].as_str()), (404, Some("unknown_engine")));
    // Whoever followed one router goes on at another: their numbers are the same.
    for router in 0..3 {
        let url = format!("http://{}/registry/v1/watch?since={revision}", routers.addrs[router]);
        let mut watch = http_client().get(url).send().await.unwrap();
        let mut text = String::new();
        while text.matches("event:").count() < 2 || !text.ends_with("\n\n") {
            text.push_str(std::str::from_utf8(&watch.chunk().await.unwrap().unwrap()).unwrap());
        }
        let kinds: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("event:")).map(str::trim).collect();
        assert_eq!(kinds, ["updated", "expired"], "{text}");
    }
    routers.finish(Vec::new()).await;
}

#[tokio::test]
async fn a_router_that_never_met_an_engine_tells_its_clock_within_the_error() {
    let Some(routers) = Routers::start(Engines::Known, &[]).await else { return };
    let origin = Instant::now();
    let clock = || 5000.0 + origin.elapsed().as_secs_f64();
    let mut body = registration("http://10.0.0.7:1", 60.0);
    body["clock"] = json!(clock());
    assert_eq!(routers.send(0, "PUT", &path("timed"), &body).await.status, 201);
    let mut echo = Value::Null;
    for _beat in 0..3 {
        let beat = json!({"clock": clock(), "echo": echo});
        let answer = routers.send(0, "POST", &format!("{}/heartbeat", path("timed")), &beat).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        echo = json!({"router_clock": answer.json()["router_clock"], "received": clock()});
    }
    for (router, least) in [(0, 0.0), (1, 1.0), (2, 1.0)] {
        let is_known = async |at| {
            let view = routers.engine(at, "timed").await.json();
            at != router || view["clock"]["error"].is_number()
        };
        routers.all("the clock has an error", is_known).await;
        let before = clock();
        let view = routers.engine(router, "timed").await.json();
        let after = clock();
        let (seconds, error) =
            (view["clock"]["seconds"].as_f64().unwrap(), view["clock"]["error"].as_f64().unwrap());
        assert!(error >= least, "{view}");
        assert!(before - error <= seconds && seconds <= after + error, "{before} {after} {view}");
    }
    routers.finish(Vec::new()).await;
}

#[tokio::test]
async fn what_an_operator_decides_at_one_router_holds_at_all_and_after_a_restart() {
    let Some(mut routers) = Routers::start(Engines::Known, &[]).await else {
        return;
    };
    let peers = async |router: usize| routers.get(router, "/admin/peers").await.json()["peers"].clone();
    let add = |name: &str, port: u16| json!({"role": "prefill", "url": format!("http://127.0.0.1:{port}"), "name": name});
    // Nobody is there; a peer is one all the same. Two at once are both kept.
    let (bodies, none) = ([add("one", 1), add("two", 2)], Value::Null);
    let (first, second) = tokio::join!(
        routers.send(0, "POST", "/admin/peers", &bodies[0]),
        routers.send(1, "POST", "/admin/peers", &bodies[1]),
    );
    assert_eq!((first.status, second.status), (201, 201), "{first:?} {second:?}");
    let ids = async |router: usize| {
        let peers = peers(router).await;
        let ids = peers.as_array().unwrap().iter().map(|peer| peer["id"].as_str().unwrap().to_owned());
        std::collections::BTreeSet::from_iter(ids)
    };
    let both = std::collections::BTreeSet::from(["one".to_owned(), "two".to_owned()]);
    routers.all("both are peers", async |router| ids(router).await == both).await;

    assert_eq!(routers.send(1, "POST", "/admin/peers/one/drain", &none).await.status, 200);
    assert_eq!(routers.send(2, "POST", "/admin/peers/two/quarantine", &none).await.status, 200);
    let marked = async |router: usize| {
        let peers = peers(router).await;
        let find =
            |id: &str| peers.as_array().unwrap().iter().find(|peer| peer["id"] == id).cloned().unwrap();
        find("one")["drained"] == true && find("two")["quarantined"] == true
    };
    routers.all("they are marked", marked).await;
    routers.stop(2).await;
    routers.restart(2).await;
    let peers = async |router: usize| routers.get(router, "/admin/peers").await.json()["peers"].clone();
    let marked = async |router: usize| {
        let peers = peers(router).await;
        let find = |id: &str| peers.as_array().unwrap().iter().find(|peer| peer["id"] == id).cloned();
        find("one").is_some_and(|peer| peer["drained"] == true)
            && find("two").is_some_and(|peer| peer["quarantined"] == true)
    };
    routers.all("they are marked after the restart, too", marked).await;
    assert_eq!(routers.send(2, "DELETE", "/admin/peers/one", &none).await.status, 200);
    let is_gone = async |router| peers(router).await.as_array().unwrap().len() == 1;
    routers.all("one is gone", is_gone).await;
    routers.finish(Vec::new()).await;
}

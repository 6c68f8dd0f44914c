//! Engines in the registry over their whole life: lease, clock, generations, and who follows them.

use std::time::{Duration, Instant};

use engine_sim::{Engine, EngineConfig};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::{COMPLETIONS, Cluster, PROMPT, SOON, bounded, completion, engine_config, single_text};

/// A connection that follows the registry.
struct Follower {
    response: reqwest::Response,
    unread: String,
}

impl Follower {
    async fn open(cluster: &Cluster, query: &str) -> Self {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let url = cluster.url(&format!("/registry/v1/watch{query}"));
        let response = bounded("the watch begins", client.get(url).send()).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), response.headers()["content-type"].to_str().unwrap()),
            (200, "text/event-stream")
        );
        Self { response, unread: String::new() }
    }

    /// The next event as (kind, data); `None` when the router ended the watch.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((event, rest)) = self.unread.split_once("\n\n") {
                let field =
                    |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
                let found = field("event:").map(|kind| {
                    let data: Value = serde_json::from_str(field("data:").unwrap()).unwrap();
                    assert_eq!(field("id:"), Some(data["revision"].to_string().as_str()));
                    (kind.to_owned(), data)
                });
                self.unread = rest.to_owned();
                if found.is_some() {
                    return found;
                }
                continue; // a comment
            }
            let chunk = bounded("an event", self.response.chunk()).await.unwrap()?;
            self.unread.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    }

    /// The next change of one engine that fits.
    async fn change(&mut self, engine_id: &str, fits: impl Fn(&str, &Value) -> bool) -> (String, Value) {
        loop {
            let (kind, data) = self.next().await.expect("the watch goes on");
            if data["engine"]["engine_id"] == engine_id && fits(&kind, &data) {
                return (kind, data);
            }
        }
    }
}

/// Engines of these tests come and go without being peers.
fn no_adoption(config: &mut kvbaton::config::Config) {
    config.pairing.adopt_registered = false;
}

fn rank(engine_id: &str) -> String {
    format!("/registry/v1/engines/{engine_id}/ranks/0/0")
}

async fn engine(cluster: &Cluster, engine_id: &str) -> Value {
    cluster.get(&format!("/registry/v1/engines/{engine_id}")).await.json()
}

async fn start(cluster: &Cluster, listener: TcpListener, tune: impl FnOnce(&mut EngineConfig)) -> Engine {
    let mut config = engine_config(cluster.addr);
    config.role = engine_sim::Role::Prefill;
    tune(&mut config);
    engine_sim::spawn(config, listener).await.unwrap()
}

#[tokio::test]
async fn engines_say_what_they_are() {
    let cluster = Cluster::builder().start().await;
    for (role, live) in [("prefill", cluster.p()), ("decode", cluster.d())] {
        let list =
            cluster.get(&format!("/registry/v1/engines?role={role}&model=sim&state=ready")).await.json();
        assert_eq!(list["engines"].as_array().unwrap().len(), 1, "{list}");
        let seen = &list["engines"][0];
        assert_eq!(seen["engine_id"], live.engine_id());
        assert_eq!((&seen["base_url"], &seen["generation"]), (&json!(live.url()), &json!(1)));
        assert_eq!((&seen["ttl_seconds"], &seen["vllm_version"]), (&json!(5.0), &json!("0.32.0")));
        assert_eq!((&seen["connector_version"], &seen["dp_rank"]), (&json!(14), &json!(0)));
        assert_eq!(seen["compatibility_hash"], seen["ranks"][0]["compatibility_hash"]);
    }
    cluster.finish().await;
}

#[tokio::test]
async fn the_registry_knows_an_engines_clock_within_its_error() {
    let cluster = Cluster::builder().start().await;
    let path = rank(cluster.p().engine_id());
    let read = async || {
        let answer = cluster.get(&path).await;
        let number = |name: &str| answer.header(name).parse::<f64>().ok();
        (number("kv-clock").unwrap(), number("kv-clock-error"))
    };
    cluster.wait_for("the clock has an error bound", async || read().await.1.is_some()).await;
    let before = Instant::now();
    let (first, first_error) = read().await;
    let between = Instant::now();
    tokio::time::sleep(Duration::from_millis(30)).await;
    let pause = between.elapsed().as_secs_f64();
    let (second, second_error) = read().await;
    let (errors, whole) = (first_error.unwrap() + second_error.unwrap(), before.elapsed().as_secs_f64());
    assert!(errors < 1.0, "{errors}");
    assert!(
        (pause - errors..=whole + errors).contains(&(second - first)),
        "{first} {second} {pause} {errors}"
    );
    cluster.finish().await;
}

#[tokio::test]
async fn a_prefill_engine_restarted_at_its_address_is_a_new_generation() {
    let mut cluster = Cluster::builder().warns(&["probes"]).start().await;
    let body = completion(PROMPT, 6);
    let expected = single_text(COMPLETIONS, &body).await;
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), expected);
    let mut follower = Follower::open(&cluster, "").await;
    assert_eq!(follower.next().await.unwrap().0, "reset");

    let old = cluster.prefill.remove(0);
    let (addr, old_id) = (old.addr(), old.engine_id().to_owned());
    old.kill().await;
    let noticed = async || cluster.get("/admin/peers").await.json()["peers"][0]["state"] == "unreachable";
    cluster.wait_for("the router notices", noticed).await;
    let new = start(&cluster, TcpListener::bind(addr).await.unwrap(), |_| {}).await;
    let (kind, data) = follower.change(&old_id, |kind, _| kind != "updated").await;
    assert_eq!((kind.as_str(), &data["replaced_by"]), ("replaced", &json!(new.engine_id())));
    let (kind, data) = follower.change(new.engine_id(), |_, _| true).await;
    assert_eq!((kind.as_str(), &data["engine"]["generation"]), ("registered", &json!(2)));
    cluster.assert_error(&cluster.get(&rank(&old_id)).await, 404, "unknown_rank");
    assert_eq!(engine(&cluster, new.engine_id()).await["generation"], 2);

    cluster.prefill.push(new);
    cluster.wait_ready().await;
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), expected);
    assert_eq!(cluster.d().stats().kv_pulls, 2);
    cluster.finish().await;
}

#[tokio::test]
async fn a_killed_engine_leaves_when_its_time_is_out_and_one_that_shuts_down_at_once() {
    let cluster = Cluster::builder().config(no_adoption).start().await;
    let mut follower = Follower::open(&cluster, "").await;
    let listener = crate::support::listen().await;
    let silent =
        start(&cluster, listener, |config| config.registry_ttl = Some(Duration::from_millis(400))).await;
    let id = silent.engine_id().to_owned();
    follower.change(&id, |kind, _| kind == "registered").await;
    silent.kill().await;
    let (kind, _) = follower.change(&id, |kind, _| kind != "registered").await;
    assert_eq!(kind, "expired");
    cluster.wait_for("it is not found", async || cluster.get(&rank(&id)).await.status == 404).await;

    let orderly = start(&cluster, crate::support::listen().await, |_| {}).await;
    let id = orderly.engine_id().to_owned();
    follower.change(&id, |kind, _| kind == "registered").await;
    orderly.shutdown().await;
    cluster.assert_error(&cluster.get(&rank(&id)).await, 404, "unknown_rank");
    let (kind, _) = follower.change(&id, |kind, _| kind != "updated").await;
    assert_eq!(kind, "removed");
    cluster.finish().await;
}

#[tokio::test]
async fn an_engine_that_was_removed_registers_again() {
    let cluster = Cluster::builder().start().await;
    let id = cluster.p().engine_id().to_owned();
    let revision = engine(&cluster, &id).await["revision"].as_u64().unwrap();
    let path = format!("/registry/v1/engines/{id}");
    assert_eq!(cluster.send("DELETE", &path, &[], "").await.status, 204);
    cluster.wait_registered().await;
    let mut follower = Follower::open(&cluster, &format!("?since={revision}")).await;
    let (kind, _) = follower.change(&id, |_, _| true).await;
    assert_eq!(kind, "removed");
    let (kind, data) = follower.change(&id, |_, _| true).await;
    assert_eq!((kind.as_str(), &data["engine"]["generation"]), ("registered", &json!(2)));
    let body = completion(PROMPT, 6);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    cluster.finish().await;
}

#[tokio::test]
async fn a_look_up_may_wait_for_an_engine_that_is_about_to_come() {
    let cluster = Cluster::builder().config(no_adoption).start().await;
    let path = format!("{}?wait=4", rank("soon"));
    let come = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        start(&cluster, crate::support::listen().await, |config| config.engine_id = Some("soon".to_owned()))
            .await
    };
    let began = Instant::now();
    let (found, soon) = tokio::join!(cluster.get(&path), come);
    assert_eq!((found.status, found.header("kv-connector-version")), (200, "14"));
    assert!(began.elapsed() < SOON);
    soon.shutdown().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_router_that_leaves_ends_the_watches_and_is_not_held_up() {
    let cluster = Cluster::builder().start().await;
    let mut follower = Follower::open(&cluster, "").await;
    assert_eq!(follower.next().await.unwrap().0, "reset");
    let began = Instant::now();
    let ((), end) = tokio::join!(cluster.finish(), follower.next());
    assert_eq!(end, None);
    assert!(began.elapsed() < SOON);
}

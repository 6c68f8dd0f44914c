//! Peers from a real DNS server, over UDP and TCP.

use std::net::SocketAddr;
use std::time::Duration;

use engine_sim::{Engine, Role as SimRole};
use hickory_proto::rr::RecordType;
use kvbaton::config::{Config, read};
use kvbaton_proxy::PeerSpec;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::{
    COMPLETIONS, Cluster, DnsMood, DnsServer, PROMPT, Rr, completion, engine_config, generations,
    http_client, single_text, stream_text,
};

/// What the router says of an engine that has just ended.
const GONE: &str = "not usable by its probes";
const FAILS: &str = "a source of engines fails";
const EMPTY: &str = "a source of engines names none any more";

/// Decode engines come from these sources; asks several times a second.
fn discover(server: SocketAddr, sources: &str) -> impl Fn(&mut Config) + 'static {
    let text = format!(
        "[discovery]\nnameservers = [\"{server}\"]\nmin_refresh = \"30ms\"\nempty_grace = \"0s\"\n{sources}"
    );
    move |config| {
        config.discovery = read(&text).unwrap().discovery;
        config.pairing.adopt_registered = false;
    }
}

const SRV: &str = r#"
[[discovery.dns]]
name = "_http._tcp.decode.test"
kind = "srv"
role = "decode"
refresh = "60ms"
labels = { zone = "a" }
"#;
const NAME: &str = "_http._tcp.decode.test";

/// A source of A and AAAA records on this port.
fn a_source(port: u16) -> String {
    format!("[[discovery.dns]]\nname = \"decode.test\"\nport = {port}\nrole = \"decode\"\nrefresh = \"60ms\"")
}

/// A decode engine that takes its time for each token.
async fn decode_on(cluster: &Cluster, address: &str) -> Engine {
    let listener = TcpListener::bind(address).await.unwrap();
    let mut config = engine_config(cluster.addr);
    config.role = SimRole::Decode;
    config.decode_time_per_token = Duration::from_millis(5);
    engine_sim::spawn(config, listener).await.unwrap()
}

fn service(engine: &Engine, priority: u16, target: &'static str) -> Rr {
    Rr::Service { priority, port: engine.addr().port(), target }
}

async fn peers(cluster: &Cluster) -> Vec<Value> {
    let all = cluster.get("/admin/peers").await.json()["peers"].as_array().unwrap().clone();
    all.into_iter().filter(|peer| peer["role"] == "decode").collect()
}

async fn urls(cluster: &Cluster) -> Vec<String> {
    let mut urls: Vec<String> =
        peers(cluster).await.iter().map(|peer| peer["url"].as_str().unwrap().to_owned()).collect();
    urls.sort();
    urls
}

async fn wait_urls(cluster: &Cluster, mut expected: Vec<String>) {
    expected.sort();
    cluster.wait_for(&format!("the peers are {expected:?}"), async || urls(cluster).await == expected).await;
}

/// A router whose decode engines come from DNS only.
async fn cluster(server: &DnsServer, sources: &str, warns: &[&'static str]) -> Cluster {
    Cluster::builder()
        .decode(0)
        .unready()
        .config(discover(server.addr, sources))
        .warns(warns)
        .may_warn(&[GONE, "a source of engines fails"])
        .start()
        .await
}

#[tokio::test]
async fn an_engine_that_appears_in_dns_serves_and_one_that_vanishes_finishes_its_stream() {
    let server = DnsServer::start().await;
    server.set("d1.test", &[Rr::Address("127.0.0.1")]);
    let cluster = cluster(&server, SRV, &[]).await;
    let (one, other) = (decode_on(&cluster, "127.0.0.1:0").await, decode_on(&cluster, "127.0.0.1:0").await);
    server.set(NAME, &[service(&one, 10, "d1.test")]);
    cluster.wait_ready().await;
    let body = completion(PROMPT, 6);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    assert_eq!(generations(&one).len(), 1);
    let peer = peers(&cluster).await.remove(0);
    assert_eq!(peer["id"], format!("decode-127.0.0.1-{}", one.addr().port()));
    assert_eq!((&peer["source"], &peer["adopted"]), (&json!(format!("dns:{NAME}")), &json!(false)));
    let source = format!("dns:{NAME}");
    assert_eq!(cluster.metric("kvbaton_discovery_peers", &[("source", &source)]).await, 1.0);

    // A long answer begins; then DNS names another engine only.
    let mut body = completion(PROMPT, 150);
    let whole = single_text(COMPLETIONS, &body).await;
    body["stream"] = true.into();
    let mut answer = http_client().post(cluster.url(COMPLETIONS)).json(&body).send().await.unwrap();
    let mut text = answer.chunk().await.unwrap().unwrap().to_vec();
    server.set(NAME, &[service(&other, 10, "d1.test")]);
    cluster
        .wait_for("the first one leaves and the second one serves", async || {
            let peers = peers(&cluster).await;
            let of = |engine: &Engine| peers.iter().find(|peer| peer["url"] == engine.url());
            of(&one).is_some_and(|peer| peer["leaving"] == true && peer["in_flight"] == 1)
                && of(&other).is_some_and(|peer| peer["accepts"] == true)
        })
        .await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await.status, 200);
    assert_eq!((generations(&one).len(), generations(&other).len()), (2, 1));
    while let Some(more) = answer.chunk().await.unwrap() {
        text.extend(more);
    }
    assert_eq!(stream_text(&String::from_utf8(text).unwrap()), whole);
    wait_urls(&cluster, vec![other.url()]).await;
    one.shutdown().await;
    other.shutdown().await;
    cluster.finish().await;
}

#[tokio::test]
async fn all_addresses_of_a_name_are_peers_of_both_families_and_through_aliases() {
    let server = DnsServer::start().await;
    server.set("decode.test", &[Rr::Alias("pool.test")]);
    let addresses = ["127.0.0.1", "127.0.0.2", "::1"].map(Rr::Address);
    server.set("pool.test", &addresses);
    let cluster = cluster(&server, &a_source(9), &[]).await;
    let urls = ["http://127.0.0.1:9", "http://127.0.0.2:9", "http://[::1]:9"].map(str::to_owned);
    wait_urls(&cluster, urls.to_vec()).await;
    cluster.finish().await;
}

#[tokio::test]
async fn an_answer_too_long_for_udp_is_asked_for_over_tcp() {
    let server = DnsServer::start().await;
    server.set("decode.test", &[Rr::Address("127.0.0.1")]);
    server.mood("decode.test", DnsMood::Truncate);
    let cluster = cluster(&server, &a_source(9), &[]).await;
    wait_urls(&cluster, vec!["http://127.0.0.1:9".to_owned()]).await;
    assert!(server.asked("decode.test", RecordType::A, false) > 0);
    assert!(server.asked("decode.test", RecordType::A, true) > 0);
    cluster.finish().await;
}

#[tokio::test]
async fn of_srv_records_the_lowest_priority_that_has_addresses_counts() {
    let server = DnsServer::start().await;
    let record = |priority, port, target| Rr::Service { priority, port, target };
    let records = [
        record(1, 11, "none.test"),
        record(2, 12, "two.test"),
        record(2, 13, "two.test"),
        record(3, 14, "two.test"),
    ];
    server.set(NAME, &records);
    server.set("two.test", &[Rr::Address("127.0.0.2")]);
    let cluster = cluster(&server, SRV, &[]).await;
    wait_urls(&cluster, ["http://127.0.0.2:12", "http://127.0.0.2:13"].map(str::to_owned).to_vec()).await;
    server.set("none.test", &[Rr::Address("127.0.0.3")]);
    wait_urls(&cluster, vec!["http://127.0.0.3:11".to_owned()]).await;
    cluster.finish().await;
}

#[tokio::test]
async fn what_fails_keeps_its_peers_and_says_so_and_what_is_empty_does_when_its_grace_is_over() {
    let server = DnsServer::start().await;
    server.set("decode.test", &[Rr::Address("127.0.0.1")]);
    let sources = a_source(9);
    let cluster = cluster(&server, &sources, &[FAILS, EMPTY]).await;
    let there = vec!["http://127.0.0.1:9".to_owned()];
    wait_urls(&cluster, there.clone()).await;
    let failures =
        async || cluster.metric("kvbaton_discovery_failures_total", &[("source", "dns:decode.test")]).await;
    assert_eq!(failures().await, 0.0);
    server.mood("decode.test", DnsMood::Fail);
    cluster.wait_for("it has failed twice", async || failures().await >= 2.0).await;
    assert!(cluster.log_has(FAILS));
    assert_eq!(urls(&cluster).await, there);
    server.mood("decode.test", DnsMood::FailSixes);
    let before = failures().await;
    server.set("decode.test", &[Rr::Address("127.0.0.2")]);
    // Half of an answer adds and takes nothing away.
    wait_urls(&cluster, vec!["http://127.0.0.1:9".to_owned(), "http://127.0.0.2:9".to_owned()]).await;
    cluster.wait_for("it counts as a failure", async || failures().await > before).await;
    server.mood("decode.test", DnsMood::Answer);
    wait_urls(&cluster, vec!["http://127.0.0.2:9".to_owned()]).await;
    server.set("decode.test", &[]);
    wait_urls(&cluster, Vec::new()).await;
    assert!(cluster.log_has(EMPTY));
    cluster.finish().await;
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_a_failure() {
    let server = DnsServer::start().await;
    server.mood("decode.test", DnsMood::Silent);
    let sources = format!("dns_timeout = \"50ms\"\n{}", a_source(9));
    let cluster = cluster(&server, &sources, &[FAILS]).await;
    cluster
        .wait_for("it is counted", async || {
            cluster.metric("kvbaton_discovery_failures_total", &[("source", "dns:decode.test")]).await > 0.0
        })
        .await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_short_time_to_live_is_respected_and_a_long_one_is_bounded_by_the_refresh() {
    let server = DnsServer::start().await;
    server.ttl(0);
    server.set("short.test", &[Rr::Address("127.0.0.1")]);
    server.set("long.test", &[Rr::Address("127.0.0.2")]);
    let source = |name: &str| {
        format!("[[discovery.dns]]\nname = \"{name}\"\nport = 9\nrole = \"decode\"\nrefresh = \"1h\"\n")
    };
    let cluster = cluster(&server, &(source("short.test") + &source("long.test")), &[]).await;
    cluster.wait_for("it asks again", async || server.asked("short.test", RecordType::A, false) > 2).await;
    server.ttl(3600);
    cluster.finish().await;

    let server = DnsServer::start().await;
    server.set("long.test", &[Rr::Address("127.0.0.2")]);
    server.set("short.test", &[Rr::Address("127.0.0.1")]);
    let short = source("short.test").replace("1h", "60ms");
    let cluster = self::cluster(&server, &(short + &source("long.test")), &[]).await;
    cluster.wait_for("it asks again", async || server.asked("short.test", RecordType::A, false) > 5).await;
    assert_eq!(server.asked("long.test", RecordType::A, false), 1);
    cluster.finish().await;
}

#[tokio::test]
async fn an_address_of_the_settings_and_of_two_sources_is_one_peer_of_the_settings() {
    let server = DnsServer::start().await;
    server.set("decode.test", &[Rr::Address("127.0.0.1"), Rr::Address("127.0.0.2")]);
    server.set("other.test", &[Rr::Address("127.0.0.2")]);
    let both = format!("{}\n{}", a_source(9), a_source(9).replace("decode.test", "other.test"));
    let cluster = Cluster::builder()
        .decode(0)
        .unready()
        .config(discover(server.addr, &both))
        .peer(kvbaton_proxy::Role::Decode, "http://127.0.0.1:9")
        .may_warn(&[GONE])
        .start()
        .await;
    wait_urls(&cluster, ["http://127.0.0.1:9", "http://127.0.0.2:9"].map(str::to_owned).to_vec()).await;
    let of = |peers: &[Value], url: &str| {
        peers.iter().find(|peer| peer["url"] == url).unwrap()["source"].as_str().unwrap().to_owned()
    };
    let now = peers(&cluster).await;
    assert_eq!(of(&now, "http://127.0.0.1:9"), "settings");
    let found_by = of(&now, "http://127.0.0.2:9");
    // Whoever had it has lost it: the other source takes it over.
    let (name, heir) = match found_by.as_str() {
        "dns:decode.test" => ("decode.test", "dns:other.test"),
        _ => ("other.test", "dns:decode.test"),
    };
    server.set(name, &[Rr::Address("127.0.0.1")]);
    cluster
        .wait_for("the other source has it", async || {
            of(&peers(&cluster).await, "http://127.0.0.2:9") == heir
        })
        .await;
    assert_eq!(peers(&cluster).await.len(), 2);
    cluster.finish().await;
}

#[tokio::test]
async fn a_reload_changes_sources_and_the_peers_that_stay_keep_their_history() {
    let server = DnsServer::start().await;
    server.set("decode.test", &[Rr::Address("127.0.0.1")]);
    server.set("other.test", &[Rr::Address("127.0.0.2")]);
    let cluster = cluster(&server, &a_source(9), &[GONE]).await;
    let errors = async || peers(&cluster).await.first().map(|peer| peer["last_error"].clone());
    cluster
        .wait_for("its probe has failed", async || errors().await.is_some_and(|error| !error.is_null()))
        .await;
    let reload = |sources: String| {
        let mut config = Config::default();
        discover(server.addr, &sources)(&mut config);
        cluster.running().proxy().reload(config.core(), &[], Vec::<PeerSpec>::new()).unwrap();
    };
    let labelled = a_source(9) + "\nlabels = { rack = \"7\" }\n";
    reload(format!("{labelled}{}", a_source(9).replace("decode.test", "other.test")));
    wait_urls(&cluster, ["http://127.0.0.1:9", "http://127.0.0.2:9"].map(str::to_owned).to_vec()).await;
    assert_eq!(peers(&cluster).await[0]["id"], "decode-127.0.0.1-9");
    reload(a_source(9).replace("decode.test", "other.test"));
    wait_urls(&cluster, vec!["http://127.0.0.2:9".to_owned()]).await;
    reload(String::new());
    wait_urls(&cluster, Vec::new()).await;
    assert_eq!(cluster.running().proxy().sources().len(), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_discovered_peer_is_warmed_up_before_it_gets_requests() {
    let server = DnsServer::start().await;
    let discover = discover(server.addr, SRV);
    let cluster = Cluster::builder()
        .decode(0)
        .unready()
        .config(move |config| {
            discover(config);
            config.pairing.warm_up = true;
        })
        .start()
        .await;
    let engine = decode_on(&cluster, "127.0.0.1:0").await;
    server.set("d1.test", &[Rr::Address("127.0.0.1")]);
    server.set(NAME, &[service(&engine, 1, "d1.test")]);
    cluster.wait_ready().await;
    assert_eq!(generations(&engine).len(), 1, "one hand-off before any client's");
    assert_eq!(engine.stats().kv_pulls, 1);
    engine.shutdown().await;
    cluster.finish_whatever_was_warned().await;
}

//! Peers from EndpointSlices of a recorded API.

use std::time::Duration;

use engine_sim::{Engine, Role as SimRole};
use kvbaton::config::{Config, read};
use serde_json::Value;
use tokio::net::TcpListener;

use crate::support::kubernetes::{EXPIRED, FORBIDDEN, KubeApi, LIST_LATER};
use crate::support::{
    COMPLETIONS, Cluster, PROMPT, completion, engine_config, generations, http_client, single_text,
    stream_text,
};

/// What the router says of an engine that does not answer.
const GONE: &str = "not usable by its probes";
const FAILS: &str = "a source of engines fails";
const SOURCE: &str = "kubernetes:llm/vllm-decode";
/// The recorded events.
const SECOND_READY: usize = 0;
const BOOKMARK: usize = 1;
const FIRST_TERMINATES: usize = 2;
const FIRST_DELETED: usize = 3;
/// Nobody listens there.
const NOBODY: u16 = 9;

fn discover(way: &str) -> impl Fn(&mut Config) + 'static {
    let text = format!(
        "[discovery]\nmin_refresh = \"20ms\"\n[[discovery.kubernetes]]\nnamespace = \"llm\"\n\
         service = \"vllm-decode\"\nport = \"http\"\nrole = \"decode\"\n{way}"
    );
    move |config| {
        config.discovery = read(&text).unwrap().discovery;
        config.pairing.adopt_registered = false;
    }
}

async fn cluster(api: &KubeApi, warns: &[&'static str]) -> Cluster {
    let config = discover(&format!("api = \"http://{}\"", api.addr));
    Cluster::builder().decode(0).unready().config(config).warns(warns).may_warn(&[GONE]).start().await
}

async fn peers(cluster: &Cluster) -> Vec<Value> {
    let all = cluster.get("/admin/peers").await.json()["peers"].as_array().unwrap().clone();
    all.into_iter().filter(|peer| peer["role"] == "decode").collect()
}

/// The last bytes of the peers' addresses.
async fn addresses(cluster: &Cluster) -> Vec<u8> {
    let last = |peer: &Value| {
        let url = peer["url"].as_str().unwrap().strip_prefix("http://127.0.0.").unwrap().to_owned();
        url.split(':').next().unwrap().parse().unwrap()
    };
    let mut all: Vec<u8> = peers(cluster).await.iter().map(last).collect();
    all.sort_unstable();
    all
}

async fn wait_addresses(cluster: &Cluster, expected: &[u8]) {
    let what = format!("the peers end in {expected:?}");
    cluster.wait_for(&what, async || addresses(cluster).await == expected).await;
}

async fn wait_watches(cluster: &Cluster, api: &KubeApi, count: usize) {
    cluster.wait_for(&format!("there were {count} watches"), async || api.watches().len() >= count).await;
}

/// Decode engines at two addresses with one port.
async fn two_ports() -> (TcpListener, TcpListener) {
    loop {
        let one = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let port = one.local_addr().unwrap().port();
        if let Ok(other) = TcpListener::bind(("127.0.0.3", port)).await {
            return (one, other);
        }
    }
}

async fn decode_on(cluster: &Cluster, listener: TcpListener) -> Engine {
    let mut config = engine_config(cluster.addr);
    config.role = SimRole::Decode;
    config.decode_time_per_token = Duration::from_millis(5);
    engine_sim::spawn(config, listener).await.unwrap()
}

#[tokio::test]
async fn a_ready_endpoint_serves_and_a_terminating_one_finishes_its_stream() {
    let (one, other) = two_ports().await;
    let api = KubeApi::start(one.local_addr().unwrap().port()).await;
    let cluster = cluster(&api, &[]).await;
    let (one, other) = (decode_on(&cluster, one).await, decode_on(&cluster, other).await);
    cluster.wait_ready().await;
    assert_eq!(addresses(&cluster).await, [2], "the second one is not ready yet");
    assert_eq!(peers(&cluster).await[0]["source"], SOURCE);
    assert_eq!(cluster.metric("kvbaton_discovery_peers", &[("source", SOURCE)]).await, 1.0);
    let lists = api.lists();
    assert_eq!(lists.len(), 2, "in two pages");
    assert_eq!(lists[0]["labelSelector"], "kubernetes.io/service-name=vllm-decode");
    wait_watches(&cluster, &api, 1).await;
    let watch = api.watches().remove(0);
    assert_eq!((watch["resourceVersion"].as_str(), watch["allowWatchBookmarks"].as_str()), ("48210", "true"));

    let mut body = completion(PROMPT, 150);
    let whole = single_text(COMPLETIONS, &body).await;
    body["stream"] = true.into();
    let mut answer = http_client().post(cluster.url(COMPLETIONS)).json(&body).send().await.unwrap();
    let mut text = answer.chunk().await.unwrap().unwrap().to_vec();
    assert_eq!(generations(&one).len(), 1);
    api.event(SECOND_READY);
    api.event(FIRST_TERMINATES);
    cluster
        .wait_for("the first one leaves and the second one serves", async || {
            let peers = peers(&cluster).await;
            let of = |engine: &Engine| peers.iter().find(|peer| peer["url"] == engine.url());
            of(&one).is_some_and(|peer| peer["leaving"] == true && peer["in_flight"] == 1)
                && of(&other).is_some_and(|peer| peer["accepts"] == true)
        })
        .await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await.status, 200);
    assert_eq!((generations(&one).len(), generations(&other).len()), (1, 1));
    while let Some(more) = answer.chunk().await.unwrap() {
        text.extend(more);
    }
    assert_eq!(stream_text(&String::from_utf8(text).unwrap()), whole);
    wait_addresses(&cluster, &[3]).await;
    api.event(FIRST_DELETED);
    assert_eq!(api.lists().len(), 2, "nothing was listed again");
    one.shutdown().await;
    other.shutdown().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_watch_that_ends_or_breaks_goes_on_from_the_last_event_or_bookmark() {
    let api = KubeApi::start(NOBODY).await;
    let cluster = cluster(&api, &[]).await;
    wait_watches(&cluster, &api, 1).await;
    api.event(SECOND_READY);
    wait_addresses(&cluster, &[2, 3]).await;
    api.end();
    wait_watches(&cluster, &api, 2).await;
    assert_eq!(api.watches()[1]["resourceVersion"], "48231");
    api.event(BOOKMARK);
    api.break_off();
    wait_watches(&cluster, &api, 3).await;
    let from = api.watches()[2]["resourceVersion"].clone();
    // A bookmark that the break overtook is as good as none.
    assert!(["48302", "48231"].contains(&from.as_str()), "{from}");
    api.event(FIRST_DELETED);
    wait_addresses(&cluster, &[3]).await;
    assert_eq!(api.lists().len(), 2, "listed once, in two pages");
    assert_eq!(cluster.metric("kvbaton_discovery_failures_total", &[("source", SOURCE)]).await, 0.0);
    cluster.finish().await;
}

#[tokio::test]
async fn what_the_api_has_forgotten_is_listed_anew_and_what_is_gone_then_leaves() {
    for as_event in [true, false] {
        let api = KubeApi::start(NOBODY).await;
        let cluster = cluster(&api, &[]).await;
        wait_watches(&cluster, &api, 1).await;
        wait_addresses(&cluster, &[2]).await;
        if as_event {
            api.greet(Some(EXPIRED));
        } else {
            api.refuse("watch", Some(EXPIRED));
        }
        api.list(LIST_LATER);
        let before = api.watches().len();
        api.end();
        wait_addresses(&cluster, &[3]).await;
        api.greet(None);
        api.refuse("watch", None);
        cluster
            .wait_for("it watches from the new list on", async || {
                let watches = api.watches();
                watches.len() > before && watches.last().unwrap()["resourceVersion"] == "51900"
            })
            .await;
        assert_eq!(cluster.metric("kvbaton_discovery_failures_total", &[("source", SOURCE)]).await, 0.0);
        cluster.finish().await;
    }
}

#[tokio::test]
async fn who_may_not_read_is_told_what_right_is_missing_and_goes_on_when_it_is_given() {
    let api = KubeApi::start(NOBODY).await;
    api.refuse("list", Some(FORBIDDEN));
    let cluster = cluster(&api, &[FAILS]).await;
    let failures = async || cluster.metric("kvbaton_discovery_failures_total", &[("source", SOURCE)]).await;
    cluster.wait_for("it has failed", async || failures().await > 0.0).await;
    for part in ["forbids to list endpointslices in namespace llm", "verbs [get, list, watch]"] {
        assert!(cluster.log_has(part), "{part}");
    }
    api.refuse("list", None);
    wait_addresses(&cluster, &[2]).await;
    // What is there stays when the right is taken away.
    api.refuse("watch", Some(FORBIDDEN));
    let before = failures().await;
    api.end();
    cluster.wait_for("it fails again", async || failures().await > before).await;
    assert!(cluster.log_has("forbids to watch"));
    assert_eq!(addresses(&cluster).await, [2]);
    cluster.finish().await;
}

#[tokio::test]
async fn a_kubeconfig_names_the_api_and_the_token() {
    let api = KubeApi::start(NOBODY).await;
    let file = std::env::temp_dir().join(format!("kvbaton-kubeconfig-{}", std::process::id()));
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: other\n\
         clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}]\n\
         users: [{{name: u, user: {{token: secret-of-u}}}}]\n\
         contexts: [{{name: mine, context: {{cluster: c, user: u}}}}]\n",
        api.addr
    );
    std::fs::write(&file, text).unwrap();
    let way = format!("kubeconfig = {:?}\ncontext = \"mine\"", file.to_str().unwrap());
    let cluster =
        Cluster::builder().decode(0).unready().config(discover(&way)).may_warn(&[GONE]).start().await;
    wait_addresses(&cluster, &[2]).await;
    assert!(api.authorization().iter().all(|held| held.as_deref() == Some("Bearer secret-of-u")));
    std::fs::remove_file(&file).unwrap();
    cluster.finish().await;
}

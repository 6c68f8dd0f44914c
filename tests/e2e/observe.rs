//! What operators can look at: timelines of requests, the engines' own loads, and the stream of the fleet.

use std::time::Duration;

use engine_sim::{ArmedFault, Fault, Leg, Stage};
use serde_json::{Value, json};

use crate::support::{COMPLETIONS, Cluster, PROMPT, bounded, completion, http_client};

/// The named steps of a request's timeline.
fn steps(timeline: &Value) -> Vec<&str> {
    timeline["steps"].as_array().unwrap().iter().map(|step| step["step"].as_str().unwrap()).collect()
}

async fn timeline(cluster: &Cluster, id: &str) -> Value {
    let path = format!("/admin/requests/{id}");
    cluster
        .wait_for("the request has ended", async || cluster.get(&path).await.json()["state"] == "ended")
        .await;
    cluster.get(&path).await.json()
}

async fn complete(cluster: &Cluster, id: &str, stream: bool) {
    let mut body = completion(PROMPT, 6);
    body["stream"] = stream.into();
    let headers = [("content-type", "application/json"), ("x-request-id", id)];
    let answer = cluster.post_bytes(COMPLETIONS, body.to_string(), &headers).await;
    assert_eq!(answer.status, 200, "{answer:?}");
}

/// The operators' stream, event by event.
struct Events {
    response: reqwest::Response,
    text: String,
}

impl Events {
    async fn open(cluster: &Cluster) -> Self {
        let response = http_client().get(cluster.url("/admin/events")).send().await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["cache-control"]),
            (200, &"no-store".parse().unwrap())
        );
        Self { response, text: String::new() }
    }

    /// The next event with its name; none at the stream's end.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let event: String = self.text.drain(..end + 2).collect();
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
                if let Some(data) = field("data: ") {
                    return Some((field("event: ").unwrap().to_owned(), serde_json::from_str(data).unwrap()));
                }
                continue;
            }
            let piece = bounded("the stream goes on", self.response.chunk()).await.unwrap()?;
            self.text.push_str(std::str::from_utf8(&piece).unwrap());
        }
    }

    /// Reads on until an event fits.
    async fn until(&mut self, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        bounded(what, async {
            loop {
                let (_, frame) = self.next().await.unwrap();
                if fits(&frame) {
                    return frame;
                }
            }
        })
        .await
    }
}

#[tokio::test]
async fn a_request_leaves_its_steps_and_no_word_of_its_prompt() {
    let cluster = Cluster::builder().start().await;
    complete(&cluster, "streamed", true).await;
    complete(&cluster, "whole", false).await;
    let common = [
        "received",
        "read",
        "admitted",
        "decode_chosen",
        "prefill_chosen",
        "prefill_sent",
        "prefill_answered",
        "handed_off",
        "decode_sent",
        "decode_head",
        "first_byte",
    ];
    let streamed = timeline(&cluster, "streamed").await;
    assert_eq!(steps(&streamed), [&common[..], &["first_token", "ended"]].concat());
    assert_eq!(
        (
            &streamed["status"],
            &streamed["outcome"],
            &streamed["model"],
            &streamed["stream"],
            &streamed["tries"]
        ),
        (&json!(200), &json!("served"), &json!("sim"), &json!(true), &json!(2))
    );
    assert_eq!((&streamed["prefill"], &streamed["decode"]), (&json!("prefill-1"), &json!("decode-1")));
    let handed = &streamed["steps"][7];
    assert!(handed["blocks"].as_u64().unwrap() > 0 && handed["peer"] == "prefill-1", "{handed}");
    let times: Vec<f64> =
        streamed["steps"].as_array().unwrap().iter().map(|s| s["seconds"].as_f64().unwrap()).collect();
    assert!(
        times.is_sorted() && *times.last().unwrap() <= streamed["seconds"].as_f64().unwrap(),
        "{times:?}"
    );
    let whole = timeline(&cluster, "whole").await;
    assert_eq!(steps(&whole), [&common[..], &["ended"]].concat());

    let list = cluster.get("/admin/requests?limit=10&state=ended").await;
    let listed = list.json();
    let ids: Vec<&Value> =
        listed["requests"].as_array().unwrap().iter().map(|one| &one["request_id"]).collect();
    assert_eq!(ids, ["whole", "streamed"]);
    for said in [list.text(), streamed.to_string(), whole.to_string()] {
        assert!(!said.contains("brown fox"), "{said}");
    }
    cluster.assert_error(&cluster.get("/admin/requests/nobody").await, 404, "unknown_request");
    cluster.assert_error(&cluster.get("/admin/requests?limit=0").await, 400, "invalid_query");
    cluster.finish().await;
}

#[tokio::test]
async fn a_failed_leg_is_a_step_too() {
    let quiet = |config: &mut kvbaton::config::Config| config.probe.interval = Duration::from_secs(60);
    let cluster = Cluster::builder().config(quiet).prefill(2).warns(&["engine failed"]).start().await;
    let fault = Fault::Refuse { status: 503, body: json!({"error": {"message": "no"}}) };
    for engine in &cluster.prefill {
        engine.faults().arm(ArmedFault { fault: fault.clone(), leg: Leg::Prefill, sticky: false });
    }
    // Whichever is asked first refuses; the other is disarmed before it is asked.
    let first = cluster.prefill[0].faults().hold(Stage::Arrival, Leg::Prefill);
    let second = cluster.prefill[1].faults().hold(Stage::Arrival, Leg::Prefill);
    let arrange = async {
        tokio::select! {
            () = first.arrived(1) => cluster.prefill[1].faults().clear(),
            () = second.arrived(1) => cluster.prefill[0].faults().clear(),
        }
        first.release();
        second.release();
    };
    tokio::join!(complete(&cluster, "again", true), arrange);
    let told = timeline(&cluster, "again").await;
    let answered: Vec<u64> = told["steps"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|step| step["step"] == "prefill_answered")
        .map(|step| step["status"].as_u64().unwrap())
        .collect();
    assert_eq!((answered, &told["tries"]), (vec![503, 200], &json!(3)));
    cluster.finish().await;
}

#[tokio::test]
async fn without_room_for_requests_they_are_served_all_the_same() {
    let cluster = Cluster::builder().config(|config| config.timeline.requests = 0).start().await;
    complete(&cluster, "forgotten", true).await;
    assert_eq!(cluster.get("/admin/requests").await.json(), json!({"requests": []}));
    cluster.assert_error(&cluster.get("/admin/requests/forgotten").await, 404, "unknown_request");
    cluster.finish().await;
}

#[tokio::test]
async fn engines_loads_are_read_where_that_is_wanted() {
    let often =
        |config: &mut kvbaton::config::Config| config.probe.metrics_interval = Duration::from_millis(100);
    let cluster = Cluster::builder().config(often).start().await;
    complete(&cluster, "first", false).await;
    complete(&cluster, "same-again", false).await;
    let load = async || cluster.get("/admin/peers/prefill-1").await.json()["load"].clone();
    cluster
        .wait_for("the second prompt was found in the cache", async || {
            load().await["cached_token_rate"].as_f64().is_some_and(|rate| rate > 0.0)
        })
        .await;
    let read = load().await;
    assert_eq!((&read["running"], &read["waiting"]), (&json!(0), &json!(0)));
    assert!(read["kv_usage"].is_f64() && read["age_seconds"].is_f64(), "{read}");
    cluster.finish().await;

    let cluster = Cluster::builder().start().await;
    complete(&cluster, "unread", false).await;
    assert_eq!(cluster.get("/admin/peers/prefill-1").await.json()["load"], Value::Null);
    cluster.finish().await;
}

#[tokio::test]
async fn the_stream_tells_of_a_running_request_and_its_hand_off() {
    let cluster = Cluster::builder().start().await;
    let mut events = Events::open(&cluster).await;
    let (name, first) = events.next().await.unwrap();
    assert_eq!((name.as_str(), first["peers"].as_array().unwrap().len()), ("snapshot", 2));
    assert_eq!(first["matrix"]["prefill"], json!(["prefill-1"]));

    let gate = cluster.d().faults().hold(Stage::BeforeHead, Leg::Decode);
    let watch = async {
        gate.arrived(1).await;
        let held = events.until("the hand-off is told", |frame| frame["hand_offs"]["live"] == 1).await;
        let shown = &held["hand_offs"]["shown"][0];
        assert_eq!((&shown["request_id"], &shown["state"]), (&json!("watched"), &json!("dispatched")));
        let lease = shown["ends_ms"].as_u64().unwrap() - shown["granted_ms"].as_u64().unwrap();
        assert_eq!(lease, 30_000);
        gate.release();
        events.until("the hand-off is over", |frame| frame["hand_offs"]["live"] == 0).await;
        let pairs = events.until("its pair is told", |frame| frame["pairs"][0].is_object()).await;
        let pair = &pairs["pairs"][0];
        assert_eq!((&pair["prefill"], &pair["decode"]), (&json!("prefill-1"), &json!("decode-1")));
        assert!(pair["mean_ms"].as_f64().unwrap() > 0.0, "{pair}");
    };
    tokio::join!(complete(&cluster, "watched", true), watch);

    assert_eq!(cluster.send("POST", "/admin/peers/prefill-1/quarantine", &[], "").await.status, 200);
    let news = events.until("the quarantine is told", |frame| frame["matrix"].is_object()).await;
    assert_eq!(news["matrix"]["kinds"][0]["quarantine"], "operator");
    // A stream that is open does not keep the router from leaving.
    let rest = async { while events.next().await.is_some() {} };
    tokio::join!(cluster.finish(), rest);
}

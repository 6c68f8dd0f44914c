//! Settings that are read again while the program runs, by SIGHUP and over HTTP.

use std::net::TcpListener;
use std::path::PathBuf;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::process::{Program, get, http, post, run, wait_ready, wait_registered};
use crate::support::{COMPLETIONS, Cluster, PROMPT, bounded, completion, single_text, stream_text};

/// A router with a settings file, and engines in processes of their own.
struct Deployment {
    router: Program,
    base: String,
    file: PathBuf,
    _engines: Vec<Program>,
    urls: Vec<String>,
}

impl Drop for Deployment {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

impl Deployment {
    /// One prefill and three decode engines, of which the settings name the first two.
    async fn start(name: &str) -> Self {
        let reserved = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = reserved.local_addr().unwrap().to_string();
        let base = format!("http://{addr}");
        drop(reserved);
        let (mut engines, mut urls) = (Vec::new(), Vec::new());
        for role in ["prefill", "decode", "decode", "decode"] {
            let args = ["engine", "--role", role, "--registry", &base, "--decode-us", "10000"];
            let engine = Program::start(&args, &[]);
            urls.push(engine.url("simulated engine"));
            engines.push(engine);
        }
        let file = std::env::temp_dir().join(format!("kvbaton-reload-{name}-{}.toml", std::process::id()));
        std::fs::write(&file, settings(&urls[0], &[&urls[1], &urls[2]], "")).unwrap();
        let args = ["--listen", &addr, "--config", file.to_str().unwrap()];
        let router = Program::start(&args, &[]);
        assert_eq!(router.url("listens on"), base);
        wait_ready(&base).await;
        wait_registered(&base, 4).await;
        Self { router, base, file, _engines: engines, urls }
    }

    fn write(&self, decode: &[&str], more: &str) {
        std::fs::write(&self.file, settings(&self.urls[0], decode, more)).unwrap();
    }

    async fn peers(&self) -> Vec<Value> {
        get(&self.base, "/admin/peers").await.json()["peers"].as_array().unwrap().clone()
    }

    async fn decode_urls(&self) -> Vec<String> {
        let peers = self.peers().await;
        let decode = peers.iter().filter(|peer| peer["role"] == "decode");
        decode.map(|peer| peer["url"].as_str().unwrap().to_owned()).collect()
    }

    async fn served_by(&self, engine: usize) -> u64 {
        get(&self.urls[engine], "/sim/stats").await.json()["decode_requests"].as_u64().unwrap()
    }
}

fn settings(prefill: &str, decode: &[&str], more: &str) -> String {
    let mut text = format!("[pairing]\nadopt_registered = false\n{more}\n[[prefill]]\nurl = \"{prefill}\"\n");
    for url in decode {
        text.push_str(&format!("[[decode]]\nurl = \"{url}\"\n"));
    }
    text
}

fn body(number: usize, max_tokens: u64, stream: bool) -> Value {
    let mut body = completion(&format!("{number} {PROMPT}"), max_tokens);
    body["stream"] = json!(stream);
    body
}

async fn settled(deployment: &Deployment) {
    bounded("all new peers are ready", async {
        while !deployment.peers().await.iter().all(|peer| peer["accepts"] == true) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn engines_and_deadlines_change_under_load_and_nobody_notices() {
    let deployment = Deployment::start("load").await;
    settled(&deployment).await;
    let base = &deployment.base;
    // One stream on each of the decode engines.
    let mut streams = Vec::new();
    for number in 0..2 {
        let request = http().post(format!("{base}{COMPLETIONS}")).header("content-type", "application/json");
        let mut response = request.body(body(number, 150, true).to_string()).send().await.unwrap();
        let first = response.chunk().await.unwrap().unwrap();
        streams.push((response, first.to_vec()));
    }
    let load = async {
        for round in 1..6 {
            let bodies: Vec<Value> = (0..6).map(|i| body(100 * round + i, 12, i % 2 == 0)).collect();
            let answers = join_all(bodies.iter().map(|body| post(base, COMPLETIONS, body))).await;
            for (body, answer) in bodies.iter().zip(answers) {
                assert_eq!(answer.generated(), single_text(COMPLETIONS, body).await);
            }
        }
    };
    let reload = async {
        let before = deployment.peers().await;
        let [_, kept, gone, new] = &deployment.urls[..] else { panic!("four engines") };
        deployment.write(
            &[kept, new],
            "[timeouts]\nprefill = \"77s\"\nconnect = \"7s\"\n[limits]\nbody_bytes = 2000",
        );
        let said = post(base, "/admin/reload", &json!({})).await;
        assert_eq!(said.status, 200, "{}", said.text());
        assert_eq!(
            said.json(),
            json!({
                "applied": ["decode", "limits.body_bytes", "timeouts.prefill"],
                "needs_restart": ["timeouts.connect"],
                "peers": {"added": ["decode-3"], "updated": [], "removed": ["decode-2"]},
            })
        );
        assert_eq!(deployment.decode_urls().await, [kept.clone(), new.clone()]);
        // Those that stay are the same ones, with all that is known of them.
        let after = deployment.peers().await;
        for id in ["prefill-1", "decode-1"] {
            let of = |peers: &[Value]| peers.iter().find(|peer| peer["id"] == id).unwrap().clone();
            let known =
                |peer: Value| (peer["engine_ids"].clone(), peer["state"].clone(), peer["models"].clone());
            assert_eq!(known(of(&before)), known(of(&after)), "{id}");
        }
        settled(&deployment).await;
        let left = get(gone, "/sim/stats").await.json()["decode_requests"].clone();
        (left, deployment.served_by(3).await)
    };
    let ((), (left, _)) = tokio::join!(load, reload);
    for (number, (mut response, mut text)) in streams.into_iter().enumerate() {
        while let Some(piece) = response.chunk().await.unwrap() {
            text.extend(piece);
        }
        let whole = single_text(COMPLETIONS, &body(number, 150, false)).await;
        assert_eq!(stream_text(&String::from_utf8(text).unwrap()), whole);
    }
    for number in 0..4 {
        let body = body(900 + number, 4, false);
        assert_eq!(post(base, COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    }
    assert!(deployment.served_by(3).await > 0, "the new engine serves");
    assert_eq!(json!(deployment.served_by(2).await), left, "the old one got nothing more");
    // The new limit holds.
    let large = completion(&"x".repeat(3000), 1);
    assert_eq!(post(base, COMPLETIONS, &large).await.status, 413);
}

#[tokio::test]
async fn limits_and_breakers_change_and_what_runs_stays_counted() {
    let deployment = Deployment::start("limits").await;
    settled(&deployment).await;
    let (base, decode) = (&deployment.base, [&*deployment.urls[1], &*deployment.urls[2]]);
    let request = http().post(format!("{base}{COMPLETIONS}")).header("content-type", "application/json");
    let mut stream = request.body(body(1, 400, true).to_string()).send().await.unwrap();
    let mut text = stream.chunk().await.unwrap().unwrap().to_vec();
    // The one that runs takes the only place that there is now.
    let one = "[admission]\nlongest_wait = \"0s\"\nmax_tokens = 500\n[admission.decode]\nrequests = 1\n[breaker]\nfailures = 2";
    deployment.write(&decode, one);
    let said = post(base, "/admin/reload", &json!({})).await.json();
    let applied = json!([
        "admission.decode.requests",
        "admission.longest_wait",
        "admission.max_tokens",
        "breaker.failures"
    ]);
    assert_eq!((&said["applied"], &said["needs_restart"]), (&applied, &json!([])));
    let busy = post(base, COMPLETIONS, &body(2, 4, false)).await;
    assert_eq!((busy.status, &busy.json()["error"]["code"]), (429, &json!("decode_saturated")));
    let greedy = post(base, COMPLETIONS, &body(2, 501, false)).await;
    assert_eq!(greedy.status, 400, "{}", greedy.text());
    deployment.write(&decode, "[admission.decode]\nrequests = 2");
    assert_eq!(post(base, "/admin/reload", &json!({})).await.status, 200);
    assert_eq!(post(base, COMPLETIONS, &body(2, 4, false)).await.status, 200);
    while let Some(piece) = stream.chunk().await.unwrap() {
        text.extend(piece);
    }
    let whole = single_text(COMPLETIONS, &body(1, 400, false)).await;
    assert_eq!(stream_text(&String::from_utf8(text).unwrap()), whole);
    // Nobody holds a place that is not there.
    bounded("no place is taken", async {
        let page = || async { get(base, "/metrics").await.text() };
        while !page().await.contains("kvbaton_admission_running{stage=\"decode\"} 0") {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn what_is_known_of_an_engines_health_outlives_a_reload() {
    let deployment = Deployment::start("health").await;
    settled(&deployment).await;
    let (base, decode) = (&deployment.base, [&*deployment.urls[1], &*deployment.urls[2]]);
    let refusal = json!({"kind": "refuse", "status": 503, "body": {}, "leg": "decode", "sticky": true});
    assert_eq!(post(decode[0], "/sim/faults", &json!({"arm": [refusal]})).await.status, 200);
    let peer = async || {
        let peers = deployment.peers().await;
        peers.iter().find(|peer| peer["url"] == decode[0]).unwrap().clone()
    };
    let health = async || peer().await["health"].clone();
    let mut number = 0;
    bounded("its breaker opens", async {
        while health().await["breaker"] != "open" {
            number += 1;
            assert_eq!(
                post(base, COMPLETIONS, &body(number, 2, false)).await.status,
                200,
                "the other serves"
            );
        }
    })
    .await;
    let (before, failures) = (health().await, peer().await["errors"].clone());
    deployment.write(&decode, "[timeouts]\nprefill = \"77s\"");
    assert_eq!(post(base, "/admin/reload", &json!({})).await.json()["applied"], json!(["timeouts.prefill"]));
    let after = health().await;
    for count in ["breaker", "opened", "failures_in_a_row"] {
        assert_eq!(before[count], after[count], "{count}: {before} {after}");
    }
    for number in 100..104 {
        assert_eq!(post(base, COMPLETIONS, &body(number, 2, false)).await.status, 200);
    }
    assert_eq!(peer().await["errors"], failures, "it is not asked anew");
}

#[tokio::test]
async fn a_signal_reloads_too_and_faults_change_nothing() {
    let deployment = Deployment::start("signal").await;
    settled(&deployment).await;
    let before = deployment.decode_urls().await;
    // Faults of every kind, next to a change that alone would be good.
    let wrong = "[timeouts]\nprefill = \"77s\"\nidel = \"1s\"\nidle = \"0s\"";
    deployment.write(&[&deployment.urls[3], "ftp://x"], wrong);
    let refused = post(&deployment.base, "/admin/reload", &json!({})).await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["code"], "invalid_settings");
    let listed = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    for word in ["timeouts.idel", "timeouts.idle", "decode[1]", deployment.file.to_str().unwrap()] {
        assert!(listed.contains(word), "{word} is not in {listed}");
    }
    // In the words of a start.
    let started = run(&["--config", deployment.file.to_str().unwrap()], &[]);
    assert_eq!(String::from_utf8(started.stderr).unwrap().trim_end(), format!("kvbaton: {listed}"));
    deployment.router.signal("HUP");
    assert_eq!(deployment.decode_urls().await, before);
    assert_eq!(post(&deployment.base, COMPLETIONS, &body(1, 4, false)).await.status, 200);

    deployment.write(&[&deployment.urls[1], &deployment.urls[2], &deployment.urls[3]], "");
    deployment.router.signal("HUP");
    bounded("the third decode engine is there", async {
        while deployment.decode_urls().await.len() != 3 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let nothing = post(&deployment.base, "/admin/reload", &json!({})).await.json();
    let none = json!({"added": [], "updated": [], "removed": []});
    assert_eq!(nothing, json!({"applied": [], "needs_restart": [], "peers": none}));
}

#[tokio::test]
async fn a_program_whose_settings_come_from_nowhere_says_so() {
    let cluster = Cluster::builder().start().await;
    let answer = cluster.send("POST", "/admin/reload", &[], "").await;
    cluster.assert_error(&answer, 409, "not_reloadable");
    cluster.finish().await;
}

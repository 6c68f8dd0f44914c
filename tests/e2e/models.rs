//! What clients call models: aliases, the default, canaries, adapters, and how many engines a model uses.

use std::sync::atomic::{AtomicUsize, Ordering};

use engine_sim::Engine;
use kvbaton::config::{Config, Key};
use kvbaton_proxy::{AnswerName, ModelSettings, ModelTarget, PdRatio};
use kvbaton_routes::SecretDigest;
use serde_json::{Value, json};

use crate::support::{
    Builder, CHAT, COMPLETIONS, Cluster, PROMPT, chat, completion, events, generations, parse, single_text,
};

fn entry(name: &str, targets: &[(&str, u32)]) -> ModelSettings {
    let target = |(model, weight): &(&str, u32)| ModelTarget { model: (*model).into(), weight: *weight };
    ModelSettings {
        name: name.into(),
        targets: targets.iter().map(target).collect(),
        ..ModelSettings::default()
    }
}

fn named(models: impl Fn() -> Vec<ModelSettings> + 'static) -> Builder {
    Cluster::builder().config(move |config: &mut Config| config.models = models())
}

fn asking(model: &str) -> Value {
    let mut body = completion(PROMPT, 4);
    body["model"] = model.into();
    body
}

/// The models that an engine was asked for.
fn asked(engine: &Engine) -> Vec<String> {
    let model = |body: &[u8]| parse(body)["model"].as_str().unwrap().to_owned();
    generations(engine).iter().map(|seen| model(&seen.body)).collect()
}

async fn listed(cluster: &Cluster) -> Vec<String> {
    let list = cluster.get("/v1/models").await.json();
    let ids = list["data"].as_array().unwrap().iter().map(|entry| entry["id"].as_str().unwrap().to_owned());
    ids.collect()
}

#[tokio::test]
async fn an_alias_reaches_both_engines_by_their_name_and_the_client_by_its_own() {
    let cluster = named(|| {
        let mut chat = entry("chat", &[("sim", 1)]);
        chat.aliases = vec!["gpt-4".into()];
        let served = ModelSettings { answer: AnswerName::Served, ..entry("plain", &[("sim", 1)]) };
        vec![chat, served]
    })
    .start()
    .await;
    let expected = single_text(COMPLETIONS, &completion(PROMPT, 4)).await;
    // Odd spacing, an escape and a second `model` are the client's; only the names change.
    let prompt = json!(PROMPT);
    let body = format!(
        r#"{{ "model" : "x", "prompt":{prompt},"max_tokens":4 ,"m\u006fdel":"gpt-4","temperature":0}}"#
    );
    let answer = cluster.post_bytes(COMPLETIONS, body.clone(), &[]).await;
    assert_eq!((answer.generated(), answer.json()["model"].clone()), (expected.clone(), json!("gpt-4")));
    let seen = generations(cluster.d()).remove(0);
    let seen = std::str::from_utf8(&seen.body).unwrap();
    let start = body.replace(r#""x""#, r#""sim""#).replace(r#""gpt-4""#, r#""sim""#);
    assert!(seen.starts_with(start.strip_suffix('}').unwrap()), "{seen}");
    assert_eq!(parse(&generations(cluster.p())[0].body)["model"], "sim");

    let answer = cluster.post(COMPLETIONS, &asking("plain")).await;
    assert_eq!(answer.json()["model"], "sim", "the operator wants the engine's name shown");
    for path in [COMPLETIONS, CHAT] {
        let mut body = if path == CHAT { chat(PROMPT, 4) } else { completion(PROMPT, 4) };
        (body["model"], body["stream"]) = ("chat".into(), true.into());
        let stream = cluster.post(path, &body).await.text();
        let shown: Vec<Value> = events(&stream)
            .iter()
            .filter(|event| *event != "[DONE]")
            .map(|event| serde_json::from_str::<Value>(event).unwrap()["model"].clone())
            .collect();
        assert!(shown.len() >= 4 && shown.iter().all(|model| model == "chat"), "{shown:?}");
    }
    for (asked, count) in [("gpt-4", 1.0), ("chat", 2.0), ("plain", 1.0)] {
        let labels = [("asked", asked), ("served", "sim")];
        assert_eq!(cluster.metric("kvbaton_model_requests_total", &labels).await, count, "{asked}");
    }
    let requests = cluster.get("/metrics").await.text();
    let lines = requests.lines().filter(|line| line.starts_with("kvbaton_requests_total"));
    assert!(
        lines.clone().count() > 0 && lines.clone().all(|line| line.contains(r#"model="sim""#)),
        "{requests}"
    );
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn requests_without_a_model_have_the_default() {
    let cluster =
        named(|| vec![ModelSettings { default: true, ..entry("chat", &[("sim", 1)]) }]).start().await;
    let mut body = completion(PROMPT, 4);
    let expected = single_text(COMPLETIONS, &body).await;
    body.as_object_mut().unwrap().remove("model");
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), expected);
    assert_eq!([asked(cluster.p()), asked(cluster.d())], [["sim"], ["sim"]]);
    cluster.assert_error(&cluster.post(COMPLETIONS, &json!({})).await, 400, "model_required");
    cluster.finish().await;
}

#[tokio::test]
async fn the_list_has_what_engines_list_their_adapters_and_the_settings_names() {
    let cluster = named(|| {
        let mut chat = entry("chat", &[("sim-sql", 1), ("sim", 1)]);
        chat.aliases = vec!["team/chat".into()];
        vec![chat, entry("nowhere", &[("absent", 1)]), entry("sim", &[("sim", 9), ("sim-sql", 1)])]
    })
    .engine(|engine| engine.adapters = vec!["sim-sql".into()])
    .start()
    .await;
    assert_eq!(listed(&cluster).await, ["chat", "sim", "sim-sql", "team/chat"]);
    let adapter = cluster.get("/v1/models/sim-sql").await.json();
    assert_eq!(adapter["parent"], "sim");
    let alias = cluster.get("/v1/models/team/chat").await.json();
    assert_eq!((&alias["id"], &alias["parent"]), (&json!("team/chat"), &json!("sim")));
    cluster.finish().await;
}

/// The first prefill and the second decode engine have an adapter.
fn adapted() -> Builder {
    let started = [AtomicUsize::new(0), AtomicUsize::new(0)];
    Cluster::builder().prefill(2).decode(2).engine(move |engine| {
        let decode = engine.role == engine_sim::Role::Decode;
        let place = started[usize::from(decode)].fetch_add(1, Ordering::Relaxed);
        if place == usize::from(decode) {
            engine.adapters = vec!["sim-sql".into()];
        }
    })
}

#[tokio::test]
async fn an_adapter_is_asked_of_engines_only_that_list_it() {
    let cluster = adapted().start().await;
    for _ in 0..6 {
        let answer = cluster.post(COMPLETIONS, &asking("sim-sql")).await;
        assert_eq!((answer.status, answer.json()["model"].clone()), (200, json!("sim-sql")));
    }
    let counts = |engines: &[Engine]| engines.iter().map(|engine| asked(engine).len()).collect::<Vec<_>>();
    assert_eq!([counts(&cluster.prefill), counts(&cluster.decode)], [[6, 0], [0, 6]]);
    let shown = cluster.get("/admin/explain?model=sim-sql").await.json();
    let reasons: Vec<&Value> =
        shown["ruled_out"].as_array().unwrap().iter().map(|out| &out["reason"]).collect();
    assert_eq!(reasons, ["does_not_list_the_model", "does_not_list_the_model"]);
    // Nor of another one where those get no requests.
    let peers = cluster.get("/admin/peers").await.json();
    let all = peers["peers"].as_array().unwrap();
    let only = all.iter().find(|peer| peer["url"] == cluster.prefill[0].url()).unwrap();
    let path = format!("/admin/peers/{}/drain", only["id"].as_str().unwrap());
    assert_eq!(cluster.send("POST", &path, &[], "").await.status, 200);
    let answer = cluster.post(COMPLETIONS, &asking("sim-sql")).await;
    assert_eq!(answer.status, 503, "{answer:?}");
    assert_eq!(counts(&cluster.decode), [0, 6]);
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn a_model_that_nobody_lists_is_refused_before_any_engine() {
    let cluster = named(|| vec![entry("dead", &[("absent", 1)])]).start().await;
    for model in ["nothing", "dead"] {
        let answer = cluster.post(COMPLETIONS, &asking(model)).await;
        cluster.assert_error(&answer, 404, "model_not_found");
        assert_eq!(answer.json()["error"]["param"], "model");
        assert!(answer.text().contains(model) && !answer.text().contains("absent"), "{}", answer.text());
    }
    assert!(generations(cluster.p()).is_empty() && generations(cluster.d()).is_empty());
    cluster.finish().await;
}

#[tokio::test]
async fn a_key_is_for_names_as_they_are_asked_for() {
    let cluster = named(|| {
        let mut chat = ModelSettings { default: true, ..entry("chat", &[("sim", 1)]) };
        chat.aliases = vec!["gpt-4".into()];
        vec![chat]
    })
    .config(|config| {
        let key = |name: &str, models: &[&str]| Key {
            name: name.into(),
            sha256: vec![SecretDigest::of(&format!("sk-{name}")).unwrap().to_hex()],
            certificates: Vec::new(),
            models: models.iter().map(|model| (*model).to_owned()).collect(),
        };
        config.keys = vec![key("alias", &["gpt-4"]), key("engine", &["sim"]), key("name", &["chat"])];
    })
    .start()
    .await;
    let mut nameless = asking("");
    nameless.as_object_mut().unwrap().remove("model");
    for (key, allowed) in [("alias", "gpt-4"), ("engine", "sim"), ("name", "chat")] {
        let bearer = format!("Bearer sk-{key}");
        for model in ["gpt-4", "sim", "chat"] {
            let body = asking(model).to_string();
            let answer = cluster.post_bytes(COMPLETIONS, body, &[("authorization", &bearer)]).await;
            assert_eq!(answer.status, if model == allowed { 200 } else { 404 }, "{key} asks for {model}");
        }
        // Who leaves the name out asks for the default's.
        let answer =
            cluster.post_bytes(COMPLETIONS, nameless.to_string(), &[("authorization", &bearer)]).await;
        assert_eq!(answer.status, if key == "name" { 200 } else { 404 }, "{key}");
        let list = cluster.send("GET", "/v1/models", &[("authorization", &bearer)], "").await.json();
        assert_eq!((list["data"].as_array().unwrap().len(), &list["data"][0]["id"]), (1, &json!(allowed)));
    }
    cluster.finish().await;
}

#[tokio::test]
async fn a_canary_has_its_share_exactly_and_keeps_its_users() {
    let cluster = named(|| vec![entry("sim", &[("sim", 3), ("sim-new", 1)])])
        .engine(|engine| engine.adapters = vec!["sim-new".into()])
        .start()
        .await;
    for _ in 0..8 {
        let answer = cluster.post(COMPLETIONS, &asking("sim")).await;
        assert_eq!((answer.status, answer.json()["model"].clone()), (200, json!("sim")));
    }
    let count = |name: &str| asked(cluster.d()).iter().filter(|model| *model == name).count();
    assert_eq!((count("sim"), count("sim-new")), (6, 2));
    assert_eq!(asked(cluster.p()), asked(cluster.d()), "both legs are of one model");
    let labels = [("asked", "sim"), ("served", "sim-new")];
    assert_eq!(cluster.metric("kvbaton_model_requests_total", &labels).await, 2.0);
    for user in ["ann", "bob"] {
        let mut body = asking("sim");
        body["user"] = user.into();
        let before = asked(cluster.d()).len();
        for _ in 0..4 {
            assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
        }
        let models = asked(cluster.d()).split_off(before);
        assert!(models.iter().all(|model| *model == models[0]), "{user}: {models:?}");
    }
    cluster.finish().await;
}

#[tokio::test]
async fn a_ratio_keeps_a_models_requests_on_some_of_too_many_engines() {
    let cluster = named(|| {
        vec![ModelSettings { pd_ratio: Some(PdRatio { prefill: 1, decode: 2 }), ..entry("sim", &[]) }]
    })
    .prefill(3)
    .decode(2)
    .start()
    .await;
    let engines = async |stage: &str| {
        cluster.metric("kvbaton_model_engines", &[("model", "sim"), ("stage", stage)]).await
    };
    cluster.wait_for("all engines are known", async || engines("decode").await == 2.0).await;
    assert_eq!(engines("prefill").await, 1.0);
    assert_eq!(cluster.metric("kvbaton_model_pd_ratio", &[("model", "sim")]).await, 0.5);
    for _ in 0..6 {
        assert_eq!(cluster.post(COMPLETIONS, &asking("sim")).await.status, 200);
    }
    let counts = |engines: &[Engine]| {
        let mut counts: Vec<usize> = engines.iter().map(|engine| asked(engine).len()).collect();
        counts.sort_unstable();
        counts
    };
    assert_eq!((counts(&cluster.prefill), counts(&cluster.decode)), (vec![0, 0, 6], vec![3, 3]));
    let shown = cluster.get("/admin/explain?model=sim").await.json();
    let out = shown["ruled_out"].as_array().unwrap();
    assert_eq!(out.iter().filter(|out| out["reason"] == "pd_ratio").count(), 2, "{shown}");
    cluster.finish().await;
}

#[tokio::test]
async fn other_endpoints_know_the_names_too() {
    let cluster = named(|| vec![entry("chat", &[("sim", 1)])]).start().await;
    let body = json!({"model": "chat", "input": "a text"});
    let answer = cluster.post("/v1/embeddings", &body).await;
    let seen = cluster.d().requests();
    let seen = seen.iter().find(|seen| seen.path == "/v1/embeddings").unwrap();
    assert_eq!(parse(&seen.body), json!({"model": "sim", "input": "a text"}));
    assert_eq!((answer.status, answer.json()["model"].clone()), (200, json!("chat")));
    cluster.finish().await;
}

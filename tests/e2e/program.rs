//! The program as people start it: processes, flags, signals, exit codes.

use std::io::Read as _;
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::process::{Program, counted, get, http, post, run, wait_ready, wait_registered};
use crate::support::{Answer, CHAT, COMPLETIONS, PROMPT, chat, completion, single_text, stream_text};

#[tokio::test]
async fn without_arguments_it_runs_a_fleet_and_prints_a_line_that_works() {
    let program = Program::start(&[], &[("KVBATON_LISTEN", "127.0.0.1:0")]);
    let base = program.url("listens on");
    let prefill = program.url("prefill engine");
    let decode = program.url("decode engine");
    let curl = program.line("curl ");
    assert!(curl.contains(&base), "{curl}");
    for own in [&prefill, &decode] {
        assert_ne!(own, &base);
        assert_eq!(get(own, "/health").await.status, 200);
    }
    wait_ready(&base).await;
    wait_registered(&base, 2).await;
    let out = Command::new("sh")
        .arg("-c")
        .arg(format!("{} -sS --max-time 20 --fail", curl.trim()))
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let answer: Value = serde_json::from_slice(&out.stdout).unwrap();
    let prompt = json!({"model": "sim", "prompt": "Once upon a time", "max_tokens": 24});
    assert_eq!(answer["choices"][0]["text"], single_text(COMPLETIONS, &prompt).await);
    assert_eq!(counted(&base, std::slice::from_ref(&decode)).await, (1, 1));

    for (path, body) in [(COMPLETIONS, completion(PROMPT, 16)), (CHAT, chat(PROMPT, 16))] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            assert_eq!(post(&base, path, &body).await.generated(), single_text(path, &body).await);
        }
    }
    assert_eq!(counted(&base, &[decode]).await, (5, 5));
    assert_eq!(get(&prefill, "/sim/stats").await.json()["prefill_requests"], 5);
}

#[tokio::test]
async fn engines_in_processes_of_their_own_give_the_single_engines_text() {
    // The engines must know the router's address before it listens.
    let reserved = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = reserved.local_addr().unwrap().to_string();
    let base = format!("http://{addr}");
    drop(reserved);
    let engine = |role: &str| {
        let args = ["engine", "--role", role, "--listen", "127.0.0.1:0", "--registry", &base];
        let program = Program::start(&args, &[]);
        let url = program.url("simulated engine");
        (program, url)
    };
    let (prefill, decode) = ([engine("prefill"), engine("prefill")], [engine("decode"), engine("decode")]);
    let router = Program::start(
        &[
            "serve",
            "--listen",
            &addr,
            "--prefill",
            &prefill[0].1,
            "--prefill",
            &prefill[1].1,
            "--decode",
            &decode[0].1,
            "--decode",
            &decode[1].1,
        ],
        &[],
    );
    assert_eq!(router.url("listens on"), base);
    wait_ready(&base).await;
    wait_registered(&base, 4).await;
    let bodies: Vec<Value> = (0..40)
        .map(|i| {
            let mut body = completion(&format!("{i} {PROMPT}"), 16);
            body["stream"] = json!(i % 2 == 0);
            body
        })
        .collect();
    let answers = join_all(bodies.iter().map(|body| post(&base, COMPLETIONS, body))).await;
    for (body, answer) in bodies.iter().zip(answers) {
        assert_eq!(answer.generated(), single_text(COMPLETIONS, body).await);
    }
    let urls: Vec<String> = decode.iter().map(|(_, url)| url.clone()).collect();
    assert_eq!(counted(&base, &urls).await, (40, 40));
}

#[test]
fn item_51_all_wrong_settings_are_listed_at_once() {
    let file = std::env::temp_dir().join(format!("kvbaton-e2e-{}.toml", std::process::id()));
    std::fs::write(&file, "lisen = \"127.0.0.1:1\"\n[timeouts]\nprefil = \"1s\"\n").unwrap();
    let args = ["--config", file.to_str().unwrap(), "--set", "hand_off.on_mising=fail"];
    let out = run(&args, &[("KVBATON_LIMITS__BODY_BYTE", "1")]);
    std::fs::remove_file(&file).unwrap();
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{said}");
    for word in [
        "lisen",
        "listen",
        "timeouts.prefil",
        "timeouts.prefill",
        "on_mising",
        "on_missing",
        "KVBATON_LIMITS__BODY_BYTES",
    ] {
        assert!(said.contains(word), "{word} is not in {said}");
    }
    assert!(said.contains(file.to_str().unwrap()), "{said}");
}

#[test]
fn unusable_values_are_listed_at_once() {
    let args = ["--prefill", "ftp://x", "--decode", "nonsense", "--set", "timeouts.idle=0s"];
    let out = run(&args, &[]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{said}");
    for word in ["prefill", "decode", "timeouts.idle"] {
        assert!(said.contains(word), "{word} is not in {said}");
    }
}

#[tokio::test]
async fn flags_win_over_the_environment_and_the_environment_over_the_file() {
    let file = std::env::temp_dir().join(format!("kvbaton-e2e-layers-{}.toml", std::process::id()));
    let text = "listen = \"127.0.0.1:1\"\n[fleet]\nmodel = \"of-the-file\"\ndecode = 2\n[admin]\ntoken = \"of-the-file\"\n";
    std::fs::write(&file, text).unwrap();
    let env = [("KVBATON_FLEET__MODEL", "of-the-env"), ("KVBATON_ADMIN__TOKEN", "of-the-env")];
    let args =
        ["--config", file.to_str().unwrap(), "--listen", "127.0.0.1:0", "--set", "fleet.model=of-the-flag"];
    let program = Program::start(&args, &env);
    let base = program.url("listens on");
    wait_ready(&base).await;
    std::fs::remove_file(&file).unwrap();
    assert_eq!(get(&base, "/v1/models").await.json()["data"][0]["id"], "of-the-flag");
    for (token, status) in [("of-the-file", 401), ("of-the-env", 200)] {
        let request =
            http().get(format!("{base}/admin/peers")).header("authorization", format!("Bearer {token}"));
        let answer = Answer::read(request).await;
        assert_eq!(answer.status, status);
        if status == 200 {
            assert_eq!(answer.json()["peers"].as_array().unwrap().len(), 3);
        }
    }
}

#[test]
fn item_51_wrong_flags_are_wrong_usage() {
    for args in [&["--no-such-flag"][..], &["--listen", "nonsense"], &["engine"], &["engine", "--role", "x"]]
    {
        assert_eq!(run(args, &[]).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn an_address_in_use_ends_the_program_with_its_name() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let out = run(&["--listen", &addr], &[]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains(&addr), "{said}");
}

/// A router with slow engines, in the middle of a stream of about two seconds.
async fn streaming() -> (Program, [Program; 2], reqwest::Response) {
    let router = Program::start(
        &["--listen", "127.0.0.1:0", "--set", "fleet.embedded=never", "--set", "shutdown.settle=100ms"],
        &[],
    );
    let base = router.url("listens on");
    let engine = |role: &str| {
        let args = ["engine", "--role", role, "--registry", &base, "--decode-us", "20000"];
        let program = Program::start(&args, &[]);
        let url = program.url("simulated engine");
        (program, url)
    };
    let (prefill, decode) = (engine("prefill"), engine("decode"));
    for (role, url) in [("prefill", &prefill.1), ("decode", &decode.1)] {
        assert_eq!(post(&base, "/admin/peers", &json!({"role": role, "url": url})).await.status, 201);
    }
    wait_ready(&base).await;
    wait_registered(&base, 2).await;
    let mut body = completion(PROMPT, 100);
    body["stream"] = json!(true);
    let request = http().post(format!("{base}{COMPLETIONS}")).header("content-type", "application/json");
    let mut response = request.body(body.to_string()).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.chunk().await.unwrap().is_some());
    (router, [prefill.0, decode.0], response)
}

#[tokio::test]
async fn a_signal_lets_a_running_stream_end() {
    let (mut router, _engines, mut response) = streaming().await;
    router.signal("TERM");
    let mut rest = Vec::new();
    while let Some(piece) = response.chunk().await.unwrap() {
        rest.extend(piece);
    }
    let rest = String::from_utf8(rest).unwrap();
    assert!(rest.len() > 1000 && !rest.contains("\"error\""), "{rest}");
    let text = stream_text(&rest);
    let whole = single_text(COMPLETIONS, &completion(PROMPT, 100)).await;
    assert!(whole.ends_with(&text) && text.len() > 50, "{text:?} is not the end of {whole:?}");
    assert_eq!(router.wait().code(), Some(0));
}

#[tokio::test]
async fn a_second_signal_ends_the_program_at_once() {
    let (mut router, _engines, response) = streaming().await;
    router.signal("TERM");
    // A signal right after the first is its echo from the process group.
    router.signal("TERM");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(router.child.try_wait().unwrap().is_none(), "it did not wait for the stream");
    let start = Instant::now();
    router.signal("INT");
    let status = router.wait();
    assert!(start.elapsed() < Duration::from_secs(1), "it took {:?}", start.elapsed());
    assert_eq!(status.code(), Some(1));
    assert!(response.bytes().await.is_err(), "the stream was cut");
}

#[test]
fn a_simulated_engine_leaves_at_a_signal() {
    let mut engine = Program::start(&["engine", "--role", "both", "--listen", "127.0.0.1:0"], &[]);
    engine.url("simulated engine");
    engine.signal("INT");
    assert_eq!(engine.wait().code(), Some(0));
}

#[test]
fn help_names_every_subcommand_and_flag() {
    let out = run(&["--help"], &[]);
    assert_eq!(out.status.code(), Some(0));
    let mut said = String::new();
    out.stdout.as_slice().read_to_string(&mut said).unwrap();
    for word in ["engine", "--listen", "--prefill", "--decode", "--config"] {
        assert!(said.contains(word), "{word} is not in {said}");
    }
}

#[tokio::test]
async fn a_key_that_the_program_made_opens_the_program() {
    let made = run(&["key", "new", "--name", "team", "--model", "sim"], &[]);
    assert!(made.status.success());
    let text = String::from_utf8(made.stdout).unwrap();
    let (key, entry) = text.split_once("\n\n").unwrap();
    assert!(key.starts_with("sk-") && key.len() > 40 && !entry.contains(key), "{text}");
    let file = std::env::temp_dir().join(format!("kvbaton-keys-{}.toml", std::process::id()));
    std::fs::write(&file, entry).unwrap();
    let env = [("KVBATON_LISTEN", "127.0.0.1:0"), ("KVBATON_KEYS_FILE", file.to_str().unwrap())];
    let program = Program::start(&[], &env);
    let base = program.url("listens on");
    assert!(program.line("curl ").contains("Authorization: Bearer KEY"));
    wait_ready(&base).await;
    std::fs::remove_file(&file).unwrap();
    let ask = async |key: &str| {
        Answer::read(http().get(format!("{base}/v1/models")).header("authorization", format!("Bearer {key}")))
            .await
    };
    assert_eq!(ask(key).await.json()["data"][0]["id"], "sim");
    assert_eq!(ask(&key[1..]).await.status, 401);
}

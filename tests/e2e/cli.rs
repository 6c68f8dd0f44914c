//! Subcommands of the program against a running router: what they print, and their exit codes.

mod check;

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use engine_sim::{Leg, Stage};
use kvbaton::config::Config;
use serde_json::Value;

use crate::support::process::run;
use crate::support::{COMPLETIONS, Cluster, File, PROMPT, bounded, completion};

/// What the program said.
#[derive(Debug)]
struct Said {
    code: i32,
    out: String,
    err: String,
}

impl Said {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    fn has(&self, words: &[&str]) {
        for word in words {
            assert!(self.out.contains(word), "{word:?} is not in {}\n{}", self.out, self.err);
        }
    }
}

/// Runs the program beside the cluster, which lives on the test's own thread.
async fn kvbaton(args: &[&str], env: &[(&str, &str)]) -> Said {
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let env: Vec<(String, String)> = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let ran = tokio::task::spawn_blocking(move || {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        run(&args, &env)
    });
    let out = ran.await.unwrap();
    Said {
        code: out.status.code().unwrap(),
        out: String::from_utf8(out.stdout).unwrap(),
        err: String::from_utf8(out.stderr).unwrap(),
    }
}

/// As [`kvbaton`], asking the cluster's router.
async fn ask(cluster: &Cluster, args: &[&str]) -> Said {
    kvbaton(args, &[("OPERATOR_ROUTER", &cluster.url(""))]).await
}

#[tokio::test]
async fn peers_are_listed_added_changed_and_removed() {
    let cluster = Cluster::builder().start().await;
    let listed = ask(&cluster, &["peers", "ls"]).await;
    assert_eq!((listed.code, listed.err.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = listed.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..4], ["ID", "ROLE", "STATE", "REQUESTS"]);
    assert_eq!(lines[1][..4], ["prefill-1", "prefill", "ready", "yes"]);
    assert_eq!(lines[2][..4], ["decode-1", "decode", "ready", "yes"]);

    let url = cluster.prefill[0].url().replace("127.0.0.1", "localhost");
    let token = File::new("engine-token", "of-the-engine\n");
    let add =
        ["peers", "add", "prefill", &url, "--name", "second", "--set", "lease=\"20s\"", "--output", "json"];
    let added = ask(&cluster, &[&add[..], &["--engine-token-file", token.path()]].concat()).await;
    assert_eq!(added.code, 0, "{added:?}");
    let shown = added.json();
    assert_eq!((&shown["id"], &shown["authorization"]), (&"second".into(), &"replace".into()));
    let again = ask(&cluster, &add).await;
    assert_eq!(again.code, 5, "{again:?}");
    assert!(again.err.contains("409") && again.err.contains("second"), "{again:?}");
    let secret = ask(&cluster, &["peers", "add", "prefill", "http://127.0.0.1:9", "--set", "token=x"]).await;
    assert_eq!(secret.code, 2);
    assert!(secret.err.contains("--engine-token-file"), "{secret:?}");

    for (verb, standing) in [("quarantine", "quarantined"), ("resume", "yes")] {
        cluster
            .wait_for("the new peer answers", async || {
                cluster.get("/admin/peers/second").await.json()["state"] == "ready"
            })
            .await;
        assert_eq!(ask(&cluster, &["peers", verb, "second"]).await.code, 0);
        let listed = ask(&cluster, &["peers", "ls"]).await;
        let line = listed.out.lines().find(|line| line.starts_with("second ")).unwrap();
        assert!(line.contains(standing), "{line}");
    }
    let removed = ask(&cluster, &["peers", "rm", "second"]).await;
    assert_eq!((removed.code, removed.out.as_str()), (0, "second is removed\n"));
    let unknown = ask(&cluster, &["peers", "rm", "second"]).await;
    assert_eq!(unknown.code, 5);
    assert!(unknown.err.contains("there is no peer `second`"), "{unknown:?}");
    let all = ask(&cluster, &["peers", "ls", "--output", "json"]).await.json();
    assert_eq!(all["peers"].as_array().unwrap().len(), 2);
    cluster.finish().await;
}

#[tokio::test]
async fn a_drain_says_whether_something_was_left() {
    let cluster = Cluster::builder().start().await;
    let gate = cluster.d().faults().hold(Stage::BeforeHead, Leg::Decode);
    let (busy, body) = (&cluster, completion(PROMPT, 4));
    let request = async { busy.post(COMPLETIONS, &body).await };
    let drains = async {
        gate.arrived(1).await;
        let late = ask(busy, &["peers", "drain", "decode-1", "--timeout", "0.2"]).await;
        assert_eq!(late.code, 1, "{late:?}");
        late.has(&["decode-1 is not drained yet", "1 exchanges"]);
        gate.release();
        let drained = ask(busy, &["peers", "drain", "decode-1", "--output", "json"]).await;
        assert_eq!((drained.code, &drained.json()["ended"]), (0, &"drained".into()));
    };
    let (answer, ()) = tokio::join!(request, drains);
    assert_eq!(answer.status, 200);
    let resumed = ask(&cluster, &["peers", "resume", "decode-1"]).await;
    assert_eq!((resumed.code, resumed.out.as_str()), (0, "decode-1 may have requests and hand-offs\n"));
    let nonsense = ask(&cluster, &["peers", "drain", "decode-1", "--timeout=-1"]).await;
    assert_eq!(nonsense.code, 5, "the router refuses it: {nonsense:?}");
    cluster.finish().await;
}

#[tokio::test]
async fn exit_codes_tell_an_absent_router_from_a_closed_one() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = format!("http://{}", taken.local_addr().unwrap());
    drop(taken);
    for args in [&["peers", "ls"][..], &["trace", "x"], &["top", "--once"], &["check"]] {
        let said = kvbaton(&[args, &["--router", &nobody]].concat(), &[]).await;
        assert_eq!(said.code, 3, "{args:?}: {said:?}");
        assert!(said.err.contains(&nobody) && said.err.contains("cannot be reached"), "{said:?}");
    }
    for args in
        [&["peers", "ls", "--router", "ftp://x"][..], &["peers"], &["trace"], &["peers", "ls", "--cert", "x"]]
    {
        assert_eq!(kvbaton(args, &[]).await.code, 2, "{args:?}");
    }

    let close = |config: &mut Config| config.admin.token = Some("the-secret".into());
    let cluster = Cluster::builder().config(close).start().await;
    let (right, wrong) = (File::new("right", "# ops\n the-secret \n"), File::new("wrong", "a-secret"));
    for args in [&["peers", "ls"][..], &["trace", "x"], &["top", "--once"]] {
        let without = ask(&cluster, args).await;
        assert_eq!(without.code, 4, "{without:?}");
        assert!(without.err.contains("--token-file"), "{without:?}");
        let refused = ask(&cluster, &[args, &["--token-file", wrong.path()]].concat()).await;
        assert_eq!(refused.code, 4, "{refused:?}");
        assert!(!refused.err.contains("a-secret"), "{refused:?}");
    }
    let listed = ask(&cluster, &["peers", "ls", "--token-file", right.path()]).await;
    assert_eq!(listed.code, 0, "{listed:?}");
    let env = [("OPERATOR_ROUTER", cluster.url("")), ("OPERATOR_TOKEN", "the-secret".to_owned())];
    let env: Vec<(&str, &str)> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    assert_eq!(kvbaton(&["top", "--once"], &env).await.code, 0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_request_is_traced_by_its_id() {
    let cluster = Cluster::builder().start().await;
    let mut body = completion(PROMPT, 6);
    body["stream"] = true.into();
    let headers = [("x-request-id", "an/id with#signs"), ("content-type", "application/json")];
    // Not an id that the router takes over.
    let answer = cluster.post_bytes(COMPLETIONS, body.to_string(), &headers).await;
    let id = answer.header("x-request-id").to_owned();
    cluster
        .wait_for("the request has ended", async || {
            cluster.get(&format!("/admin/requests/{id}")).await.json()["state"] == "ended"
        })
        .await;
    let told = ask(&cluster, &["trace", &id]).await;
    assert_eq!(told.code, 0, "{told:?}");
    told.has(&[
        &format!("request     {id}"),
        "completions, streamed, model sim",
        "served, 200",
        "prefill-1 to decode-1, 2 exchanges",
        "prefill_answered  prefill-1",
        "handed_off",
        "blocks",
        "first_token",
    ]);
    let json = ask(&cluster, &["trace", &id, "--output", "json"]).await.json();
    assert_eq!((&json["request_id"], &json["outcome"]), (&id.as_str().into(), &"served".into()));
    let odd = [("x-request-id", "odd/#id?"), ("content-type", "application/json")];
    assert_eq!(cluster.post_bytes(COMPLETIONS, body.to_string(), &odd).await.status, 200);
    ask(&cluster, &["trace", "odd/#id?"]).await.has(&["request     odd/#id?"]);
    let unknown = ask(&cluster, &["trace", "never-seen"]).await;
    assert_eq!(unknown.code, 5);
    assert!(unknown.err.contains("nothing is known of a request `never-seen`"), "{unknown:?}");
    cluster.finish().await;
}

#[tokio::test]
async fn top_prints_the_fleet_once_where_there_is_no_terminal() {
    let cluster = Cluster::builder().decode(2).start().await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, 200);
    for args in [&["top"][..], &["top", "--once"]] {
        let told = ask(&cluster, args).await;
        assert_eq!(told.code, 0, "{told:?}");
        told.has(&["ready, 1 of 1 prefill peers, 2 of 2 decode peers", "decode-2", "completions"]);
    }
    let json = ask(&cluster, &["top", "--once", "--output", "json"]).await.json();
    assert_eq!(json["peers"].as_array().unwrap().len(), 3);
    cluster.finish().await;
}

/// What a terminal shows until the program is told to leave, and the exit code; `script` gives it the terminal.
fn on_a_terminal(command: &str, until: &str, keys: &[u8]) -> (String, Option<i32>) {
    let mut child = Command::new("script")
        .args(["-qefc", &format!("stty rows 30 cols 120; exec {command}"), "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let (mut screen, mut piece) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&screen).contains(until) {
        let length = output.read(&mut piece).unwrap();
        assert_ne!(length, 0, "it ended: {}", String::from_utf8_lossy(&screen));
        screen.extend(&piece[..length]);
    }
    input.write_all(keys).unwrap();
    output.read_to_end(&mut screen).unwrap();
    (String::from_utf8_lossy(&screen).into_owned(), child.wait().unwrap().code())
}

#[tokio::test]
async fn top_draws_on_a_terminal_until_it_is_told_to_leave() {
    let cluster = Cluster::builder().start().await;
    let command = format!("{} top --router {}", env!("CARGO_BIN_EXE_kvbaton"), cluster.url(""));
    let watch = tokio::task::spawn_blocking(move || on_a_terminal(&command, "decode-1", b"q"));
    let (screen, code) = bounded("the program leaves", watch).await.unwrap();
    assert_eq!(code, Some(0), "{screen}");
    // The alternate screen is entered and left.
    for mark in ["\u{1b}[?1049h", "\u{1b}[?1049l", "prefill-1", "0.32.0"] {
        assert!(screen.contains(mark), "{mark:?} is not in {screen:?}");
    }
    cluster.finish().await;
}

#[test]
fn shells_and_manuals_know_every_subcommand() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = run(&["completions", shell], &[]);
        let script = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success());
        for word in ["peers", "drain", "trace", "check", "top", "router"] {
            assert!(script.contains(word), "{shell} does not complete {word}");
        }
    }
    assert_eq!(run(&["completions", "tcsh"], &[]).status.code(), Some(2));
    let page = String::from_utf8(run(&["man"], &[]).stdout).unwrap();
    assert!(page.contains(".TH kvbaton 1") && page.contains("EXIT STATUS"), "{page}");
    let dir = std::env::temp_dir().join(format!("kvbaton-man-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    assert!(run(&["man", "--dir", dir.to_str().unwrap()], &[]).status.success());
    let drain = std::fs::read_to_string(dir.join("kvbaton-peers-drain.1")).unwrap();
    assert!(drain.contains("timeout") && drain.contains("kvbaton\\-peers\\-drain"), "{drain}");
    let pages = std::fs::read_dir(&dir).unwrap().count();
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(pages >= 17, "{pages}");
    let out = run(&["man", "--dir", "/nowhere/at/all"], &[]);
    assert_eq!(out.status.code(), Some(2));
}

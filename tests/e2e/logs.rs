//! The log: one line per request, without its prompt, in both shapes, and changed while the program runs.

use serde_json::{Value, json};

use crate::support::process::{Program, get, http, post, wait_ready, wait_registered};
use crate::support::{Answer, CHAT, COMPLETIONS, Cluster, PROMPT, chat, completion};

const ACCESS: &str = "INFO kvbaton::access:";

fn access_lines(cluster: &Cluster) -> Vec<String> {
    cluster.log().lines().filter(|line| line.starts_with(ACCESS)).map(str::to_owned).collect()
}

#[tokio::test]
async fn each_request_makes_one_line_that_holds_no_prompt() {
    let cluster = Cluster::builder().logs_all().start().await;
    let mut body = chat(PROMPT, 5);
    body["stream"] = json!(true);
    let context = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let headers = [("x-request-id", "one"), ("traceparent", context)];
    let answer = cluster.post_bytes(CHAT, body.to_string(), &headers).await;
    assert_eq!(answer.status, 200);
    cluster.wait_for("the line", async || access_lines(&cluster).len() == 1).await;
    let lines = access_lines(&cluster);
    let sent = format!("sent_bytes={}", answer.body.len());
    let received = format!("received_bytes={}", body.to_string().len());
    for said in [
        "request_id=\"one\"",
        "trace_id=4bf92f3577b34da6a3ce929d0e0e4736",
        "endpoint=\"chat_completions\"",
        "model=\"sim\"",
        "stream=true",
        "status=200",
        "outcome=\"served\"",
        "prefill=\"prefill-1\"",
        "decode=\"decode-1\"",
        "retries=0",
        "output_tokens=",
        "prompt_tokens=",
        "cached_tokens=0",
        "queue_seconds=",
        "prefill_seconds=",
        "hand_over_seconds=",
        "first_token_seconds=",
        sent.as_str(),
        received.as_str(),
    ] {
        assert!(lines[0].contains(said), "no {said} in {}", lines[0]);
    }
    let refused = cluster.post_bytes(COMPLETIONS, "{\"prompt\":\"a quick brown fox\"}", &[]).await;
    assert_eq!(refused.status, 400);
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await;
    cluster.wait_for("their lines", async || access_lines(&cluster).len() == 3).await;
    let lines = access_lines(&cluster);
    assert!(lines[1].contains("status=400") && lines[1].contains("outcome=\"client_error\""), "{}", lines[1]);
    assert!(!lines[1].contains("model="), "{}", lines[1]);
    let usage = &answer.json()["usage"];
    for said in [
        format!("prompt_tokens={}", usage["prompt_tokens"]),
        format!("output_tokens={}", usage["completion_tokens"]),
    ] {
        assert!(lines[2].contains(&said), "no {said} in {}", lines[2]);
    }
    assert!(lines.iter().all(|line| !line.contains("quick brown")), "{lines:?}");
    cluster.finish().await;
}

/// The lines that requests have made so far.
fn requests(log: &[String]) -> Vec<Value> {
    let lines = log.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["target"] == "kvbaton::access").collect()
}

async fn put(base: &str, change: &Value) -> Answer {
    let request = http().put(format!("{base}/admin/log")).header("content-type", "application/json");
    Answer::read(request.body(change.to_string())).await
}

#[tokio::test]
async fn json_lines_have_utc_milliseconds_and_the_level_changes_at_run_time() {
    let env = [("KVBATON_LISTEN", "127.0.0.1:0"), ("KVBATON_LOG__FORMAT", "json")];
    let program = Program::start_logging(&[], &env);
    let base = program.url("listens on");
    wait_ready(&base).await;
    wait_registered(&base, 2).await;
    let body = completion(PROMPT, 2);
    assert_eq!(post(&base, COMPLETIONS, &body).await.status, 200);
    let log = program.log_until(|log| requests(log).len() == 1);
    let line = requests(&log).remove(0);
    assert_eq!(
        (&line["level"], &line["status"], &line["model"]),
        (&json!("INFO"), &json!(200), &json!("sim"))
    );
    assert!(line["seconds"].is_number() && line["prompt_tokens"].is_number(), "{line}");
    assert!(line.get("span").is_none() && line.get("trace_id").is_none(), "{line}");
    let time = line["timestamp"].as_str().unwrap();
    let shape: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    assert_eq!(shape, "0000-00-00T00:00:00.000Z", "{time}");

    let now = get(&base, "/admin/log").await;
    assert_eq!((now.status, now.json()), (200, json!({"level": "info", "requests": true})));
    let wrong = put(&base, &json!({"level": "info,verbose,kvbaton=loud"})).await;
    assert_eq!((wrong.status, &wrong.json()["error"]["code"]), (400, &json!("invalid_log_level")));
    let text = wrong.json()["error"]["message"].to_string();
    assert!(text.contains("verbose") && text.contains("kvbaton=loud") && !text.contains("info"), "{text}");
    let unknown = put(&base, &json!({"levle": "info"})).await;
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (400, &json!("invalid_json")));
    assert_eq!(get(&base, "/admin/log").await.json(), json!({"level": "info", "requests": true}));

    let quiet = put(&base, &json!({"requests": false})).await;
    assert_eq!((quiet.status, quiet.json()), (200, json!({"level": "info", "requests": false})));
    assert_eq!(post(&base, COMPLETIONS, &body).await.status, 200);
    let loud = put(&base, &json!({"level": "info,kvbaton_proxy=debug", "requests": true})).await;
    assert_eq!(loud.json(), json!({"level": "info,kvbaton_proxy=debug", "requests": true}));
    assert_eq!(
        post(&base, COMPLETIONS, &completion("the last prompt, which is another one", 2)).await.status,
        200
    );
    // The one in between made no line: the next one is the last request's.
    let log = program.log_until(|log| requests(log).len() == 1);
    let lengths = [completion("the last prompt, which is another one", 2).to_string().len()];
    assert_eq!(
        requests(&log).iter().map(|line| line["received_bytes"].clone()).collect::<Vec<_>>(),
        lengths.map(Value::from)
    );
    assert!(!log.iter().any(|line| line.contains("quick brown") || line.contains("last prompt")), "{log:#?}");
}

//! Bad requests: a clear error in OpenAI's shape, no engine bothered, nothing hanging.

use kvbaton::config::Config;
use serde_json::json;

use crate::support::{CHAT, COMPLETIONS, Cluster, PROMPT, Wire, completion, generations, single_text};

/// These bodies must be refused by the router itself, with this code.
async fn refused(cases: &[(&str, &[u8])]) {
    let cluster = Cluster::builder().start().await;
    for (code, body) in cases {
        for path in [COMPLETIONS, CHAT] {
            let answer = cluster.post_bytes(path, body.to_vec(), &[]).await;
            assert_eq!(answer.status, 400, "{:?}: {answer:?}", String::from_utf8_lossy(body));
            cluster.assert_error(&answer, 400, code);
            assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
        }
    }
    assert_eq!((generations(cluster.p()).len(), generations(cluster.d()).len()), (0, 0));
    cluster.wait_idle().await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    cluster.finish().await;
}

#[tokio::test]
async fn malformed_json_is_refused() {
    refused(&[
        ("invalid_json", b""),
        ("invalid_json", b" \n"),
        ("invalid_json", b"{"),
        ("invalid_json", b"nonsense"),
        ("invalid_json", br#"{"model":"sim","prompt":"a""#),
        ("invalid_json", br#"{"model":"sim","prompt":"a"}}"#),
        ("invalid_json", br#"{"model":"sim","prompt":"a"} {}"#),
        ("invalid_json", br#"{"model":"sim","prompt":"a",}"#),
        ("invalid_json", br#"{"model":"sim" "prompt":"a"}"#),
        ("invalid_json", br#"{'model':'sim'}"#),
        ("invalid_json", br#"{"model":"sim","prompt":"a","temperature":NaN}"#),
        ("invalid_json", br#"{"model":"sim","prompt":"a","temperature":-Infinity}"#),
        ("invalid_json", br#"{"model":"sim","prompt":"a","max_tokens":01}"#),
        ("invalid_json", b"{\"model\":\"sim\",\"prompt\":\"a\nb\"}"),
        ("invalid_json", br#"{"model":"sim","prompt":"\ud8"}"#),
    ])
    .await;
}

#[tokio::test]
async fn bytes_that_are_no_utf8_are_refused() {
    refused(&[
        ("invalid_utf8", b"{\"model\":\"sim\",\"prompt\":\"\xff\"}"),
        ("invalid_utf8", b"{\"model\":\"sim\",\"prompt\":\"\xed\xa0\x80\"}"),
        ("invalid_utf8", b"{\"model\":\"sim\",\"prompt\":\"\xc3\"}"),
    ])
    .await;
}

#[tokio::test]
async fn a_body_that_is_no_object_is_refused() {
    refused(&[
        ("invalid_json", b"[]"),
        ("invalid_json", b"null"),
        ("invalid_json", br#""text""#),
        ("invalid_json", b"17"),
    ])
    .await;
}

#[tokio::test]
async fn a_model_of_a_wrong_type_is_refused() {
    refused(&[
        ("invalid_type", br#"{"model":5,"prompt":"a","messages":[]}"#),
        ("invalid_type", br#"{"model":["sim"],"prompt":"a","messages":[]}"#),
    ])
    .await;
}

#[tokio::test]
async fn a_missing_model_is_refused() {
    refused(&[("model_required", b"{}"), ("model_required", br#"{"prompt":"a","messages":[]}"#)]).await;
}

#[tokio::test]
async fn wrong_types_get_the_engines_own_refusal_and_leave_nothing_behind() {
    let cluster = Cluster::builder().start().await;
    let bodies = [
        r#"{"model":"sim","prompt":"abc","max_tokens":"five"}"#,
        r#"{"model":"sim","prompt":"abc","max_tokens":-3}"#,
        r#"{"model":"sim","prompt":"abc","max_tokens":1.5}"#,
        r#"{"model":"sim","prompt":{"a":1},"max_tokens":2}"#,
        r#"{"model":"sim","prompt":"abc","max_tokens":2,"min_tokens":9}"#,
        r#"{"model":"sim","prompt":"abc","max_tokens":2,"temperature":"hot"}"#,
    ];
    for body in bodies {
        let answer = cluster.post_bytes(COMPLETIONS, body, &[]).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(answer.json()["error"]["message"].is_string(), "{answer:?}");
        cluster.assert_hides_engines(&answer);
    }
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn deep_nesting_neither_overflows_nor_hangs() {
    let cluster = Cluster::builder().start().await;
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
        let depth = 100_000;
        let value = format!("{}1{}", open.repeat(depth), close.repeat(depth));
        let body = format!(r#"{{"model":"sim","prompt":"a","max_tokens":2,"x":{value}}}"#);
        let answer = cluster.post_bytes(COMPLETIONS, body, &[]).await;
        assert_eq!(answer.status, 400, "{answer:?}");
        assert!(answer.json()["error"]["message"].is_string());
    }
    let unclosed = "[".repeat(1 << 20);
    let answer = cluster.post_bytes(COMPLETIONS, unclosed, &[]).await;
    assert_eq!(answer.status, 400, "{answer:?}");
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn an_unknown_model_is_not_found() {
    let cluster = Cluster::builder().start().await;
    for path in [COMPLETIONS, CHAT] {
        let body = json!({"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}]});
        let answer = cluster.post(path, &body).await;
        assert_eq!(answer.status, 404, "{answer:?}");
        let error = answer.json();
        assert!(error["error"]["message"].as_str().unwrap().contains("other"), "{error}");
        cluster.assert_hides_engines(&answer);
    }
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

fn limit(bytes: usize) -> impl Fn(&mut Config) {
    move |config| config.limits.body_bytes = bytes
}

/// A completion whose body has exactly this many bytes.
fn body_of(bytes: usize) -> String {
    let frame = r#"{"model":"sim","max_tokens":2,"prompt":"abc","pad":""}"#;
    frame.replace(r#""pad":"""#, &format!(r#""pad":"{}""#, "x".repeat(bytes - frame.len())))
}

#[tokio::test]
async fn a_body_of_the_limit_is_taken_and_one_more_byte_is_not() {
    let bytes = 256 << 10;
    let cluster = Cluster::builder().config(limit(bytes)).start().await;
    let expected = single_text(COMPLETIONS, &completion("abc", 2)).await;
    let fits = body_of(bytes);
    assert_eq!(fits.len(), bytes);
    assert_eq!(cluster.post_bytes(COMPLETIONS, fits, &[]).await.generated(), expected);
    let answer = cluster.post_bytes(COMPLETIONS, body_of(bytes + 1), &[]).await;
    cluster.assert_error(&answer, 413, "body_too_large");
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("262144"));
    let answer = cluster.post_bytes("/v1/embeddings", body_of(bytes + 1), &[]).await;
    cluster.assert_error(&answer, 413, "body_too_large");
    assert_eq!(generations(cluster.p()).len(), 1);
    cluster.finish().await;
}

#[tokio::test]
async fn a_large_body_passes_below_the_default_limit() {
    let cluster = Cluster::builder().start().await;
    let body = body_of(4 << 20);
    let answer = cluster.post_bytes(COMPLETIONS, body.clone(), &[]).await;
    assert_eq!(answer.generated(), single_text(COMPLETIONS, &completion("abc", 2)).await);
    assert!(generations(cluster.d())[0].body.len() > body.len());
    assert_eq!(cluster.relayed().await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_declared_length_over_the_limit_is_refused_unread() {
    let cluster = Cluster::builder().start().await;
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        (64 << 20) + 1
    );
    let mut wire = Wire::open(cluster.addr, head.as_bytes()).await;
    assert_eq!(wire.head().await.0, 413);
    cluster.finish().await;
}

#[tokio::test]
async fn a_chunked_body_over_the_limit_is_refused() {
    // Engines' registrations must still fit.
    let cluster = Cluster::builder().config(limit(8000)).start().await;
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let mut wire = Wire::open(cluster.addr, head.as_bytes()).await;
    for _ in 0..3 {
        wire.send(&crate::support::chunk(&[b' '; 4000])).await;
    }
    assert_eq!(wire.head().await.0, 413);
    assert_eq!(generations(cluster.p()).len(), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_chunked_body_below_the_limit_is_served() {
    let cluster = Cluster::builder().start().await;
    let body = completion(PROMPT, 6).to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let mut wire = Wire::open(cluster.addr, head.as_bytes()).await;
    let (first, second) = body.as_bytes().split_at(17);
    for piece in [first, second, b""] {
        wire.send(&crate::support::chunk(piece)).await;
    }
    assert_eq!(wire.head().await.0, 200);
    assert_eq!(cluster.relayed().await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_compressed_body_is_refused() {
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post_bytes(COMPLETIONS, "\x1f\x08", &[("content-encoding", "gzip")]).await;
    cluster.assert_error(&answer, 415, "unsupported_content_encoding");
    cluster.finish().await;
}

#[tokio::test]
async fn bytes_that_are_no_http_do_not_disturb_others() {
    let cluster = Cluster::builder().start().await;
    let mut wire = Wire::open(cluster.addr, b"\x16\x03\x01\x02\x00\x01\x00 nonsense\r\n\r\n").await;
    let mut half = Wire::open(cluster.addr, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le").await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    half.send(b"ngth: 2\r\n\r\n{}").await;
    assert_eq!(half.head().await.0, 400);
    assert_eq!(wire.head().await.0, 400);
    cluster.finish().await;
}

#[tokio::test]
async fn a_connection_serves_on_after_an_error() {
    let cluster = Cluster::builder().start().await;
    let mut wire = Wire::connect(cluster.addr).await;
    for (body, expected) in
        [("{", 400), ("good", 200), (r#"{"model":"none","prompt":"a"}"#, 404), ("good", 200)]
    {
        let good = completion(PROMPT, 2).to_string();
        let body = if body == "good" { &good } else { body };
        wire.send(&crate::support::request(COMPLETIONS, &[], body)).await;
        assert_eq!(wire.head().await.0, expected);
        wire.skip_declared_body().await;
    }
    assert_eq!(cluster.relayed().await, 2.0);
    cluster.finish().await;
}

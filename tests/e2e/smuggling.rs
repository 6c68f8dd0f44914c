//! Requests that two servers may read differently, byte by byte, and clients that only take up room.

use std::time::Duration;

use kvbaton::config::{Config, Embedded};

use crate::support::{COMPLETIONS, Cluster, PROMPT, Wire, completion, generations};

/// A request that would be seen if it were taken out of another one's body.
const HIDDEN: &str = "GET /admin/hidden HTTP/1.1\r\nhost: x\r\n\r\n";

fn post(lines: &str, rest: &str) -> String {
    format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{lines}\r\n\r\n{rest}"
    )
}

/// The statuses of everything that comes back until the router closes the connection.
async fn statuses(cluster: &Cluster, bytes: &str) -> Vec<u16> {
    let mut wire = Wire::open(cluster.addr, bytes.as_bytes()).await;
    let answers = wire.everything().await;
    let heads = answers.split("HTTP/1.1 ").skip(1);
    heads.map(|answer| answer[..3].parse().unwrap()).collect()
}

#[tokio::test]
async fn a_request_of_two_lengths_is_refused_and_nothing_after_it_is_read() {
    let cluster = Cluster::builder().start().await;
    let hidden = format!("0\r\n\r\n{HIDDEN}");
    let length = hidden.len();
    for lines in [
        format!("content-length: {length}\r\ntransfer-encoding: chunked"),
        format!("transfer-encoding: chunked\r\ncontent-length: {length}"),
        format!("content-length: {length}\r\ncontent-length: 5"),
        format!("content-length: {length}, 5"),
        format!("content-length: +{length}"),
        "content-length: -1".to_owned(),
        "content-length: 0x10".to_owned(),
        "content-length: 99999999999999999999999".to_owned(),
        "content-length: ".to_owned(),
        "transfer-encoding: chunked\r\ntransfer-encoding: identity".to_owned(),
        "transfer-encoding: identity, chunked".to_owned(),
        "transfer-encoding: xchunked".to_owned(),
        "transfer-encoding: chunked, gzip".to_owned(),
        "transfer-encoding : chunked".to_owned(),
        "transfer-encoding: \u{b}chunked".to_owned(),
        "x: y\r\n transfer-encoding: chunked".to_owned(),
    ] {
        let found = statuses(&cluster, &post(&lines, &hidden)).await;
        assert_eq!(found, [400], "{lines:?}");
    }
    assert_eq!((generations(cluster.p()).len(), generations(cluster.d()).len()), (0, 0));
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    cluster.finish().await;
}

#[tokio::test]
async fn a_malformed_chunk_ends_the_connection() {
    let cluster = Cluster::builder().start().await;
    let body = completion(PROMPT, 2).to_string();
    let length = body.len();
    for chunks in [
        format!("{length:x} {body}\r\n0\r\n\r\n{HIDDEN}"),
        format!("-{length:x}\r\n{body}\r\n0\r\n\r\n{HIDDEN}"),
        format!("fffffffffffffffff\r\n{body}\r\n0\r\n\r\n{HIDDEN}"),
        format!("{length:x}\r\n{body}0\r\n\r\n{HIDDEN}"),
        format!("0x{length:x}\r\n{body}\r\n0\r\n\r\n{HIDDEN}"),
    ] {
        let found = statuses(&cluster, &post("transfer-encoding: chunked", &chunks)).await;
        assert!(found.len() <= 1 && found.iter().all(|status| *status == 400), "{chunks:?}: {found:?}");
    }
    assert_eq!((generations(cluster.p()).len(), generations(cluster.d()).len()), (0, 0));
    cluster.finish().await;
}

#[tokio::test]
async fn what_follows_a_chunked_request_is_not_taken_for_one() {
    let cluster = Cluster::builder().start().await;
    let body = completion(PROMPT, 2).to_string();
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n{HIDDEN}", body.len());
    assert_eq!(statuses(&cluster, &post("transfer-encoding: chunked", &chunked)).await, [200]);
    // After a declared length the connection goes on, as it must.
    let pipelined = post(
        &format!("content-length: {}", body.len()),
        &format!("{body}GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"),
    );
    assert_eq!(statuses(&cluster, &pipelined).await, [200, 200]);
    cluster.finish().await;
}

#[tokio::test]
async fn a_request_for_two_hosts_is_refused() {
    let cluster = Cluster::builder().start().await;
    for head in [
        "GET /livez HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        "GET /livez HTTP/1.1\r\nhost : a\r\n\r\n",
        "GET /livez HTTP/1.1\r\nhost: a\r\nx\0y: b\r\n\r\n",
        "GET /livez HTTP/1.1\r\nhost: a\r\nx: a\rb\r\n\r\n",
        "GET  /livez HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET /livez HTTP/1.1 \r\nhost: a\r\n\r\n",
        "GET /live\0z HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET /livez HTTP/3.7\r\nhost: a\r\n\r\n",
    ] {
        assert_eq!(statuses(&cluster, head).await, [400], "{head:?}");
    }
    let many = "x: y\r\n".repeat(200);
    assert_eq!(statuses(&cluster, &format!("GET /livez HTTP/1.1\r\nhost: a\r\n{many}\r\n")).await, [431]);
    cluster.finish().await;
}

#[tokio::test]
async fn a_header_of_a_client_adds_no_line_to_an_answer() {
    let cluster = Cluster::builder().start().await;
    let ids = ["a%0d%0aset-cookie: x=1", "a\u{1}b", "a, b"];
    for id in ids {
        let head = format!("GET /livez HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\n\r\n");
        let mut wire = Wire::open(cluster.addr, head.as_bytes()).await;
        let (_, head) = wire.head().await;
        assert!(!head.contains("\r\nset-cookie"), "{head}");
        assert_eq!(
            head.matches("x-request-id").count(),
            usize::from(!head.starts_with("http/1.1 400")),
            "{head}"
        );
    }
    cluster.finish().await;
}

async fn program(tune: impl Fn(&mut Config)) -> kvbaton::Running {
    let mut config = Config { listen: "127.0.0.1:0".parse().unwrap(), ..Config::default() };
    config.fleet.embedded = Embedded::Never;
    tune(&mut config);
    config.build().await.unwrap().spawn().await.unwrap()
}

#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let running = program(|config| config.connections.head = Duration::from_millis(300)).await;
    for begun in ["", "GET /livez HT", "GET /livez HTTP/1.1\r\nhost: x\r\nx: "] {
        let mut wire = Wire::open(running.addr(), begun.as_bytes()).await;
        let said = wire.everything().await;
        assert!(!said.contains("200 OK"), "{said}");
    }
    assert!(running.drain().await);
}

#[tokio::test]
async fn connections_beyond_the_bounds_are_closed_at_once() {
    let live = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n";
    for per_address in [true, false] {
        let running = program(|config| {
            let bound =
                if per_address { &mut config.connections.per_address } else { &mut config.connections.most };
            *bound = 2;
        })
        .await;
        let mut first = Wire::open(running.addr(), live).await;
        let mut second = Wire::open(running.addr(), live).await;
        assert_eq!((first.head().await.0, second.head().await.0), (200, 200));
        let mut third = Wire::connect(running.addr()).await;
        assert_eq!(third.everything().await, "");
        drop(first);
        // The place is free once the router has seen the end.
        let end = std::time::Instant::now() + crate::support::SOON;
        loop {
            let mut next = Wire::connect(running.addr()).await;
            if next.try_send(live).await && next.first_head().await.contains("200 OK") {
                break;
            }
            assert!(std::time::Instant::now() < end, "no place became free");
        }
        assert!(running.drain().await);
    }
}

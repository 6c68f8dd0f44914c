//! Pages of other origins: what a browser asks before it sends a request, and what it may read.

use kvbaton::config::Config;

use crate::support::{COMPLETIONS, Cluster, PROMPT, completion};

const PAGE: &str = "https://chat.example.org";
const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn a_page_of_a_listed_origin_asks_and_reads_and_no_other_does() {
    let listed = |config: &mut Config| config.cors.origins = vec![PAGE.to_owned()];
    let cluster = Cluster::builder().config(listed).start().await;
    let ask_first = async |origin: &str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        cluster.send("OPTIONS", COMPLETIONS, &headers, String::new()).await
    };
    let allowed = ask_first(PAGE).await;
    assert_eq!((allowed.status, allowed.header("access-control-allow-origin")), (204, PAGE));
    assert_eq!(allowed.header("access-control-allow-headers"), "authorization,content-type");
    let body = completion(PROMPT, 3).to_string();
    let read = cluster.send("POST", COMPLETIONS, &[JSON, ("origin", PAGE)], body.clone()).await;
    assert_eq!((read.status, read.header("access-control-allow-origin")), (200, PAGE));
    // The short way past the framework and the pages of errors alike.
    let refused = cluster.send("POST", COMPLETIONS, &[JSON, ("origin", PAGE)], "{".to_owned()).await;
    assert_eq!((refused.status, refused.header("access-control-allow-origin")), (400, PAGE));

    let stranger = "https://evil.example.org";
    let denied = ask_first(stranger).await;
    assert_eq!(denied.status, 405);
    let unread = cluster.send("POST", COMPLETIONS, &[JSON, ("origin", stranger)], body).await;
    for answer in [denied, unread] {
        let text = answer.everything();
        assert!(!text.contains("access-control-allow-origin"), "{text}");
    }
    cluster.finish().await;
}

//! The client's side: whole answers and server-sent events.

use std::time::Duration;

use bytes::Bytes;
use reqwest::header::HeaderMap;
use serde_json::Value;

pub(crate) fn http() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().unwrap()
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) async fn read(request: reqwest::RequestBuilder) -> Self {
        let response = request.send().await.expect("the server answers");
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let body = response.bytes().await.expect("the answer is whole");
        Self { status, headers, body }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        super::parse(&self.body)
    }

    /// The only value of a header; the empty text when it is absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        assert!(self.headers.get_all(name).iter().count() <= 1, "{name} is there twice: {self:?}");
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Head and body in one text.
    pub(crate) fn everything(&self) -> String {
        format!("{:?}\n{}", self.headers, String::from_utf8_lossy(&self.body))
    }

    /// The text of the first choice of a successful answer, streamed or not.
    pub(crate) fn generated(&self) -> String {
        assert_eq!(self.status, 200, "{}", self.everything());
        if self.header("content-type").starts_with("text/event-stream") {
            return stream_text(&self.text());
        }
        let body = self.json();
        let choice = &body["choices"][0];
        let text = choice["text"].as_str().or_else(|| choice["message"]["content"].as_str());
        text.unwrap_or_else(|| panic!("no text in {body}")).to_owned()
    }
}

/// The data of the events of a stream.
pub(crate) fn events(stream: &str) -> Vec<String> {
    let data = |event: &str| event.trim_start_matches('\n').strip_prefix("data: ").map(str::to_owned);
    stream.split("\n\n").filter_map(data).collect()
}

/// The text of the first choice, put together from the events; the stream must end with `[DONE]`.
pub(crate) fn stream_text(stream: &str) -> String {
    let mut data = events(stream);
    assert_eq!(data.pop().as_deref(), Some("[DONE]"), "{stream}");
    let mut text = String::new();
    for event in data {
        let event: Value = serde_json::from_str(&event).unwrap();
        let choice = &event["choices"][0];
        text.push_str(choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str()).unwrap_or(""));
    }
    text
}

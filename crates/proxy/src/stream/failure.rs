//! The last event of a stream that cannot go on, as each dialect's clients understand it.

use bytes::Bytes;

use crate::error::Broken;
use crate::json::push_string;
use crate::request::Endpoint;

/// What went wrong, in OpenAI's terms.
#[derive(Clone, Copy, Debug)]
pub struct EventError<'a> {
    /// The class, such as `upstream_error`.
    pub class: &'a str,
    /// The code, such as `upstream_reset`.
    pub code: &'a str,
    /// A sentence for people.
    pub message: &'a str,
}

/// The event. A blank line comes first: the engine may have died inside an event, and what it left of it
/// must not swallow this one. No end mark follows: clients that look for one must not take this for success.
#[must_use]
pub fn error_event(endpoint: Endpoint, error: &EventError<'_>) -> Bytes {
    let quoted = |text: &str| {
        let mut quoted = Vec::with_capacity(text.len() + 2);
        push_string(&mut quoted, text);
        quoted
    };
    let (class, code, message) = (quoted(error.class), quoted(error.code), quoted(error.message));
    let mut event = Vec::with_capacity(256);
    // Clients of this one look at the event's type, those of the others at the member `error`.
    let (before, after): (&[u8], &[u8]) = match endpoint {
        Endpoint::Completions | Endpoint::ChatCompletions => (b"\n\ndata: {", b"}\n\n"),
        Endpoint::Messages => (b"\n\nevent: error\ndata: {\"type\":\"error\",", b"}\n\n"),
        Endpoint::Responses => {
            (b"\n\nevent: error\ndata: {\"type\":\"error\",\"sequence_number\":0,\"param\":null,", b"}\n\n")
        }
    };
    event.extend_from_slice(before);
    if endpoint == Endpoint::Responses {
        for (key, value) in [(&b"\"code\":"[..], &code), (b"\"message\":", &message)] {
            event.extend_from_slice(key);
            event.extend_from_slice(value);
            event.push(b',');
        }
    }
    let error: [&[u8]; 7] = [
        b"\"error\":{\"message\":",
        &message,
        b",\"type\":",
        &class,
        b",\"param\":null,\"code\":",
        &code,
        b"}",
    ];
    error.iter().for_each(|piece| event.extend_from_slice(piece));
    event.extend_from_slice(after);
    Bytes::from(event)
}

pub(super) fn broken_event(endpoint: Endpoint, broken: Broken) -> Bytes {
    let message = match broken {
        Broken::Timeout | Broken::Idle => "The decode engine stopped sending.",
        Broken::Total => "The answer took longer than the router allows.",
        Broken::NoRoom => "The router has no room for more.",
        Broken::Connect | Broken::Reset | Broken::Protocol | Broken::TooLarge => {
            "The decode engine broke off the answer."
        }
    };
    let code = format!("upstream_{}", broken.label());
    error_event(endpoint, &EventError { class: "upstream_error", code: &code, message })
}

pub(super) fn leaving_event(endpoint: Endpoint) -> Bytes {
    let message = "The router is shutting down.";
    error_event(endpoint, &EventError { class: "unavailable_error", code: "shutting_down", message })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(event: &Bytes, before: &str) -> serde_json::Value {
        let text = std::str::from_utf8(event).unwrap();
        let json = text.strip_prefix(before).unwrap().strip_suffix("\n\n").unwrap();
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn item_17_the_error_event_is_one_event_of_json_in_each_dialect() {
        for endpoint in [Endpoint::Completions, Endpoint::ChatCompletions] {
            let value = data(&broken_event(endpoint, Broken::Reset), "\n\ndata: ");
            assert_eq!(value["error"]["type"], "upstream_error");
            assert_eq!(value["error"]["code"], "upstream_reset");
        }
        let value = data(&broken_event(Endpoint::Messages, Broken::Idle), "\n\nevent: error\ndata: ");
        assert_eq!((&value["type"], &value["error"]["code"]), (&"error".into(), &"upstream_idle".into()));
        let value = data(&leaving_event(Endpoint::Responses), "\n\nevent: error\ndata: ");
        assert_eq!((&value["type"], &value["code"]), (&"error".into(), &"shutting_down".into()));
        assert_eq!(value["error"]["code"], "shutting_down");
    }
}

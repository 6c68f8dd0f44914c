//! An engine's event stream on its way to the client, event by event: what it shows of the blocks, and each
//! event as the client gets it. Holds the beginning of an event until its end has come, and nothing else.

use std::sync::{Arc, LazyLock};

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use crate::answer::HAND_OFF;
use crate::error::Broken;
use crate::held::Share;
use crate::request::Endpoint;
use crate::splice::{PromptPart, Told, client_event};

const DONE: &[u8] = b"data: [DONE]";
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static MODEL: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"model\""));
/// An event longer than this holds a token.
const LONGEST_BEGINNING: usize = 16 << 10;

/// What an event stream says of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    Nothing,
    Token,
    Failure,
}

/// One stream.
pub(crate) struct Events {
    endpoint: Endpoint,
    part: Option<PromptPart>,
    /// The client's name for the model, where the engine has another.
    model: Option<Bytes>,
    /// The beginning of an event whose end has not come.
    held: BytesMut,
    share: Arc<Share>,
    longest: usize,
    /// The first event of data has come.
    begun: bool,
    finished: bool,
}

impl Events {
    /// `part` for an answer that is generated from pulled blocks; `longest` is the most that is held of one event.
    pub(crate) fn new(
        endpoint: Endpoint,
        part: Option<PromptPart>,
        share: Arc<Share>,
        longest: usize,
    ) -> Self {
        let held = BytesMut::new();
        Self { endpoint, part, model: None, held, share, longest, begun: false, finished: false }
    }

    /// With the client's name for the model (raw JSON).
    pub(crate) fn naming(mut self, model: Option<Bytes>) -> Self {
        self.model = model;
        self
    }

    /// Takes the stream's next bytes and gives those that may go on, perhaps none, with what they show.
    ///
    /// # Errors
    /// An event is too long to be held, or cannot be shown to the client.
    pub(crate) fn take(&mut self, data: Bytes) -> Result<(Bytes, Sight), Broken> {
        let whole = match (self.held.is_empty(), last_end(&data)) {
            (true, Some(end)) if end == data.len() => data,
            (true, end) => {
                let end = end.unwrap_or(0);
                self.hold(&data[end..])?;
                data.slice(..end)
            }
            (false, _) => {
                self.hold(&data)?;
                match last_end(&self.held) {
                    Some(end) => {
                        let whole = self.held.split_to(end).freeze();
                        let rest = std::mem::take(&mut self.held);
                        self.share.clear();
                        self.hold(&rest)?;
                        whole
                    }
                    None => Bytes::new(),
                }
            }
        };
        let sight = self.look(&whole);
        let sight = match sight {
            Sight::Nothing if self.held.len() > LONGEST_BEGINNING => Sight::Token,
            sight => sight,
        };
        Ok((self.for_client(whole)?, sight))
    }

    /// What is left when the stream has ended in order.
    ///
    /// # Errors
    /// It cannot be shown to the client.
    pub(crate) fn rest(&mut self) -> Result<Bytes, Broken> {
        let rest = std::mem::take(&mut self.held).freeze();
        self.look(&rest);
        self.for_client(rest)
    }

    /// Whether the last event that the dialect knows has come.
    pub(crate) const fn is_finished(&self) -> bool {
        self.finished
    }

    fn hold(&mut self, data: &[u8]) -> Result<(), Broken> {
        if self.held.len() + data.len() > self.longest {
            return Err(Broken::TooLarge);
        }
        if !self.share.grow(data.len()) {
            return Err(Broken::NoRoom);
        }
        self.held.extend_from_slice(data);
        Ok(())
    }

    fn look(&mut self, whole: &[u8]) -> Sight {
        let mut sight = Sight::Nothing;
        let mut rest = whole;
        while !rest.is_empty() {
            let (event, later) = rest.split_at(first_end(rest).unwrap_or(rest.len()));
            rest = later;
            let seen = self.look_at(event.trim_ascii());
            if sight == Sight::Nothing {
                sight = seen;
            }
        }
        sight
    }

    fn look_at(&mut self, event: &[u8]) -> Sight {
        let named = |name: &[u8]| event.strip_prefix(b"event: ").is_some_and(|rest| rest.starts_with(name));
        if event.starts_with(b"data: {\"error\"") || named(b"error") || named(b"response.failed") {
            return Sight::Failure;
        }
        match self.endpoint {
            Endpoint::Completions | Endpoint::ChatCompletions => {
                self.finished |= event == DONE;
                // Chat streams begin with an event that only names the role.
                if !event.starts_with(b"data: ") {
                    return Sight::Nothing;
                }
                let first = !std::mem::replace(&mut self.begun, true);
                let names_role = first && self.endpoint == Endpoint::ChatCompletions;
                if names_role { Sight::Nothing } else { Sight::Token }
            }
            Endpoint::Messages => {
                self.finished |= named(b"message_stop");
                let empty = !event.starts_with(b"event: ") || named(b"message_start") || named(b"ping");
                if empty { Sight::Nothing } else { Sight::Token }
            }
            Endpoint::Responses => {
                let ends = named(b"response.completed") || named(b"response.incomplete");
                self.finished |= ends;
                let line = event.split(|byte| *byte == b'\n').next().unwrap_or_default();
                let token = ends || line.trim_ascii_end().ends_with(b".delta");
                if token { Sight::Token } else { Sight::Nothing }
            }
        }
    }

    fn is_edited(&self, events: &[u8]) -> bool {
        HAND_OFF.find(events).is_some()
            || self.part.is_some() && USAGE.find(events).is_some()
            || self.model.is_some() && MODEL.find(events).is_some()
    }

    fn for_client(&self, whole: Bytes) -> Result<Bytes, Broken> {
        if !self.is_edited(&whole) {
            return Ok(whole);
        }
        let mut shown = BytesMut::with_capacity(whole.len());
        let mut at = 0;
        while at < whole.len() {
            let end = first_end(&whole[at..]).map_or(whole.len(), |end| at + end);
            let event = whole.slice(at..end);
            at = end;
            if self.is_edited(&event) {
                self.edit(&event, &mut shown)?;
            } else {
                shown.extend_from_slice(&event);
            }
        }
        Ok(shown.freeze())
    }

    fn edit(&self, event: &Bytes, shown: &mut BytesMut) -> Result<(), Broken> {
        let secret = HAND_OFF.find(event).is_some();
        let edited = data_line(event).and_then(|(start, end)| {
            let data = event.slice(start..end);
            let told = Told { part: self.part.as_ref(), model: self.model.as_ref() };
            client_event(&data, self.endpoint, told).ok().map(|data| (start, data, end))
        });
        match edited {
            Some((start, data, end)) => {
                shown.extend_from_slice(&event[..start]);
                data.segments().iter().for_each(|segment| shown.extend_from_slice(segment));
                shown.extend_from_slice(&event[end..]);
                Ok(())
            }
            // Nobody can tell what it holds, so nobody gets it.
            None if secret => Err(Broken::Protocol),
            None => {
                shown.extend_from_slice(event);
                Ok(())
            }
        }
    }
}

/// Where the value of an event's only data line is.
fn data_line(event: &[u8]) -> Option<(usize, usize)> {
    let mut found = None;
    let mut at = 0;
    for line in event.split(|byte| *byte == b'\n') {
        if let Some(value) = line.strip_prefix(b"data:") {
            let start = at + line.len() - value.trim_ascii_start().len();
            let end = at + line.trim_ascii_end().len();
            if found.replace((start, end.max(start))).is_some() {
                return None;
            }
        }
        at += line.len() + 1;
    }
    found
}

/// Just after the blank line that ends the first event.
fn first_end(data: &[u8]) -> Option<usize> {
    memchr::memchr_iter(b'\n', data).find_map(|at| ends_after(data, at))
}

/// Just after the blank line that ends the last event.
fn last_end(data: &[u8]) -> Option<usize> {
    memchr::memrchr_iter(b'\n', data).find_map(|at| ends_after(data, at))
}

/// Whether a blank line follows the line that ends at `at`, and where it ends.
fn ends_after(data: &[u8], at: usize) -> Option<usize> {
    match data.get(at + 1..)? {
        [b'\n', ..] => Some(at + 2),
        [b'\r', b'\n', ..] => Some(at + 3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::held::Held;

    fn events(endpoint: Endpoint, cached: Option<u64>) -> Events {
        let part = PromptPart { cached_tokens: cached, ..PromptPart::default() };
        Events::new(endpoint, Some(part), Held::new(1 << 20).share(), 1 << 20)
    }

    /// What the client gets, and what was seen first.
    fn relay(events: &mut Events, pieces: &[&[u8]]) -> (String, Sight) {
        let (mut shown, mut first) = (Vec::new(), Sight::Nothing);
        for piece in pieces {
            let (bytes, sight) = events.take(Bytes::copy_from_slice(piece)).unwrap();
            shown.extend_from_slice(&bytes);
            if first == Sight::Nothing {
                first = sight;
            }
        }
        shown.extend_from_slice(&events.rest().unwrap());
        (String::from_utf8(shown).unwrap(), first)
    }

    #[test]
    fn only_a_token_shows_that_the_blocks_were_read() {
        let first = |endpoint, pieces: &[&[u8]]| relay(&mut events(endpoint, None), pieces).1;
        let (completions, chat) = (Endpoint::Completions, Endpoint::ChatCompletions);
        assert_eq!(first(completions, &[b"data: {\"id\":1}\n\n"]), Sight::Token);
        assert_eq!(first(chat, &[b"data: {\"id\":1}\n\n"]), Sight::Nothing);
        assert_eq!(first(chat, &[b"data: {\"id\":1}\n\n", b"data: {}\n\n"]), Sight::Token);
        assert_eq!(first(chat, &[b"data: {\"id\":1}\n\ndata: {}\n\n"]), Sight::Token);
        assert_eq!(first(completions, &[b"data: ", b"{\"error\": {}}\n", b"\n"]), Sight::Failure);
        assert_eq!(first(chat, &[b"data: {}\n\nda", b"ta: {\"error\":{}}\n\n"]), Sight::Failure);
        assert_eq!(first(completions, &[b": keep-alive\n\n", b"data: {}\n\n"]), Sight::Token);
        assert_eq!(first(completions, &[&[b'x'; LONGEST_BEGINNING + 1]]), Sight::Token);
        let start = b"event: message_start\ndata: {}\n\n";
        assert_eq!(first(Endpoint::Messages, &[start]), Sight::Nothing);
        assert_eq!(
            first(Endpoint::Messages, &[start, b"event: content_block_start\ndata: {}\n\n"]),
            Sight::Token
        );
        assert_eq!(first(Endpoint::Messages, &[start, b"event: error\ndata: {}\n\n"]), Sight::Failure);
        let created = b"event: response.created\ndata: {}\n\nevent: response.output_item.added\ndata: {}\n\n";
        assert_eq!(first(Endpoint::Responses, &[created]), Sight::Nothing);
        assert_eq!(
            first(Endpoint::Responses, &[created, b"event: response.output_text.delta\ndata: {}\n\n"]),
            Sight::Token
        );
    }

    #[test]
    fn the_end_mark_is_known_across_chunks() {
        for (endpoint, mark) in [
            (Endpoint::Completions, "data: {}\n\ndata: [DONE]\n\n"),
            (Endpoint::Messages, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"),
            (Endpoint::Responses, "event: response.completed\r\ndata: {}\r\n\r\n"),
        ] {
            let mut events = events(endpoint, None);
            for byte in mark.as_bytes() {
                assert!(!events.is_finished());
                events.take(Bytes::copy_from_slice(&[*byte])).unwrap();
            }
            assert!(events.is_finished(), "{mark}");
        }
    }

    const CHUNK: &str = "data: {\"usage\":{\"prompt_tokens\":10,\"prompt_tokens_details\":{\"cached_tokens\":10},\"completion_tokens\":2},\"x\":1.50}\n\n";

    #[test]
    fn item_20_the_usage_event_shows_what_p_had_cached_however_it_is_cut() {
        let stream = format!("data: {{\"a\":\"\u{e9}\"}}\n\n{CHUNK}data: [DONE]\n\n");
        let expected = stream.replace("\"cached_tokens\":10", "\"cached_tokens\":4");
        for size in 1..=stream.len() {
            let pieces: Vec<&[u8]> = stream.as_bytes().chunks(size).collect();
            let shown = relay(&mut events(Endpoint::ChatCompletions, Some(4)), &pieces).0;
            assert_eq!(shown, expected, "pieces of {size}");
        }
    }

    #[test]
    fn item_20_without_ps_count_ds_is_left_out() {
        let shown = relay(&mut events(Endpoint::Completions, None), &[CHUNK.as_bytes()]).0;
        assert_eq!(shown, CHUNK.replace("{\"cached_tokens\":10}", "{}"));
    }

    #[test]
    fn item_20_usage_of_the_other_dialects() {
        let message = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":0,\"output_tokens\":0,\"cache_read_input_tokens\":10}}}\n\nevent: message_delta\ndata: {\"usage\":{\"input_tokens\":1,\"output_tokens\":2,\"cache_read_input_tokens\":9,\"cache_creation_input_tokens\":0}}\n\n";
        let shown = relay(&mut events(Endpoint::Messages, Some(4)), &[message.as_bytes()]).0;
        let expected = message
            .replace(
                "\"input_tokens\":0,\"output_tokens\":0,\"cache_read_input_tokens\":10",
                "\"input_tokens\":6,\"output_tokens\":0,\"cache_read_input_tokens\":4",
            )
            .replace(
                "\"input_tokens\":1,\"output_tokens\":2,\"cache_read_input_tokens\":9",
                "\"input_tokens\":6,\"output_tokens\":2,\"cache_read_input_tokens\":4",
            );
        assert_eq!(shown, expected);
        let response = "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":10,\"input_tokens_details\":{\"cache_write_tokens\":0,\"cached_tokens\":10}},\"kv_transfer_params\":{\"remote_host\":\"10.0.0.1\"},\"user\":null}}\n\n";
        let shown = relay(&mut events(Endpoint::Responses, Some(4)), &[response.as_bytes()]).0;
        let expected = "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":10,\"input_tokens_details\":{\"cache_write_tokens\":0,\"cached_tokens\":4}},\"user\":null}}\n\n";
        assert_eq!(shown, expected);
    }

    #[test]
    fn item_20_a_recorded_stream_of_a_message() {
        let stream = include_str!("../../../../tests/fixtures/captures/messages_stream.D.resp.sse");
        for size in [1, 7, 100, stream.len()] {
            let pieces: Vec<&[u8]> = stream.as_bytes().chunks(size).collect();
            let mut same = events(Endpoint::Messages, Some(128));
            assert_eq!(relay(&mut same, &pieces), (stream.to_owned(), Sight::Token));
            assert!(same.is_finished());
            let shown = relay(&mut events(Endpoint::Messages, Some(0)), &pieces).0;
            let counted = r#""usage":{"input_tokens":150,"output_tokens":8,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}"#;
            assert!(shown.contains(counted), "{shown}");
        }
    }

    #[test]
    fn no_hand_off_leaves_in_a_stream() {
        let mut relayed = events(Endpoint::Completions, None);
        let shown = relay(&mut relayed, &[b"data: {\"a\":1,\"kv_transfer_params\":null}\n\n"]).0;
        assert_eq!(shown, "data: {\"a\":1}\n\n");
        let twisted = Bytes::from_static(b"data: {\"kv_transfer_params\":\ndata: 1}\n\n");
        assert_eq!(events(Endpoint::Completions, None).take(twisted), Err(Broken::Protocol));
    }

    #[test]
    fn what_is_held_is_bounded() {
        let mut small = Events::new(Endpoint::Completions, None, Held::new(64).share(), 8);
        assert_eq!(small.take(Bytes::from_static(b"data: 123")), Err(Broken::TooLarge));
        let held = Held::new(4);
        let mut poor = Events::new(Endpoint::Completions, None, held.share(), 64);
        assert_eq!(poor.take(Bytes::from_static(b"data: ")), Err(Broken::NoRoom));
        assert_eq!(held.bytes(), 0);
    }
}

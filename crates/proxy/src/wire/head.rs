//! The heads of both directions: a request's as bytes, an answer's read out of them.

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Method, StatusCode, Version, response};

use super::{Outgoing, WireError};

/// Most headers of an answer.
const MOST_HEADERS: usize = 100;

/// How the end of an answer's body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// After so many bytes.
    Length(u64),
    /// By its own marks.
    Chunked,
    /// Where the connection ends.
    UntilClose,
}

/// An answer's head.
pub(super) struct Head {
    pub(super) parts: response::Parts,
    pub(super) framing: Framing,
    /// Whether another exchange may follow on the connection.
    pub(super) keeps: bool,
    /// Its length in bytes.
    pub(super) length: usize,
}

/// A request's head, with the headers that the connection needs.
pub(super) fn encode(request: &Outgoing<'_>) -> Result<Vec<u8>, WireError> {
    let is_target = |part: &str| part.bytes().all(|byte| byte.is_ascii_graphic() || byte >= 0x80);
    if !is_target(request.prefix) || !request.path.starts_with('/') || !is_target(request.path) {
        return Err(WireError::Target);
    }
    let mut head = Vec::with_capacity(768);
    let mut put = |pieces: &[&[u8]]| pieces.iter().for_each(|piece| head.extend_from_slice(piece));
    let (method, host) = (request.method.as_str().as_bytes(), request.place.host().as_bytes());
    let (prefix, path) = (request.prefix.as_bytes(), request.path.as_bytes());
    put(&[method, b" ", prefix, path, b" HTTP/1.1\r\nhost: ", host, b"\r\n"]);
    for (name, value) in request.headers {
        put(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
    }
    if !request.body.is_empty() || *request.method == Method::POST {
        put(&[b"content-length: ", request.body.len().to_string().as_bytes(), b"\r\n"]);
    }
    put(&[b"\r\n"]);
    Ok(head)
}

/// Reads an answer's head; none while it is not whole. Interim answers are for the caller to pass over.
pub(super) fn parse(bytes: &[u8], method: &Method) -> Result<Option<Head>, WireError> {
    let mut headers = [const { MaybeUninit::<httparse::Header<'_>>::uninit() }; MOST_HEADERS];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let length = match config.parse_response_with_uninit_headers(&mut parsed, bytes, &mut headers) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(WireError::Protocol),
    };
    let malformed = |_| WireError::Protocol;
    // One copy that the values are slices of.
    let shared = Bytes::copy_from_slice(&bytes[..length]);
    let start = bytes.as_ptr().addr();
    let mut map = HeaderMap::with_capacity(parsed.headers.len());
    for header in parsed.headers.iter() {
        let name = HeaderName::from_bytes(header.name.as_bytes()).map_err(|_| WireError::Protocol)?;
        let value = if header.value.is_empty() {
            HeaderValue::from_static("")
        } else {
            let at = header.value.as_ptr().addr() - start;
            HeaderValue::from_maybe_shared(shared.slice(at..at + header.value.len())).map_err(malformed)?
        };
        map.append(name, value);
    }
    let status = StatusCode::from_u16(parsed.code.unwrap_or(0)).map_err(|_| WireError::Protocol)?;
    let version = if parsed.version == Some(1) { Version::HTTP_11 } else { Version::HTTP_10 };
    let framing = framing(status, &map, method)?;
    let keeps = framing != Framing::UntilClose && keeps_alive(version, &map);
    let (mut parts, ()) = http::Response::new(()).into_parts();
    (parts.status, parts.version, parts.headers) = (status, version, map);
    Ok(Some(Head { parts, framing, keeps, length }))
}

fn framing(status: StatusCode, headers: &HeaderMap, method: &Method) -> Result<Framing, WireError> {
    let bodiless = matches!(status.as_u16(), 100..=199 | 204 | 304);
    if bodiless || *method == Method::HEAD {
        return Ok(Framing::Length(0));
    }
    if let Some(coding) = headers.get_all(TRANSFER_ENCODING).iter().next_back() {
        let last = coding.as_bytes().rsplit(|byte| *byte == b',').next().unwrap_or_default();
        let chunked = last.trim_ascii().eq_ignore_ascii_case(b"chunked");
        return Ok(if chunked { Framing::Chunked } else { Framing::UntilClose });
    }
    let mut length = None;
    for value in headers.get_all(CONTENT_LENGTH) {
        let said = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let said = said.and_then(|text| text.parse::<u64>().ok()).ok_or(WireError::Protocol)?;
        if length.is_some_and(|length| length != said) {
            return Err(WireError::Protocol);
        }
        length = Some(said);
    }
    Ok(length.map_or(Framing::UntilClose, Framing::Length))
}

fn keeps_alive(version: Version, headers: &HeaderMap) -> bool {
    let says = |word: &[u8]| {
        let mut options = headers
            .get_all(CONNECTION)
            .iter()
            .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
            .map(<[u8]>::trim_ascii);
        options.any(|option| option.eq_ignore_ascii_case(word))
    };
    if version == Version::HTTP_11 { !says(b"close") } else { says(b"keep-alive") }
}

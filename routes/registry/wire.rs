//! The bodies that engines send and get, in JSON with base64 or in msgpack with the bytes.
//! Strict: a field that is not known here is refused by its name.

use std::fmt;
use std::io::Cursor;

use axum::body::Bytes;
use axum::extract::Request;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kvbaton_proxy::{
    AboutEngine, ClockReading, Echo, EngineRole, EngineState, EngineTraits, EngineView, Heartbeat,
    RankPayload, Registration, TransferMode, Writer,
};
use serde::de::{self, DeserializeOwned, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::accept::{JSON, MSGPACK, body_type};
use crate::error::RouteError;
use crate::extract::{BodyBound, check_not_encoded, parse_json, read_body};
use crate::strict::{Fields, Named};

/// Reads a body of either form.
pub(super) async fn read_structured<T: DeserializeOwned>(
    request: Request,
    bound: BodyBound,
) -> Result<T, RouteError> {
    let (parts, body) = request.into_parts();
    let is =
        |media_type: &str| body_type(&parts.headers).is_some_and(|is| is.eq_ignore_ascii_case(media_type));
    let (json, msgpack) = (is(JSON), is(MSGPACK));
    if !json && !msgpack {
        return Err(RouteError::ContentType { expected: "application/json or application/msgpack" });
    }
    check_not_encoded(&parts.headers)?;
    let bytes = read_body(&parts.headers, body, bound).await?;
    let Fields(value) = if json { parse_json(&bytes)? } else { parse_msgpack(&bytes)? };
    Ok(value)
}

/// What a body says as a registration and as a sign of life, in words; none where it is neither.
#[cfg(fuzzing)]
#[must_use]
pub fn read_any(bytes: &[u8], is_json: bool) -> [Option<String>; 2] {
    fn read<T: DeserializeOwned + fmt::Debug>(bytes: &[u8], is_json: bool) -> Option<String> {
        let Fields(value): Fields<T> =
            if is_json { parse_json(bytes).ok()? } else { parse_msgpack(bytes).ok()? };
        Some(format!("{value:?}"))
    }
    [read::<RegisterBody>(bytes, is_json), read::<HeartbeatBody>(bytes, is_json)]
}

fn parse_msgpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RouteError> {
    let mut reader = rmp_serde::Deserializer::new(Cursor::new(bytes));
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = Some(error.path().to_string()).filter(|path| path != "." && path != "?");
        RouteError::Msgpack { path, what: error.into_inner().to_string() }
    })?;
    if reader.get_ref().position() != bytes.len() as u64 {
        return Err(RouteError::Msgpack { path: None, what: "bytes follow the value".to_owned() });
    }
    Ok(value)
}

/// An engine with its ranks.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RegisterBody {
    base_url: Option<String>,
    role: Option<Named<EngineRole>>,
    model: Option<String>,
    dp_rank: Option<u32>,
    vllm_version: Option<String>,
    tp_size: Option<u32>,
    pp_size: Option<u32>,
    dcp_size: Option<u32>,
    transfer_mode: Option<Named<TransferMode>>,
    kv_heads: Option<u32>,
    is_mla: Option<bool>,
    permute_received: Option<bool>,
    hma_required: Option<bool>,
    host_buffer: Option<bool>,
    enforce_compat: Option<bool>,
    nixl_version: Option<String>,
    side_channel_host: Option<String>,
    side_channel_port: Option<u16>,
    #[serde(default)]
    state: Named<EngineState>,
    ttl_seconds: Option<f64>,
    clock: Option<f64>,
    ranks: Option<Vec<Fields<RankBody>>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RankBody {
    pp_rank: u32,
    tp_rank: u32,
    payload: Payload,
}

impl RegisterBody {
    pub(super) fn into_registration(self, engine_id: String, writer: Writer) -> Registration {
        let rank = |Fields(rank): Fields<RankBody>| RankPayload {
            pp_rank: rank.pp_rank,
            tp_rank: rank.tp_rank,
            payload: rank.payload.0,
        };
        Registration {
            engine_id,
            writer,
            base_url: self.base_url,
            role: self.role.map(|Named(role)| role),
            model: self.model,
            dp_rank: self.dp_rank.unwrap_or(0),
            vllm_version: self.vllm_version,
            traits: EngineTraits {
                tp_size: self.tp_size,
                pp_size: self.pp_size,
                dcp_size: self.dcp_size,
                transfer_mode: self.transfer_mode.map(|Named(mode)| mode),
                kv_heads: self.kv_heads,
                is_mla: self.is_mla,
                permute_received: self.permute_received,
                hma_required: self.hma_required,
                host_buffer: self.host_buffer,
                enforce_compat: self.enforce_compat,
                nixl_version: self.nixl_version,
                side_channel_host: self.side_channel_host,
                side_channel_port: self.side_channel_port,
            },
            state: self.state.0,
            ttl_seconds: self.ttl_seconds,
            clock: self.clock,
            ranks: self.ranks.map(|ranks| ranks.into_iter().map(rank).collect()),
        }
    }
}

/// A sign of life.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeartbeatBody {
    state: Option<Named<EngineState>>,
    clock: Option<f64>,
    echo: Option<Fields<EchoBody>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EchoBody {
    router_clock: f64,
    received: f64,
}

impl From<HeartbeatBody> for Heartbeat {
    fn from(body: HeartbeatBody) -> Self {
        let echo =
            body.echo.map(|Fields(echo)| Echo { router_clock: echo.router_clock, received: echo.received });
        Self { state: body.state.map(|Named(state)| state), clock: body.clock, echo }
    }
}

/// Bytes, or their base64 where the form has no bytes.
#[derive(Debug)]
struct Payload(Bytes);

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PayloadVisitor)
    }
}

struct PayloadVisitor;

impl Visitor<'_> for PayloadVisitor {
    type Value = Payload;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes, in JSON as base64")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Payload, E> {
        let bytes = STANDARD.decode(text).map_err(|error| E::custom(format_args!("not base64: {error}")))?;
        Ok(Payload(bytes.into()))
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Payload, E> {
        Ok(Payload(Bytes::copy_from_slice(bytes)))
    }

    fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Payload, E> {
        Ok(Payload(bytes.into()))
    }
}

/// An engine with the payloads of all its ranks, as peers get it.
#[derive(Debug, Serialize)]
pub(super) struct EnginePayloads<'a> {
    #[serde(flatten)]
    about: &'a AboutEngine,
    clock: Option<ClockReading>,
    ranks: Vec<RankPayloadView<'a>>,
}

#[derive(Debug, Serialize)]
struct RankPayloadView<'a> {
    pp_rank: u32,
    tp_rank: u32,
    #[serde(serialize_with = "as_bytes")]
    payload: &'a [u8],
}

fn as_bytes<S: Serializer>(bytes: &&[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

impl<'a> EnginePayloads<'a> {
    pub(super) fn new(view: &'a EngineView) -> Self {
        let ranks = view.ranks.iter();
        let ranks = ranks.map(|rank| RankPayloadView {
            pp_rank: rank.pp_rank,
            tp_rank: rank.tp_rank,
            payload: &rank.payload,
        });
        Self { about: &view.about, clock: view.clock, ranks: ranks.collect() }
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>, RouteError> {
        rmp_serde::to_vec_named(self).map_err(|error| {
            tracing::error!(%error, "an engine cannot be written");
            RouteError::Unexpected
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn msgpack(value: &serde_json::Value) -> Vec<u8> {
        rmp_serde::to_vec_named(value).unwrap()
    }

    #[test]
    fn a_field_that_is_not_known_is_named_in_either_form() {
        let value = json!({"model": "m", "rolle": "prefill"});
        let json = parse_json::<RegisterBody>(value.to_string().as_bytes()).unwrap_err();
        assert!(json.what.contains("`rolle`"), "{}", json.what);
        let Err(RouteError::Msgpack { what, .. }) = parse_msgpack::<RegisterBody>(&msgpack(&value)) else {
            panic!("taken");
        };
        assert!(what.contains("`rolle`"), "{what}");
    }

    #[test]
    fn a_payload_that_is_not_base64_is_found() {
        let body = br#"{"ranks": [{"pp_rank": 0, "tp_rank": 0, "payload": "?"}]}"#;
        let fault = parse_json::<RegisterBody>(body).unwrap_err();
        assert_eq!(fault.path.as_deref(), Some("ranks[0].payload"));
    }

    /// Where the fault is, in either form.
    fn faults(value: &serde_json::Value) -> [Option<String>; 2] {
        let json = parse_json::<Fields<RegisterBody>>(value.to_string().as_bytes()).unwrap_err().path;
        let Err(RouteError::Msgpack { path, .. }) = parse_msgpack::<Fields<RegisterBody>>(&msgpack(value))
        else {
            panic!("{value} is taken");
        };
        [json, path]
    }

    #[test]
    fn names_are_taken_by_name_only_in_either_form() {
        for field in ["role", "transfer_mode", "state"] {
            for value in [json!(0), json!(1), json!({"ready": null}), json!("Ready"), json!([0]), json!(true)]
            {
                let at = Some(field.to_owned());
                assert_eq!(faults(&json!({field: value})), [at.clone(), at], "{value}");
            }
        }
        let sign = parse_msgpack::<Fields<HeartbeatBody>>(&msgpack(&json!({"state": 0})));
        assert!(matches!(sign, Err(RouteError::Msgpack { .. })));
    }

    #[test]
    fn lists_are_no_records_in_either_form() {
        assert_eq!(faults(&json!([null, null])), [None, None]);
        let at = Some("ranks[0]".to_owned());
        assert_eq!(faults(&json!({"ranks": [[0, 0, "AA=="]]})), [at.clone(), at]);
        let body = msgpack(&json!({"echo": [1.0, 2.0]}));
        assert!(matches!(parse_msgpack::<Fields<HeartbeatBody>>(&body), Err(RouteError::Msgpack { .. })));
    }

    #[test]
    fn msgpack_ends_where_it_ends() {
        let mut bytes = msgpack(&json!({"state": "draining", "clock": 7}));
        let heartbeat: HeartbeatBody = parse_msgpack(&bytes).unwrap();
        let expected = Heartbeat { state: Some(EngineState::Draining), clock: Some(7.0), echo: None };
        assert_eq!(Heartbeat::from(heartbeat), expected);
        bytes.push(0xc0);
        assert!(matches!(parse_msgpack::<HeartbeatBody>(&bytes), Err(RouteError::Msgpack { .. })));
        let cut = &bytes[..bytes.len() - 2];
        assert!(matches!(parse_msgpack::<HeartbeatBody>(cut), Err(RouteError::Msgpack { .. })));
    }
}

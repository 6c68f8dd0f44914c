use std::collections::BTreeSet;

use http_body_util::BodyExt;
use kvbaton_proxy::{
    BadRequest, Broken, Busy, BusyReason, BusyScope, FieldProblem, HandOffRefusal, Progress, Proxy, Settings,
    Stage, TooManyViewers, UpstreamFailure,
};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::*;

fn upstream(stage: Stage, broken: Broken) -> RouteError {
    ProxyError::Upstream(UpstreamFailure::new(stage, broken, Progress::Sent)).into()
}

fn bad_request(bad: BadRequest) -> RouteError {
    ProxyError::BadRequest(bad).into()
}

fn hand_off(refusal: HandOffRefusal) -> RouteError {
    ProxyError::HandOff(refusal).into()
}

fn busy(scope: BusyScope, reason: BusyReason) -> RouteError {
    ProxyError::Busy(Busy { scope, reason, after: std::time::Duration::from_millis(1200) }).into()
}

#[tokio::test]
async fn nobody_is_told_to_come_too_early() {
    let response = busy(BusyScope::Key, BusyReason::Full).into_response();
    assert_eq!(response.headers()[RETRY_AFTER], "2");
}

fn from_admission() -> Vec<(RouteError, u16, &'static str)> {
    let too_many = BadRequest::TooManyTokens { field: "max_tokens", limit: 1 };
    vec![
        (busy(BusyScope::Stage(Stage::Prefill), BusyReason::Full), 429, "prefill_saturated"),
        (busy(BusyScope::Stage(Stage::Decode), BusyReason::Full), 429, "decode_saturated"),
        (busy(BusyScope::Model, BusyReason::Full), 429, "model_saturated"),
        (busy(BusyScope::Key, BusyReason::Full), 429, "key_saturated"),
        (busy(BusyScope::Key, BusyReason::Rate), 429, "rate_limit_exceeded"),
        (busy(BusyScope::Stage(Stage::Decode), BusyReason::Late), 429, "queue_timeout"),
        (bad_request(too_many), 400, "max_tokens_too_large"),
        (bad_request(BadRequest::PromptTooLarge { bytes: 2, limit: 1 }), 400, "prompt_too_large"),
        (bad_request(BadRequest::Priority), 400, "invalid_priority"),
    ]
}

fn from_the_core() -> Vec<(RouteError, u16, &'static str)> {
    let wrong_type = BadRequest::WrongType { field: "model", expected: "a string" };
    vec![
        (bad_request(BadRequest::Utf8 { offset: 3 }), 400, "invalid_utf8"),
        (bad_request(BadRequest::NotAnObject), 400, "invalid_json"),
        (bad_request(BadRequest::MissingModel), 400, "model_required"),
        (bad_request(wrong_type), 400, "invalid_type"),
        (
            bad_request(BadRequest::InjectedHandOff { place: "kv_transfer_params" }),
            400,
            "kv_transfer_params_not_allowed",
        ),
        (bad_request(BadRequest::TooManyEdits { limit: 1 }), 400, "too_many_repeated_fields"),
        (ProxyError::NoPeer(Stage::Prefill).into(), 503, "no_prefill"),
        (ProxyError::NoPeer(Stage::Decode).into(), 503, "no_decode"),
        (ProxyError::NoCompatiblePair.into(), 503, "no_compatible_pair"),
        (upstream(Stage::Decode, Broken::Connect), 502, "upstream_connect"),
        (upstream(Stage::Prefill, Broken::Reset), 502, "upstream_reset"),
        (upstream(Stage::Prefill, Broken::Timeout), 504, "upstream_timeout"),
        (upstream(Stage::Decode, Broken::Idle), 504, "upstream_idle"),
        (upstream(Stage::Decode, Broken::Total), 504, "upstream_total"),
        (upstream(Stage::Decode, Broken::NoRoom), 503, "no_room"),
        (ProxyError::ShuttingDown.into(), 503, "shutting_down"),
        (upstream(Stage::Decode, Broken::Protocol), 502, "upstream_protocol"),
        (upstream(Stage::Decode, Broken::TooLarge), 502, "upstream_too_large"),
        (ProxyError::PrefillFailed(500).into(), 502, "prefill_failed"),
        (hand_off(HandOffRefusal::Missing), 502, "no_hand_off"),
        (hand_off(HandOffRefusal::Garbage), 502, "bad_handoff"),
        (hand_off(HandOffRefusal::TokenCount(Some(2))), 502, "bad_handoff"),
        (hand_off(HandOffRefusal::Coverage { covered: 9, prompt: 8 }), 502, "bad_handoff"),
        (hand_off(HandOffRefusal::NoPromptLogprobs), 502, "bad_handoff"),
        (hand_off(HandOffRefusal::Expiring), 502, "hand_off_expired"),
    ]
}

fn from_operators(malformed: RegistryError) -> Vec<(RouteError, u16, &'static str)> {
    let text = String::new;
    vec![
        (malformed.into(), 400, "malformed_payload"),
        (RegistryError::EngineMismatch { found: text() }.into(), 409, "engine_id_mismatch"),
        (RegistryError::TooLarge { limit: 1 }.into(), 413, "body_too_large"),
        (RegistryError::Full.into(), 507, "registry_full"),
        (
            RegistryError::Invalid { field: "clock", problem: FieldProblem::NotFinite }.into(),
            400,
            "invalid_registration",
        ),
        (RegistryError::UnknownEngine { engine_id: text() }.into(), 404, "unknown_engine"),
        (RegistryError::TooManyWatchers { limit: 1 }.into(), 503, "too_many_watchers"),
        (TooManyViewers { limit: 1 }.into(), 503, "too_many_watchers"),
        (RegistryError::EngineIdTaken { engine_id: text() }.into(), 409, "engine_id_taken"),
        (RegistryError::AddressTaken { holder: text() }.into(), 409, "address_taken"),
        (RegistryError::Contended { engine_id: text() }.into(), 409, "registration_contended"),
        (RegistryError::StoreUnavailable.into(), 503, "store_unavailable"),
        (RouteError::EngineNotReady { engine_id: text() }, 409, "engine_not_ready"),
        (PeerSpecError::Url { url: text() }.into(), 400, "invalid_peer"),
        (PeerSpecError::Scheme { url: text() }.into(), 400, "invalid_peer"),
        (PeerSpecError::Ranks.into(), 400, "invalid_peer"),
        (PeerSpecError::Token.into(), 400, "invalid_peer"),
        (PeerSpecError::Name { name: text() }.into(), 400, "invalid_peer"),
        (PeerSpecError::Exists { id: text() }.into(), 409, "peer_exists"),
        (RouteError::UnknownPeer { id: text() }, 404, "unknown_peer"),
        (RouteError::UnknownRequest { id: text() }, 404, "unknown_request"),
        (RouteError::UnknownFile { name: text() }, 404, "unknown_file"),
        (RouteError::UnknownEngine { engine_id: text() }, 404, "unknown_engine"),
        (RouteError::UnknownRank { engine_id: text(), pp_rank: 0, tp_rank: 0 }, 404, "unknown_rank"),
        (RouteError::RankInvalid { name: "pp_rank" }, 400, "invalid_rank"),
        (RouteError::NotLocal(NotLocal::Address), 403, "not_local"),
        (RouteError::TokenMissing, 401, "token_required"),
        (RouteError::TokenWrong, 401, "token_wrong"),
        (RegistryError::NotOwner { engine_id: text() }.into(), 403, "not_owner"),
        (RegistryError::AddressReserved { base_url: text() }.into(), 403, "address_reserved"),
        (RegistryError::ModelNotAllowed { model: text() }.into(), 403, "model_not_allowed"),
    ]
}

fn from_the_surface() -> Vec<(RouteError, u16, &'static str)> {
    vec![
        (RouteError::UnknownPath, 404, "unknown_endpoint"),
        (RouteError::MethodNotAllowed, 405, "method_not_allowed"),
        (RouteError::BodyTooLarge { limit: 1 }, 413, "body_too_large"),
        (RouteError::NoRoom, 503, "no_room"),
        (RouteError::Refused { said: Bytes::new() }, 502, "engine_refused"),
        (RouteError::BodyTimeout, 408, "body_timeout"),
        (RouteError::BodyIncomplete, 400, "body_incomplete"),
        (RouteError::ContentEncoding, 415, "unsupported_content_encoding"),
        (RouteError::ContentType { expected: "x/y" }, 415, "unsupported_content_type"),
        (RouteError::Msgpack { path: None, what: String::new() }, 400, "invalid_msgpack"),
        (RouteError::Query { what: String::new() }, 400, "invalid_query"),
        (RouteError::PathNotUtf8, 400, "invalid_path"),
        (RouteError::KeyMissing, 401, "invalid_api_key"),
        (RouteError::KeyWrong, 401, "invalid_api_key"),
        (RouteError::LogNotOurs, 409, "log_not_adjustable"),
        (RouteError::Log(LogFault("wrong".into())), 400, "invalid_log_level"),
        (RouteError::NotReloadable, 409, "not_reloadable"),
        (RouteError::NotReloaded(NotReloaded("wrong".into())), 400, "invalid_settings"),
        (RouteError::Loop, 508, "loop_detected"),
        (RouteError::Ambiguous, 400, "ambiguous_request"),
        (ProxyError::ModelDenied { model: "m".into() }.into(), 404, "model_not_found"),
        (RouteError::UnknownModel { id: String::new() }, 404, "model_not_found"),
        (RouteError::Unexpected, 500, "internal_error"),
    ]
}

/// Every error that a client can see, with what it sees.
fn every_error() -> Vec<(RouteError, u16, &'static str)> {
    let stop = CancellationToken::new();
    let proxy = Proxy::start(Settings::default(), TaskTracker::new(), stop.clone());
    let malformed = proxy.registry().put("e", 0, 0, Bytes::new()).unwrap_err();
    stop.cancel();
    [from_the_core(), from_admission(), from_operators(malformed), from_the_surface()].concat()
}

#[tokio::test]
async fn each_error_has_its_status_and_code() {
    for (error, status, code) in every_error() {
        let response = error.clone().into_response();
        assert_eq!(response.status().as_u16(), status, "{error:?}");
        let must_wait = response.headers().contains_key(RETRY_AFTER);
        assert_eq!(must_wait, matches!(status, 429 | 503), "{error:?}");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["error"]["code"], code, "{error:?}");
    }
}

#[tokio::test]
async fn the_contract_names_exactly_the_codes_that_exist() {
    let contract: serde_json::Value = serde_yaml_ng::from_str(include_str!("../../openapi.yaml")).unwrap();
    let member = |name: &str| format!("/components/schemas/Error/properties/error/properties/{name}/enum");
    let named: BTreeSet<&str> = contract
        .pointer(&member("code"))
        .unwrap()
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|code| code.as_str())
        .collect();
    let errors = every_error();
    let existing: BTreeSet<&str> = errors.iter().map(|(_, _, code)| *code).collect();
    assert_eq!(named, existing);
}

/// Each code is the heading of a section, which is its anchor, with a status, a cause and a cure.
#[tokio::test]
async fn each_code_has_its_place_among_the_troubles() {
    let page = include_str!("../../docs/troubleshooting.md");
    let mut sections = std::collections::BTreeMap::new();
    for section in page.split("\n#### ").skip(1) {
        let (code, text) = section.split_once('\n').unwrap();
        let text = text.split("\n#").next().unwrap().trim().to_owned();
        assert!(sections.insert(code, text).is_none(), "{code} is there twice");
    }
    let errors = every_error();
    for (_, status, code) in &errors {
        let text = sections.get(code).unwrap_or_else(|| panic!("{code} is not in docs/troubleshooting.md"));
        assert!(text.starts_with(&format!("{status}. ")), "{code} has another status there: {text}");
        assert!(text.matches(". ").count() + text.matches(".\n").count() >= 2, "{code} lacks a cure: {text}");
    }
    let existing: BTreeSet<&str> = errors.iter().map(|(_, _, code)| *code).collect();
    assert_eq!(sections.into_keys().collect::<BTreeSet<_>>(), existing);
}

#[test]
fn what_a_client_reads_of_an_engine_is_its_leg_and_no_more() {
    let face = upstream(Stage::Prefill, Broken::Connect).face();
    assert_eq!(face.message.as_deref(), Some("the prefill engine could not be reached"));
    let face = hand_off(HandOffRefusal::TokenCount(Some(7))).face();
    assert_eq!(face.message.as_deref(), Some("the prefill engine returned an unusable KV hand-off"));
}

//! Any bytes as a client's request: the scanner's verdict is serde_json's, and both legs are JSON again.
#![no_main]

use bytes::Bytes;
use kvbaton_proxy::json::{JsonFaultKind, members};
use kvbaton_proxy::request::{BadRequest, ClientRequest, Endpoint, InjectedHandOff, pass_through_body};
use kvbaton_proxy::splice::{Spliced, answer_without_hand_off};
use libfuzzer_sys::fuzz_target;
use serde_json::value::RawValue;

fn is_object(bytes: &[u8]) -> bool {
    let first = bytes.iter().find(|byte| !b" \n\t\r".contains(byte));
    first == Some(&b'{') && serde_json::from_slice::<&RawValue>(bytes).is_ok()
}

fn checked(body: Spliced) -> Bytes {
    let length = body.len();
    let bytes = body.into_bytes();
    assert_eq!(bytes.len() as u64, length, "the stated length is the length");
    assert!(is_object(&bytes), "a rewritten body is a JSON object");
    bytes
}

fn hand_offs(body: &[u8]) -> usize {
    members(body)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .filter(|member| member.key_is("kv_transfer_params"))
        .count()
}

fuzz_target!(|data: &[u8]| {
    let verdict =
        members(data).and_then(|walk| walk.map(|member| member.map(drop)).collect::<Result<(), _>>());
    match verdict {
        Ok(()) => assert!(is_object(data), "accepted what serde_json refuses"),
        Err(fault) => {
            assert!(fault.offset <= data.len());
            assert!(
                fault.kind == JsonFaultKind::TooDeep || !is_object(data),
                "refused what serde_json accepts"
            );
        }
    }
    let body = Bytes::copy_from_slice(data);
    if let Ok(passed) = pass_through_body(body.clone(), InjectedHandOff::Strip) {
        let passed = passed.into_bytes();
        let clean = pass_through_body(passed.clone(), InjectedHandOff::Refuse);
        assert_eq!(clean.expect("nothing injected is left").into_bytes(), passed);
    }
    for endpoint in [Endpoint::Completions, Endpoint::ChatCompletions] {
        let refusing = ClientRequest::parse(endpoint, body.clone(), InjectedHandOff::Refuse);
        let Ok(request) = ClientRequest::parse(endpoint, body.clone(), InjectedHandOff::Strip) else {
            assert!(refusing.is_err());
            continue;
        };
        let injected = matches!(refusing, Err(BadRequest::InjectedHandOff { .. }));
        assert_eq!(request.is_stripped(), injected);
        for ignore_eos in [false, true] {
            let prefill = checked(request.prefill_body(ignore_eos));
            assert_eq!(hand_offs(&prefill), 1);
            let again = ClientRequest::parse(endpoint, prefill.clone(), InjectedHandOff::Strip);
            let again = again.expect("a prefill body is a request");
            assert!(!again.wants_stream());
            assert_eq!(again.model(), request.model());
            assert_eq!(checked(again.prefill_body(ignore_eos)), prefill, "rewriting twice is rewriting once");
        }
        let alone = checked(request.decode_body(None));
        let clean = ClientRequest::parse(endpoint, alone.clone(), InjectedHandOff::Refuse);
        assert!(clean.is_ok(), "nothing injected is left");
        let with = checked(request.decode_body(Some(Bytes::from_static(b"{\"remote_port\":1}"))));
        assert_eq!(hand_offs(&with), 1);
        assert_eq!(checked(answer_without_hand_off(with)), alone, "only the hand-off was added");
    }
});

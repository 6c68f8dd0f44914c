use proptest::prelude::*;

use super::*;
use crate::golden::{groups, list, unhex, vectors};

fn from_fields(fields: &serde_json::Value) -> PushRegistration {
    let text = |key: &str| fields[key].as_str().unwrap().to_owned();
    let number = |key: &str| u32::try_from(fields[key].as_u64().unwrap()).unwrap();
    PushRegistration {
        request_id: text("request_id"),
        decode_engine_id: text("decode_engine_id"),
        decode_host: text("decode_host"),
        decode_port: fields["decode_port"].as_i64().unwrap(),
        decode_tp_size: number("decode_tp_size"),
        local_block_ids: groups(&fields["local_block_ids"]),
        remote_engine_id: text("remote_engine_id"),
        remote_host: text("remote_host"),
        remote_port: fields["remote_port"].as_i64().unwrap(),
        remote_tp_size: number("remote_tp_size"),
        remote_pp_size: number("remote_pp_size"),
    }
}

#[test]
fn registrations_have_the_bytes_vllm_sends() {
    let notifications = vectors("notifications.json");
    let packed = vectors("msgpack_v032.json");
    let cases = list(&notifications["push_registration"]).iter().map(|case| (&case["fields"], &case["hex"]));
    let packed = list(&packed["cases"]).iter().filter(|case| case["kind"] == "push_reg");
    let all: Vec<_> = cases.chain(packed.map(|case| (&case["registration"], &case["hex"]))).collect();
    assert_eq!(all.len(), 3);
    for (fields, hex) in all {
        let registration = from_fields(fields);
        assert_eq!(registration.encode(), unhex(hex));
        assert_eq!(PushRegistration::decode(&unhex(hex)), Some(Ok(registration)));
    }
}

#[test]
fn engines_append_eight_hex_digits_to_a_request_id() {
    for case in list(&vectors("notifications.json")["base_request_id"]) {
        assert_eq!(base_request_id(case["id"].as_str().unwrap()), case["base"].as_str().unwrap());
    }
    let newer = vectors("topology_v032.json");
    let newer = list(&newer["descriptor_cases"]).iter().filter(|case| case["kind"] == "get_base_request_id");
    let mut seen = 0;
    for case in newer {
        seen += 1;
        assert_eq!(base_request_id(case["in"].as_str().unwrap()), case["out"].as_str().unwrap(), "{case}");
    }
    assert_eq!(seen, 9);
    assert_eq!(base_request_id("x-9c4029d0\n\n"), "x-9c4029d0\n\n");
}

#[test]
fn a_single_group_may_be_flat_and_a_mixture_may_not() {
    let with_ids = |ids: &[u8]| {
        let mut bytes =
            PushRegistration { request_id: "r".to_owned(), ..PushRegistration::default() }.encode();
        let key = b"local_block_ids";
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len();
        bytes.splice(at..=at, ids.iter().copied());
        PushRegistration::decode(&bytes).unwrap()
    };
    assert_eq!(with_ids(&[0x92, 7, 8]).unwrap().local_block_ids, [vec![7, 8]]);
    assert_eq!(with_ids(&[0x91, 0x92, 7, 8]).unwrap().local_block_ids, [vec![7, 8]]);
    assert!(with_ids(&[0x92, 7, 0x91, 8]).is_err());
    assert!(with_ids(&[0x91, 0xff]).is_err(), "a negative id");
}

#[test]
fn what_names_no_receive_is_refused() {
    assert_eq!(PushRegistration::decode(b"r:1"), None);
    for bytes in [&b"PUSH_REG:"[..], b"PUSH_REG:\xc1", b"PUSH_REG:\x80", b"PUSH_REG:\x90"] {
        assert!(PushRegistration::decode(bytes).unwrap().is_err(), "{bytes:?}");
    }
}

proptest! {
    #[test]
    fn foreign_announcements_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        let mut message = PUSH_REGISTRATION_PREFIX.to_vec();
        message.extend(bytes);
        let _decided = PushRegistration::decode(&message);
    }
}

use super::*;
use crate::golden::{list, unhex, vectors};

#[test]
fn messages_have_the_bytes_vllm_sends() {
    let vectors = vectors("notifications.json");
    let [completion_case, heartbeat_case] = list(&vectors["formats"]) else { panic!("two formats") };
    assert_eq!(
        (&completion_case["kind"], &heartbeat_case["kind"]),
        (&"completion".into(), &"heartbeat".into())
    );
    assert_eq!(completion("cmpl-router-completions-0-0-9c4029d0", 1), unhex(&completion_case["hex"]));
    assert_eq!(heartbeat(["cmpl-a-0-00000001", "cmpl-b-0-00000002"]), unhex(&heartbeat_case["hex"]));
    let v032 = crate::golden::vectors("msgpack_v032.json");
    for case in list(&v032["cases"]).iter().filter(|case| case["kind"] == "notif_utf8") {
        let bytes = unhex(&case["hex"]);
        let encoded = match Notification::parse(Generation::V14, &bytes).unwrap() {
            Notification::Heartbeat { requests } => heartbeat(requests.split(',')),
            Notification::Completion { request, consumers } => {
                completion(request, u32::try_from(parse_consumers(consumers).unwrap()).unwrap())
            }
        };
        assert_eq!(encoded, bytes, "{}", case["name"]);
    }
}

#[test]
fn the_request_id_may_contain_colons() {
    assert_eq!(
        Notification::parse(Generation::V14, b"a:b:c:16"),
        Ok(Notification::Completion { request: "a:b:c", consumers: "16" })
    );
}

#[test]
fn v2_takes_a_heartbeat_for_a_completion() {
    assert_eq!(
        Notification::parse(Generation::V2, b"HB:r1,r2"),
        Ok(Notification::Completion { request: "HB", consumers: "r1,r2" })
    );
    assert_eq!(
        Notification::parse(Generation::V14, b"HB:r1,r2"),
        Ok(Notification::Heartbeat { requests: "r1,r2" })
    );
}

#[test]
fn malformed_messages_are_errors() {
    assert_eq!(Notification::parse(Generation::V14, b"r"), Err(NotificationError::NoCount));
    assert_eq!(Notification::parse(Generation::V14, b"\xff\xfe:1"), Err(NotificationError::NotUtf8));
    assert_eq!(parse_consumers("x"), Err(NotificationError::BadCount));
    assert_eq!(parse_consumers("-1"), Ok(-1));
}

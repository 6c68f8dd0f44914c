//! Completions and heartbeats from a hostile peer.

#![no_main]

use kv_connector::protocol::Generation;
use kv_connector::protocol::notification::{
    HEARTBEAT_PREFIX, Notification, completion, heartbeat, parse_consumers,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for generation in [Generation::V2, Generation::V14] {
        match Notification::parse(generation, bytes) {
            Ok(Notification::Heartbeat { requests }) => {
                assert_eq!(generation, Generation::V14);
                assert_eq!(heartbeat(requests.split(',')), bytes);
            }
            Ok(Notification::Completion { request, consumers }) => {
                assert!(generation == Generation::V2 || !request.starts_with(HEARTBEAT_PREFIX));
                assert!(!consumers.contains(':'));
                count(generation, request, consumers);
            }
            Err(_) => {
                assert!(std::str::from_utf8(bytes).is_err() || !bytes.contains(&b':'));
            }
        }
    }
});

fn count(generation: Generation, request: &str, consumers: &str) {
    let Ok(count) = parse_consumers(consumers) else { return };
    assert_eq!(parse_consumers(&count.to_string()), Ok(count));
    if let Ok(readers) = u32::try_from(count) {
        let message = completion(request, readers);
        let consumers = readers.to_string();
        let expected = Notification::Completion { request, consumers: &consumers };
        // An engine named `HB` would send a heartbeat.
        if generation == Generation::V2 || !message.starts_with(HEARTBEAT_PREFIX.as_bytes()) {
            assert_eq!(Notification::parse(generation, &message), Ok(expected));
        }
    }
}

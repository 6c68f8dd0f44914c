//! Any bytes as what an engine sends to the registry: read or refused, and alike in JSON and in msgpack.
#![no_main]

use kvbaton_routes::read_any;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|data: &[u8]| {
    let _ = read_any(data, false);
    let _ = read_any(data, true);
    if let Ok(value) = serde_json::from_slice::<Value>(data) {
        same(&value);
    }
    if let Ok(value) = rmp_serde::from_slice::<Value>(data) {
        same(&value);
    }
});

fn same(value: &Value) {
    let json = serde_json::to_vec(value).unwrap();
    let msgpack = rmp_serde::to_vec(value).unwrap();
    assert_eq!(read_any(&json, true), read_any(&msgpack, false), "{value}");
}

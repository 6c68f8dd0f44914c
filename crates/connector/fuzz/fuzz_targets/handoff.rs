//! Transfer parameters from a hostile prefill engine or client.

#![no_main]

use kv_connector::protocol::{HandOff, KvTransferParams};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let params: Result<KvTransferParams, _> = serde_json::from_slice(bytes);
    if HandOff::parse(bytes).is_ok() {
        // What a router lets through must not surprise an engine.
        let params = params.as_ref().expect("an engine refuses what the router accepts");
        assert!(params.do_remote_prefill && params.names_remote_blocks());
        assert_eq!(params.first_missing_remote_key(), None);
    }
    if let Ok(params) = params {
        let json = serde_json::to_vec(&params).expect("parameters can be written");
        let again: KvTransferParams = serde_json::from_slice(&json).expect("and read again");
        assert_eq!(again, params);
    }
});

//! Handshake payloads, agent metadata and requests from a hostile peer.

#![no_main]

use kv_connector::protocol::Generation;
use kv_connector::protocol::handshake::{HandshakeRequest, NixlHandshakePayload, decode_clock};
use kv_connector::protocol::metadata::NixlAgentMetadata;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(payload) = NixlHandshakePayload::decode(bytes) {
        assert_eq!(NixlHandshakePayload::decode(&payload.encode()).as_ref(), Ok(&payload));
        metadata(&payload.agent_metadata_bytes);
    }
    metadata(bytes);
    for generation in [Generation::V2, Generation::V14] {
        if let Ok(request) = HandshakeRequest::decode(generation, bytes) {
            assert_eq!(HandshakeRequest::decode(generation, &request.encode(generation)), Ok(request));
        }
    }
    let _decided = decode_clock(bytes);
});

fn metadata(bytes: &[u8]) {
    for generation in [Generation::V2, Generation::V14] {
        if let Ok(metadata) = NixlAgentMetadata::decode(generation, bytes) {
            assert_eq!(NixlAgentMetadata::decode(generation, &metadata.encode()).as_ref(), Ok(&metadata));
        }
    }
    let _decided = NixlAgentMetadata::decode_any(bytes);
}

//! Any bytes as what an engine publishes of its cache: refused, or read into blocks that have their tokens.
#![no_main]

use kv_connector::kv_events::{EventBatch, KvEvent};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(batch) = EventBatch::decode(bytes) else { return };
    for event in &batch.events {
        if let KvEvent::Stored(stored) = event {
            assert_eq!(stored.tokens.len(), stored.hashes.len() * stored.block_size);
        }
    }
    assert_eq!(EventBatch::decode(&batch.encode(1.0)), Ok(batch), "written and read again");
});

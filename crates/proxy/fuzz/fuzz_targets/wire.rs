//! Any bytes as what an engine answers: heads end where they end, and chunks are joined however they come.
#![no_main]

use kvbaton_proxy::fuzzing::{chunked, head_length};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let data = &data[..data.len().min(2048)];
    if let Some(Some(length)) = head_length(data) {
        assert!(length <= data.len());
        for end in 0..length {
            assert_eq!(head_length(&data[..end]), Some(None), "a part of a head is no head");
        }
        assert_eq!(head_length(&data[..length]), Some(Some(length)), "what follows a head is not of it");
    }
    let whole = chunked(data, data.len().max(1));
    for piece in [1, 2, 3, 7] {
        assert_eq!(chunked(data, piece), whole, "in pieces of {piece}");
    }
    if let Some((joined, used, _)) = whole {
        assert!(used <= data.len() && joined.len() <= used);
    }
});

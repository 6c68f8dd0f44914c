//! Any bytes as an engine's event stream: in whatever pieces they come, the client gets the same.
#![no_main]

use bytes::Bytes;
use kvbaton_proxy::Endpoint;
use kvbaton_proxy::fuzzing::events;
use libfuzzer_sys::fuzz_target;

const ENDPOINTS: [Endpoint; 4] =
    [Endpoint::Completions, Endpoint::ChatCompletions, Endpoint::Responses, Endpoint::Messages];

fuzz_target!(|data: &[u8]| {
    let [choice, piece, stream @ ..] = data else { return };
    let endpoint = ENDPOINTS[usize::from(choice & 3)];
    let cached = (choice & 4 != 0).then_some(u64::from(choice >> 3));
    let stream = Bytes::copy_from_slice(stream);
    let whole = events(endpoint, cached, &stream, stream.len().max(1));
    assert_eq!(events(endpoint, cached, &stream, 1), whole, "byte by byte");
    assert_eq!(events(endpoint, cached, &stream, 1 + usize::from(*piece)), whole, "in pieces");
    if let Some(whole) = whole {
        assert!(whole.len() <= stream.len() + 512 * (1 + stream.len() / 8), "an edit adds little to each event");
    }
});

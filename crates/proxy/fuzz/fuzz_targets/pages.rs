//! Any bytes as what a peer says of itself: its metrics page and its list of models.
#![no_main]

use kvbaton_proxy::fuzzing::{load, models};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let page = String::from_utf8_lossy(data);
    for rank in [None, Some(0), Some(11)] {
        for part in load(&page, rank).into_iter().flatten().flatten() {
            assert!((0.0..=1.0).contains(&part), "{part} is no part");
        }
    }
    if let Some(ids) = models(data) {
        assert!(ids.iter().map(String::len).sum::<usize>() <= data.len());
    }
});

//! Ways in for the fuzz targets to what reads engines' bytes; part of no other build.

use bytes::Bytes;
use tokio::time::Instant;

use crate::held::Held;
use crate::pool::load::EngineLoad;
use crate::pool::probe::read_models;
use crate::request::Endpoint;
use crate::splice::PromptPart;
use crate::stream::Events;
pub use crate::wire::{chunked, head_length};

/// Most that is held of one event.
const LONGEST: usize = 1 << 20;

/// An event stream as its client gets it, when it comes in pieces of this size; none where it is broken off.
#[must_use]
pub fn events(endpoint: Endpoint, cached: Option<u64>, stream: &Bytes, piece: usize) -> Option<Vec<u8>> {
    let part = cached.map(|tokens| PromptPart { cached_tokens: Some(tokens), ..PromptPart::default() });
    let mut events = Events::new(endpoint, part, Held::new(LONGEST).share(), LONGEST);
    let mut shown = Vec::new();
    let mut at = 0;
    while at < stream.len() {
        let end = stream.len().min(at + piece);
        shown.extend_from_slice(&events.take(stream.slice(at..end)).ok()?.0);
        at = end;
    }
    shown.extend_from_slice(&events.rest().ok()?);
    Some(shown)
}

/// What a peer's metrics page says of its load, as operators see it: the part of its blocks in use, and the part of
/// prompt tokens that its cache had of late.
#[must_use]
pub fn load(page: &str, rank: Option<u32>) -> Option<[Option<f64>; 2]> {
    let first = EngineLoad::read(page, rank, None, Instant::now());
    let load = EngineLoad::read(page, rank, first.as_ref(), Instant::now())?;
    Some([load.kv_usage, load.cached_token_rate])
}

/// The ids of the models that a peer's answer lists.
#[must_use]
pub fn models(body: &[u8]) -> Option<Vec<String>> {
    let models = read_models(body).ok()?;
    Some(models.iter().map(|model| model.id.clone()).collect())
}

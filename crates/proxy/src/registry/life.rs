//! What a registration or a payload makes of an engine: a record that goes on with a life or begins
//! one. Changes nothing by itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_connector::fit::EngineTraits;

use super::Receipt;
use super::error::RegistryError;
use super::record::{EngineRecord, EngineState, Rank, RankView};
use super::registration::{Checked, Registration, unix_seconds};
use super::state::State;
use crate::client::ModelScope;

/// What a registration makes of an engine that is known, or new.
///
/// # Errors
/// It is another credential's, or another engine that lives has the id.
pub(super) fn compose(
    registration: Registration,
    checked: Checked,
    known: Option<&EngineRecord>,
    state: &State,
) -> Result<EngineRecord, RegistryError> {
    let Registration {
        engine_id,
        role,
        model,
        dp_rank,
        vllm_version,
        traits,
        state: engine_state,
        writer,
        ..
    } = registration;
    let Checked { base_url, ttl, ranks } = checked;
    let known_ranks = known.map(|known| known.ranks.clone()).unwrap_or_default();
    let mut record = EngineRecord {
        engine_id,
        base_url,
        role,
        model,
        dp_rank,
        vllm_version,
        traits,
        state: engine_state,
        generation: 0,
        revision: 0,
        registered_at: unix_seconds(),
        ttl,
        ranks: ranks.unwrap_or(known_ranks),
        owner: None,
        bound: ModelScope::All,
        pulse: Arc::default(),
    };
    writer.claim(&mut record, state)?;
    if known.is_some_and(|known| known.lives_elsewhere(&record)) {
        return Err(RegistryError::EngineIdTaken { engine_id: record.engine_id });
    }
    continue_life(&mut record, known, state);
    Ok(record)
}

/// An engine of which no more than an id is known.
pub(super) fn unnamed(engine_id: &str) -> EngineRecord {
    EngineRecord {
        engine_id: engine_id.to_owned(),
        base_url: None,
        role: None,
        model: None,
        dp_rank: 0,
        vllm_version: None,
        traits: EngineTraits::default(),
        state: EngineState::Ready,
        generation: 0,
        revision: 0,
        registered_at: unix_seconds(),
        ttl: None,
        ranks: BTreeMap::new(),
        owner: None,
        bound: ModelScope::All,
        pulse: Arc::default(),
    }
}

/// Decides whether a record goes on with a life or begins one: a payload names memory of one
/// process, so another payload of the same rank is another process.
pub(super) fn continue_life(record: &mut EngineRecord, known: Option<&EngineRecord>, state: &State) {
    let place = record.place();
    let same_life = known.filter(|known| {
        let restarted = |(rank, view): (&Rank, &Arc<RankView>)| {
            record.ranks.get(rank).is_some_and(|new| new.payload != view.payload)
        };
        known.place() == place && !known.ranks.iter().any(restarted)
    });
    match same_life {
        Some(known) => {
            record.generation = known.generation;
            record.registered_at = known.registered_at;
            record.pulse = Arc::clone(&known.pulse);
        }
        None => {
            record.generation = state.next_generation(&place);
            record.registered_at = unix_seconds();
            record.pulse = Arc::default();
        }
    }
}

pub(super) fn receipt(record: &EngineRecord, created: bool, router_clock: f64) -> Receipt {
    Receipt {
        created,
        revision: record.revision,
        generation: record.generation,
        ttl: record.ttl,
        router_clock,
    }
}

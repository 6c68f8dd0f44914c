//! The parallel sizes of every connected engine, per pipeline stage.

use std::collections::HashMap;

use thiserror::Error;

use super::ParallelSizes;

/// What is known of a remote engine besides its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineTopology {
    /// Transfer sizes.
    pub sizes: ParallelSizes,
    /// Prefill-context-parallel size.
    pub pcp: u32,
    /// Tokens per kernel block.
    pub block_size: u64,
    /// Kernel blocks per logical block.
    pub blocks_per_logical: u64,
}

/// A wrong use of the registry.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EngineTopologyError {
    /// The engine was never registered, or is registered no longer.
    #[error("engine {0} is not registered")]
    Unknown(String),
    /// The engine is the local one.
    #[error("engine {0} is this engine")]
    Local(String),
}

/// Topologies of remote engines; the first registration of an engine's stage wins.
#[derive(Debug, Clone)]
pub struct TopologyRegistry {
    local_engine: String,
    engines: HashMap<String, HashMap<u32, EngineTopology>>,
}

impl TopologyRegistry {
    /// A registry of the peers of `local_engine`.
    pub fn new(local_engine: impl Into<String>) -> Self {
        Self { local_engine: local_engine.into(), engines: HashMap::new() }
    }

    /// Stores the topology of a pipeline stage and returns what is stored: the earlier one, if any.
    ///
    /// # Errors
    /// The local engine.
    pub fn register(
        &mut self,
        engine: &str,
        pp_rank: u32,
        topology: EngineTopology,
    ) -> Result<EngineTopology, EngineTopologyError> {
        if engine == self.local_engine {
            return Err(EngineTopologyError::Local(engine.to_owned()));
        }
        let stages = self.engines.entry(engine.to_owned()).or_default();
        Ok(*stages.entry(pp_rank).or_insert(topology))
    }

    /// The topology of a pipeline stage.
    ///
    /// # Errors
    /// An engine or stage that is not registered.
    pub fn get(&self, engine: &str, pp_rank: u32) -> Result<EngineTopology, EngineTopologyError> {
        self.engines
            .get(engine)
            .and_then(|stages| stages.get(&pp_rank))
            .copied()
            .ok_or_else(|| EngineTopologyError::Unknown(engine.to_owned()))
    }

    /// Forgets all stages of an engine; an unknown engine is no error.
    pub fn unregister(&mut self, engine: &str) {
        self.engines.remove(engine);
    }
}

//! The memory an agent may register, kept alive as long as NIXL can reach it.

#![allow(unsafe_code, reason = "offers a constructor for memory this crate cannot check")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::transport::{Descriptor, KvMemory, MemoryType};

use super::config::NixlError;

/// Ranges of memory with real addresses, and what keeps them allocated.
#[derive(Clone)]
pub struct NixlMemory {
    ranges: Arc<[(MemoryType, Descriptor)]>,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl NixlMemory {
    /// The memory of an engine in this process.
    ///
    /// # Errors
    /// Memory that was not made with [`KvMemory::allocate_addressable`].
    pub fn of(memory: &KvMemory) -> Result<Self, NixlError> {
        if !memory.is_addressable() {
            return Err(NixlError::NotAddressable);
        }
        let range = |(address, len)| (MemoryType::Dram, Descriptor { address, len, device: 0 });
        Ok(Self { ranges: memory.ranges().map(range).collect(), _owner: Arc::new(memory.clone()) })
    }

    /// No memory: for an agent that only notifies.
    pub fn none() -> Self {
        Self { ranges: Arc::new([]), _owner: Arc::new(()) }
    }

    /// Memory of the caller's own making, such as that of an accelerator.
    ///
    /// # Safety
    /// Every range must be valid memory of its kind, readable and writable, until `owner` is
    /// dropped. As long as it is registered, peers and this agent's own transfers change its bytes
    /// at any time, so no Rust reference to them may exist.
    pub unsafe fn foreign(
        ranges: impl IntoIterator<Item = (MemoryType, Descriptor)>,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { ranges: ranges.into_iter().collect(), _owner: owner }
    }

    pub(super) fn contains(&self, memory: MemoryType, wanted: &Descriptor) -> bool {
        self.ranges.iter().any(|(kind, range)| *kind == memory && covers(range, wanted))
    }
}

/// Whether `wanted` lies in `range`, on the same device and not empty.
pub(super) fn covers(range: &Descriptor, wanted: &Descriptor) -> bool {
    range.device == wanted.device
        && wanted.len > 0
        && wanted
            .address
            .checked_sub(range.address)
            .is_some_and(|offset| offset.checked_add(wanted.len).is_some_and(|end| end <= range.len))
}

impl fmt::Debug for NixlMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlMemory").field("ranges", &self.ranges).finish_non_exhaustive()
    }
}

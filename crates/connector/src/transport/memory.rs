//! Byte-addressed memory of one engine, shared safely by its model and its transport.
//!
//! Addresses are made up: each allocation sits at a random base, so an address of one engine
//! practically never lies in another's memory. Every access is bounds-checked.

use std::sync::Arc;

use parking_lot::RwLock;
use thiserror::Error;

/// Distance kept free between two regions, so that running over an end is noticed.
const GUARD: u64 = 1 << 20;

/// An access outside the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("range {address:#x}+{len} lies outside the memory")]
pub struct MemoryError {
    /// First byte of the access.
    pub address: u64,
    /// Length of the access in bytes.
    pub len: u64,
}

#[derive(Debug)]
struct MemoryRegion {
    base: u64,
    len: u64,
    bytes: RwLock<Vec<u8>>,
}

/// The KV memory of one engine; clones share the same bytes.
#[derive(Debug, Clone)]
pub struct KvMemory {
    regions: Arc<[MemoryRegion]>,
}

impl KvMemory {
    /// Zeroed regions of the given lengths in bytes, each at its own made-up base address.
    pub fn allocate(region_lens: &[usize]) -> Self {
        // A page-aligned base in the lower half of the 47-bit user space.
        let mut next = (rand::random::<u64>() & 0x3fff_ffff_f000) | 0x1000_0000_0000;
        let mut regions = Vec::with_capacity(region_lens.len());
        for &len in region_lens {
            let len_bytes = len as u64;
            regions.push(MemoryRegion { base: next, len: len_bytes, bytes: RwLock::new(vec![0; len]) });
            next += len_bytes.next_multiple_of(4096) + GUARD;
        }
        Self { regions: regions.into() }
    }

    /// Base address of each region, in the order of allocation.
    pub fn base_addresses(&self) -> Vec<u64> {
        self.regions.iter().map(|region| region.base).collect()
    }

    /// True when the range lies in one region.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        self.locate(address, len).is_ok()
    }

    /// A copy of `len` bytes at `address`.
    ///
    /// # Errors
    /// A range that is not inside one region.
    pub fn read(&self, address: u64, len: u64) -> Result<Vec<u8>, MemoryError> {
        let mut bytes = Vec::new();
        self.read_into(address, len, &mut bytes)?;
        Ok(bytes)
    }

    /// Appends `len` bytes at `address` to `out`.
    ///
    /// # Errors
    /// A range that is not inside one region; nothing is appended.
    pub fn read_into(&self, address: u64, len: u64, out: &mut Vec<u8>) -> Result<(), MemoryError> {
        let (region, start, end) = self.locate(address, len)?;
        let bytes = region.bytes.read();
        let slice = bytes.get(start..end).ok_or(MemoryError { address, len })?;
        out.extend_from_slice(slice);
        Ok(())
    }

    /// Copies `bytes` to `address`.
    ///
    /// # Errors
    /// A range that is not inside one region; nothing is written.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let len = bytes.len() as u64;
        let (region, start, end) = self.locate(address, len)?;
        let mut guard = region.bytes.write();
        let slice = guard.get_mut(start..end).ok_or(MemoryError { address, len })?;
        slice.copy_from_slice(bytes);
        Ok(())
    }

    fn locate(&self, address: u64, len: u64) -> Result<(&MemoryRegion, usize, usize), MemoryError> {
        let error = MemoryError { address, len };
        let index = self.regions.partition_point(|region| region.base <= address);
        let region = index.checked_sub(1).and_then(|i| self.regions.get(i)).ok_or(error)?;
        let offset = address - region.base;
        let end = offset.checked_add(len).filter(|end| *end <= region.len).ok_or(error)?;
        let start = usize::try_from(offset).map_err(|_| error)?;
        let end = usize::try_from(end).map_err(|_| error)?;
        Ok((region, start, end))
    }
}

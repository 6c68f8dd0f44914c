//! Byte-addressed memory of one engine, shared safely by its model and its transport.
//!
//! Addresses are made up: each allocation sits at a random base, so an address of one engine
//! practically never lies in another's memory. Memory for NIXL has its real addresses instead, and
//! other processes may change it at any time. Every access is bounds-checked.

use std::sync::Arc;

use parking_lot::RwLock;
use thiserror::Error;

#[cfg(feature = "nixl")]
use super::nixl::Pages;

#[cfg(feature = "nixl")]
const PAGE: usize = 4096;

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

/// The system could not give the memory asked for.
#[cfg(feature = "nixl")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the system has not so much memory")]
pub struct OutOfMemory;

#[derive(Debug)]
enum Bytes {
    Own(RwLock<Vec<u8>>),
    /// A part of pages that other processes can reach, from that offset on.
    #[cfg(feature = "nixl")]
    Pages(Arc<Pages>, usize),
}

#[derive(Debug)]
struct MemoryRegion {
    base: u64,
    len: u64,
    bytes: Bytes,
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
            regions.push(MemoryRegion {
                base: next,
                len: len_bytes,
                bytes: Bytes::Own(RwLock::new(vec![0; len])),
            });
            next += len_bytes.next_multiple_of(4096) + GUARD;
        }
        Self { regions: regions.into() }
    }

    /// Zeroed regions like those of [`allocate`](Self::allocate), but in pages of this process and
    /// at their real addresses, so that a [`NixlAgent`](super::nixl::NixlAgent) can register them.
    ///
    /// # Errors
    /// The system has not so much memory.
    #[cfg(feature = "nixl")]
    pub fn allocate_addressable(region_lens: &[usize]) -> Result<Self, OutOfMemory> {
        let mut offsets = Vec::with_capacity(region_lens.len());
        let mut total = 0_usize;
        for &len in region_lens {
            offsets.push((total, len));
            // One page in between, so that running over an end is noticed.
            let end = len.checked_next_multiple_of(PAGE).and_then(|len| len.checked_add(PAGE));
            total = end.and_then(|end| total.checked_add(end)).ok_or(OutOfMemory)?;
        }
        let pages = Arc::new(Pages::zeroed(total).ok_or(OutOfMemory)?);
        let regions = offsets.into_iter().map(|(offset, len)| MemoryRegion {
            base: pages.address() + offset as u64,
            len: len as u64,
            bytes: Bytes::Pages(Arc::clone(&pages), offset),
        });
        Ok(Self { regions: regions.collect() })
    }

    /// True when the addresses are real ones.
    #[cfg(feature = "nixl")]
    pub fn is_addressable(&self) -> bool {
        self.regions.iter().all(|region| matches!(region.bytes, Bytes::Pages(..)))
    }

    /// Base address and length of each region, in the order of allocation.
    #[cfg(feature = "nixl")]
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.regions.iter().map(|region| (region.base, region.len))
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
        let copied = match &region.bytes {
            Bytes::Own(bytes) => bytes.read().get(start..end).map(|slice| out.extend_from_slice(slice)),
            #[cfg(feature = "nixl")]
            Bytes::Pages(pages, offset) => pages.copy_out(offset + start, offset + end, out).then_some(()),
        };
        copied.ok_or(MemoryError { address, len })
    }

    /// Copies `bytes` to `address`.
    ///
    /// # Errors
    /// A range that is not inside one region; nothing is written.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let len = bytes.len() as u64;
        let (region, start, end) = self.locate(address, len)?;
        let copied = match &region.bytes {
            Bytes::Own(own) => own.write().get_mut(start..end).map(|slice| slice.copy_from_slice(bytes)),
            #[cfg(feature = "nixl")]
            Bytes::Pages(pages, offset) => pages.copy_in(offset + start, bytes).then_some(()),
        };
        copied.ok_or(MemoryError { address, len })
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

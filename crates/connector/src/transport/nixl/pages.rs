//! Page-aligned memory whose bytes NIXL, the kernel and other processes change at any time.
//!
//! Rust code touches it only through atomic words of one size, so no reference to its bytes ever
//! exists and two accesses of this process never race. It is not freed before its last owner.

#![allow(unsafe_code, reason = "raw memory that is shared with a foreign library")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;
const WORD: usize = size_of::<u64>();

/// One zeroed allocation of whole pages.
#[derive(Debug)]
pub(in crate::transport) struct Pages {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the allocation is owned by this value alone and is accessed only through atomics, which
// any thread may do.
unsafe impl Send for Pages {}
// SAFETY: as for Send; no method hands out a reference to the bytes.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `len` zeroed bytes; none when the system has not so much memory.
    pub(in crate::transport) fn zeroed(len: usize) -> Option<Self> {
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let layout = Layout::from_size_align(len, PAGE).ok()?;
        // SAFETY: the layout has a size above zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, layout })
    }

    /// Where the bytes lie in this process.
    pub(in crate::transport) fn address(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// Appends the bytes `start..end` to `out`; false, and nothing appended, outside of the pages.
    pub(in crate::transport) fn copy_out(&self, start: usize, end: usize, out: &mut Vec<u8>) -> bool {
        if start > end || end > self.layout.size() {
            return false;
        }
        out.reserve(end - start);
        let mut at = start;
        while at < end {
            let (word, first) = (at / WORD, at % WORD);
            let count = (WORD - first).min(end - at);
            let bytes = self.word(word).load(Ordering::Relaxed).to_ne_bytes();
            out.extend_from_slice(&bytes[first..first + count]);
            at += count;
        }
        true
    }

    /// Copies `bytes` to `start`; false, and nothing written, outside of the pages.
    pub(in crate::transport) fn copy_in(&self, start: usize, bytes: &[u8]) -> bool {
        match start.checked_add(bytes.len()) {
            Some(end) if end <= self.layout.size() => {}
            _ => return false,
        }
        let (mut at, mut rest) = (start, bytes);
        while !rest.is_empty() {
            let (word, first) = (at / WORD, at % WORD);
            let (now, later) = rest.split_at((WORD - first).min(rest.len()));
            let cell = self.word(word);
            if let Ok(whole) = now.try_into() {
                cell.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
            } else {
                merge(cell, first, now);
            }
            at += now.len();
            rest = later;
        }
        true
    }

    /// The word of that index; callers have checked that it lies inside.
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!((index + 1) * WORD <= self.layout.size());
        // SAFETY: callers stay below the size, which is a multiple of the word, so the pointer is
        // inside the live allocation and aligned. Within this process the bytes are accessed as
        // such atomics only; what NIXL writes on behalf of a peer is outside the language's model
        // and can at worst be seen as old or new bytes.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(index * WORD).cast()) }
    }
}

/// Replaces a part of a word and leaves its other bytes as they are at that moment.
fn merge(cell: &AtomicU64, first: usize, part: &[u8]) {
    let replaced = |old: u64| {
        let mut bytes = old.to_ne_bytes();
        bytes[first..first + part.len()].copy_from_slice(part);
        u64::from_ne_bytes(bytes)
    };
    let mut old = cell.load(Ordering::Relaxed);
    while let Err(now) = cell.compare_exchange_weak(old, replaced(old), Ordering::Relaxed, Ordering::Relaxed)
    {
        old = now;
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout and is freed once, here.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pages_keep_what_was_written(start in 0_usize..40, bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let pages = Pages::zeroed(4096).unwrap();
            assert!(pages.copy_in(0, &[0xaa; 128]));
            assert!(pages.copy_in(start, &bytes));
            let mut expected = [0xaa; 128];
            expected[start..start + bytes.len()].copy_from_slice(&bytes);
            let mut seen = vec![1];
            assert!(pages.copy_out(0, 128, &mut seen));
            prop_assert_eq!(&seen[1..], &expected[..]);
            let mut part = Vec::new();
            assert!(pages.copy_out(start, start + bytes.len(), &mut part));
            prop_assert_eq!(part, bytes);
        }
    }

    #[test]
    fn nothing_outside_of_the_pages_is_touched() {
        let pages = Pages::zeroed(1).unwrap();
        assert_eq!(pages.address() % 4096, 0);
        let mut out = Vec::new();
        assert!(pages.copy_out(4096, 4096, &mut out) && pages.copy_in(4096, &[]));
        assert!(!pages.copy_out(0, 4097, &mut out) && !pages.copy_in(4090, &[1; 7]));
        assert!(!pages.copy_in(usize::MAX, &[1]));
        assert!(out.is_empty());
        assert!(Pages::zeroed(usize::MAX - 1).is_none());
    }
}

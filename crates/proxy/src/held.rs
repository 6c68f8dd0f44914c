//! The bound on what all requests together make the router hold: their bodies, and answers that are held
//! whole or in part. Counts bytes; never waits for room.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

/// The router's room for bodies; clones share it.
#[derive(Clone, Debug)]
pub struct Held(Arc<Room>);

#[derive(Debug)]
struct Room {
    taken: AtomicUsize,
    limit: AtomicUsize,
}

/// One body's part of the room, given back when dropped.
#[derive(Debug)]
pub struct Share {
    room: Arc<Room>,
    taken: AtomicUsize,
}

/// Bytes that keep their part of the room until the last slice of them is gone.
struct Owned {
    bytes: Bytes,
    _share: Arc<Share>,
}

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Held {
    pub(crate) fn new(limit: usize) -> Self {
        Self(Arc::new(Room { taken: AtomicUsize::new(0), limit: AtomicUsize::new(limit) }))
    }

    /// Another size of the room; what is held already stays.
    pub(crate) fn resize(&self, limit: usize) {
        self.0.limit.store(limit, Ordering::Relaxed);
    }

    /// A part of the room, empty at first.
    #[must_use]
    pub fn share(&self) -> Arc<Share> {
        Arc::new(Share { room: Arc::clone(&self.0), taken: AtomicUsize::new(0) })
    }

    /// Bytes held now.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.taken.load(Ordering::Relaxed)
    }

    /// Whether a body of this size would find room now.
    #[must_use]
    pub fn has_room(&self, bytes: u64) -> bool {
        usize::try_from(bytes)
            .is_ok_and(|bytes| bytes <= self.0.limit.load(Ordering::Relaxed).saturating_sub(self.bytes()))
    }
}

impl Share {
    /// Takes more room; false, and nothing taken, if there is too little.
    #[must_use]
    pub fn grow(&self, bytes: usize) -> bool {
        let limit = self.room.limit.load(Ordering::Relaxed);
        let more = |taken: usize| taken.checked_add(bytes).filter(|all| *all <= limit);
        let grown = self.room.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        if grown {
            self.taken.fetch_add(bytes, Ordering::Relaxed);
        }
        grown
    }

    /// Gives back everything that was taken.
    pub(crate) fn clear(&self) {
        self.room.taken.fetch_sub(self.taken.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Binds the share to the bytes for which it was taken.
    #[must_use]
    pub fn bind(self: Arc<Self>, bytes: Bytes) -> Bytes {
        if bytes.is_empty() { bytes } else { Bytes::from_owner(Owned { bytes, _share: self }) }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_comes_back_with_the_last_slice() {
        let held = Held::new(10);
        let share = held.share();
        assert!(share.grow(6) && !share.grow(5) && share.grow(4));
        assert_eq!((held.bytes(), held.has_room(1), held.has_room(0)), (10, false, true));
        let body = share.bind(Bytes::from_static(b"0123456789"));
        let slice = body.slice(2..3);
        drop(body);
        assert_eq!(held.bytes(), 10);
        drop(slice);
        assert_eq!(held.bytes(), 0);
    }
}

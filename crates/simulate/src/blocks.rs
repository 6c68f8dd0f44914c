//! An engine's KV memory: pieces of whole blocks, shared where prompts begin alike, kept after use until others need
//! their room, the longest unused ones first.

use std::collections::{BTreeMap, HashMap};

/// A piece of memory.
pub(crate) type Piece = u32;

#[derive(Debug, Default)]
struct Slot {
    references: u32,
    blocks: u32,
    tokens: u32,
    name: Option<u64>,
    stamp: Option<u64>,
}

/// All memory of one engine.
#[derive(Debug)]
pub(crate) struct Memory {
    slots: Vec<Slot>,
    spare: Vec<Piece>,
    named: HashMap<u64, Piece>,
    unused: BTreeMap<u64, Piece>,
    /// Blocks that hold nothing.
    empty: u64,
    /// Blocks that hold what nobody uses.
    idle: u64,
    capacity: u64,
    next_stamp: u64,
}

impl Memory {
    pub(crate) fn new(blocks: u64) -> Self {
        Self {
            slots: Vec::new(),
            spare: Vec::new(),
            named: HashMap::new(),
            unused: BTreeMap::new(),
            empty: blocks,
            idle: 0,
            capacity: blocks,
            next_stamp: 0,
        }
    }

    /// The part of it that somebody uses.
    pub(crate) fn usage(&self) -> f64 {
        (self.capacity - self.available()) as f64 / self.capacity.max(1) as f64
    }

    /// Blocks that can be had.
    pub(crate) const fn available(&self) -> u64 {
        self.empty + self.idle
    }

    /// The pieces of the longest beginning that is there, and their tokens.
    pub(crate) fn lookup(&self, names: &[u64]) -> (Vec<Piece>, u32) {
        let pieces: Vec<Piece> = names.iter().map_while(|name| self.named.get(name).copied()).collect();
        let tokens = pieces.iter().map(|piece| self.slots[*piece as usize].tokens).sum();
        (pieces, tokens)
    }

    /// Tokens of the longest beginning that is there.
    pub(crate) fn cached(&self, names: &[u64]) -> u32 {
        let pieces = names.iter().map_while(|name| self.named.get(name));
        pieces.map(|piece| self.slots[*piece as usize].tokens).sum()
    }

    /// Blocks of these pieces that nobody uses yet.
    pub(crate) fn idle_among(&self, pieces: &[Piece]) -> u64 {
        let slots = pieces.iter().map(|piece| &self.slots[*piece as usize]);
        slots.filter(|slot| slot.references == 0).map(|slot| u64::from(slot.blocks)).sum()
    }

    /// Uses pieces that are there.
    pub(crate) fn hold(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            let slot = &mut self.slots[*piece as usize];
            if let Some(stamp) = slot.stamp.take() {
                self.unused.remove(&stamp);
                self.idle -= u64::from(slot.blocks);
            }
            slot.references += 1;
        }
    }

    /// A new piece of so many blocks; none where there is no room.
    pub(crate) fn take(&mut self, blocks: u32) -> Option<Piece> {
        self.make_room(blocks)?;
        let slot = Slot { references: 1, blocks, ..Slot::default() };
        Some(match self.spare.pop() {
            Some(piece) => {
                self.slots[piece as usize] = slot;
                piece
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as Piece
            }
        })
    }

    /// Makes a piece larger that one alone uses; none where there is no room.
    pub(crate) fn grow(&mut self, piece: Piece, blocks: u32) -> Option<()> {
        self.make_room(blocks)?;
        self.slots[piece as usize].blocks += blocks;
        Some(())
    }

    fn make_room(&mut self, blocks: u32) -> Option<()> {
        let blocks = u64::from(blocks);
        if self.available() < blocks {
            return None;
        }
        while self.empty < blocks {
            let (_, piece) = self.unused.pop_first()?;
            let slot = std::mem::take(&mut self.slots[piece as usize]);
            if let Some(name) = slot.name {
                self.named.remove(&name);
            }
            self.spare.push(piece);
            self.idle -= u64::from(slot.blocks);
            self.empty += u64::from(slot.blocks);
        }
        self.empty -= blocks;
        Some(())
    }

    /// Others may use the piece from now on for such a part of a prompt, unless they have one already.
    pub(crate) fn publish(&mut self, piece: Piece, name: u64, tokens: u32) {
        let slot = &mut self.slots[piece as usize];
        if slot.name.is_none() && !self.named.contains_key(&name) {
            slot.name = Some(name);
            slot.tokens = tokens;
            self.named.insert(name, piece);
        }
    }

    /// Ends the use of pieces; what comes last in a prompt is given away first.
    pub(crate) fn release(&mut self, pieces: &[Piece]) {
        for piece in pieces.iter().rev() {
            let slot = &mut self.slots[*piece as usize];
            slot.references -= 1;
            if slot.references == 0 {
                slot.stamp = Some(self.next_stamp);
                self.unused.insert(self.next_stamp, *piece);
                self.next_stamp += 1;
                self.idle += u64::from(slot.blocks);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_is_found_until_its_room_is_needed() {
        let mut memory = Memory::new(6);
        let pieces: Vec<Piece> = (0..3).map(|_| memory.take(1).unwrap()).collect();
        pieces.iter().zip(10..).for_each(|(piece, name)| memory.publish(*piece, name, 16));
        memory.release(&pieces);
        assert_eq!((memory.cached(&[10, 11, 12]), memory.available()), (48, 6));
        assert_eq!(memory.cached(&[10, 99, 12]), 16);
        let large = memory.take(4).unwrap();
        assert_eq!(memory.cached(&[10, 11, 12]), 32, "the end of the prompt went first");
        let (found, tokens) = memory.lookup(&[10, 11, 12]);
        assert_eq!((found.len(), tokens, memory.idle_among(&found)), (2, 32, 2));
        memory.hold(&found);
        assert_eq!((memory.available(), memory.take(1)), (0, None));
        memory.release(&[large]);
        assert!(memory.grow(found[0], 4).is_some());
        assert!((memory.usage() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn who_computes_the_same_at_once_has_memory_of_its_own() {
        let mut memory = Memory::new(4);
        let (one, other) = (memory.take(1).unwrap(), memory.take(1).unwrap());
        memory.publish(one, 5, 16);
        memory.publish(other, 5, 16);
        memory.release(&[one, other]);
        assert_eq!(memory.lookup(&[5]).0, [one]);
        memory.take(4).unwrap();
        assert_eq!(memory.cached(&[5]), 0);
    }
}

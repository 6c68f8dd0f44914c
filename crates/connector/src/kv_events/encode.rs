//! Writing batches, as vLLM 0.32 does.

use super::{BlockHash, BlocksStored, EventBatch, KvEvent};

impl EventBatch {
    /// The batch as an engine would publish it at a time in seconds.
    #[must_use]
    pub fn encode(&self, time: f64) -> Vec<u8> {
        let mut out = Vec::new();
        array(&mut out, 2 + usize::from(self.rank.is_some()));
        out.push(0xcb);
        out.extend(time.to_be_bytes());
        array(&mut out, self.events.len());
        for event in &self.events {
            self::event(&mut out, event);
        }
        if let Some(rank) = self.rank {
            number(&mut out, rank.into());
        }
        out
    }
}

/// A list of texts.
pub(super) fn texts(texts: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    array(&mut out, texts.len());
    for text in texts {
        self::text(&mut out, text);
    }
    out
}

fn event(out: &mut Vec<u8>, event: &KvEvent) {
    match event {
        KvEvent::Stored(stored) => self::stored(out, stored),
        KvEvent::Removed { hashes, medium, group } => {
            out.push(0x84);
            kind(out, "BlockRemoved");
            self::hashes(out, hashes);
            field(out, "medium");
            optional_text(out, medium.as_deref());
            field(out, "group_idx");
            optional_number(out, *group);
        }
        KvEvent::Cleared => {
            out.push(0x81);
            kind(out, "AllBlocksCleared");
        }
    }
}

fn stored(out: &mut Vec<u8>, stored: &BlocksStored) {
    out.push(0x8a);
    kind(out, "BlockStored");
    hashes(out, &stored.hashes);
    field(out, "parent_block_hash");
    match &stored.parent {
        Some(parent) => hash(out, parent),
        None => out.push(0xc0),
    }
    field(out, "token_ids");
    array(out, stored.tokens.len());
    for token in &stored.tokens {
        number(out, (*token).into());
    }
    field(out, "block_size");
    number(out, stored.block_size as u64);
    field(out, "lora_id");
    out.push(0xc0);
    field(out, "medium");
    optional_text(out, stored.medium.as_deref());
    field(out, "lora_name");
    optional_text(out, stored.lora.as_deref());
    field(out, "extra_keys");
    match &stored.extra_keys {
        None => out.push(0xc0),
        Some(keys) => {
            array(out, keys.len());
            for keys in keys {
                out.extend(keys.as_deref().unwrap_or(&[0xc0]));
            }
        }
    }
    field(out, "group_idx");
    optional_number(out, stored.group);
}

fn kind(out: &mut Vec<u8>, kind: &str) {
    field(out, "type");
    text(out, kind);
}

fn hashes(out: &mut Vec<u8>, hashes: &[BlockHash]) {
    field(out, "block_hashes");
    array(out, hashes.len());
    for hash in hashes {
        self::hash(out, hash);
    }
}

fn hash(out: &mut Vec<u8>, hash: &BlockHash) {
    match hash {
        BlockHash::Bytes(bytes) => {
            out.push(0xc6);
            out.extend((bytes.len() as u32).to_be_bytes());
            out.extend(bytes.iter());
        }
        BlockHash::Number(value) if *value < 0 => {
            out.push(0xd3);
            out.extend((*value as i64).to_be_bytes());
        }
        // What engines write has 64 bits.
        BlockHash::Number(value) => number(out, *value as u64),
    }
}

fn field(out: &mut Vec<u8>, name: &str) {
    text(out, name);
}

fn text(out: &mut Vec<u8>, text: &str) {
    match text.len() {
        short @ 0..=31 => out.push(0xa0 | short as u8),
        long => {
            // As msgspec and all others do: the shortest form.
            match (u8::try_from(long), u16::try_from(long)) {
                (Ok(length), _) => out.extend([0xd9, length]),
                (_, Ok(length)) => {
                    out.push(0xda);
                    out.extend(length.to_be_bytes());
                }
                _ => {
                    out.push(0xdb);
                    out.extend((long as u32).to_be_bytes());
                }
            }
        }
    }
    out.extend(text.as_bytes());
}

fn optional_text(out: &mut Vec<u8>, text: Option<&str>) {
    match text {
        Some(text) => self::text(out, text),
        None => out.push(0xc0),
    }
}

fn number(out: &mut Vec<u8>, number: u64) {
    match (u8::try_from(number), u32::try_from(number)) {
        (Ok(small @ 0..=0x7f), _) => out.push(small),
        (_, Ok(middle)) => {
            out.push(0xce);
            out.extend(middle.to_be_bytes());
        }
        _ => {
            out.push(0xcf);
            out.extend(number.to_be_bytes());
        }
    }
}

fn optional_number(out: &mut Vec<u8>, number: Option<u32>) {
    match number {
        Some(number) => self::number(out, number.into()),
        None => out.push(0xc0),
    }
}

fn array(out: &mut Vec<u8>, length: usize) {
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short @ 0..=15), _) => out.push(0x90 | short),
        (_, Ok(length)) => {
            out.push(0xdc);
            out.extend(length.to_be_bytes());
        }
        _ => {
            out.push(0xdd);
            out.extend((length as u32).to_be_bytes());
        }
    }
}

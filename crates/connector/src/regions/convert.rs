//! What received blocks need before they can be used: reordering and zeroing, as pure byte moves.

use std::ops::Range;

/// The inside of one layer's block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// KV heads.
    pub heads: usize,
    /// Tokens.
    pub tokens: usize,
    /// Bytes of one head and token.
    pub content_bytes: usize,
}

impl BlockShape {
    /// Bytes of the block; none beyond the address space.
    pub fn bytes(&self) -> Option<usize> {
        self.heads.checked_mul(self.tokens)?.checked_mul(self.content_bytes)
    }
}

/// A block that does not have the shape it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a block of {got} bytes does not have the expected shape")]
pub struct ShapeMismatch {
    /// Bytes of the block.
    pub got: usize,
}

/// How far a receive reaches into a request's local blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// Blocks that are filled.
    pub full_blocks: usize,
    /// Pieces of the next block that are filled; 0 when none is begun.
    pub pieces_in_last: usize,
    /// The first block that holds nothing that was received.
    pub first_stale: usize,
}

/// What `remote_blocks` fill of `local_blocks` blocks of `ratio` pieces.
///
/// Everything behind must be zeroed: it was left out both of the transfer and of the zeroing at
/// allocation, and old contents would be read as soon as decode grows into it.
pub fn coverage(local_blocks: usize, remote_blocks: usize, ratio: usize) -> Coverage {
    let ratio = ratio.max(1);
    let covered = local_blocks.saturating_mul(ratio).min(remote_blocks);
    let (full_blocks, pieces_in_last) = (covered / ratio, covered % ratio);
    Coverage { full_blocks, pieces_in_last, first_stale: full_blocks + usize::from(pieces_in_last > 0) }
}

/// Byte ranges of a block behind its first `tokens` tokens.
pub fn tail_ranges(shape: BlockShape, head_major: bool, tokens: usize) -> Vec<Range<usize>> {
    let (Some(bytes), kept) = (shape.bytes(), tokens.min(shape.tokens)) else { return Vec::new() };
    if kept == shape.tokens {
        return Vec::new();
    }
    if !head_major {
        return std::iter::once(kept * shape.heads * shape.content_bytes..bytes).collect();
    }
    let head = shape.tokens * shape.content_bytes;
    (0..shape.heads).map(|index| index * head + kept * shape.content_bytes..(index + 1) * head).collect()
}

/// Turns `ratio` consecutive head-major pieces into one head-major block.
///
/// # Errors
/// A block of another size, tokens that are no multiple of `ratio`.
pub fn regroup_heads(block: &mut [u8], shape: BlockShape, ratio: usize) -> Result<(), ShapeMismatch> {
    let piece_tokens = check(block, shape, ratio)?;
    let received = block.to_vec();
    let run = piece_tokens * shape.content_bytes;
    for piece in 0..ratio {
        for head in 0..shape.heads {
            let from = (piece * shape.heads + head) * run;
            let to = (head * ratio + piece) * run;
            block[to..to + run].copy_from_slice(&received[from..from + run]);
        }
    }
    Ok(())
}

/// Turns `ratio` consecutive head-major pieces into one token-major block.
///
/// # Errors
/// A block of another size, tokens that are no multiple of `ratio`.
pub fn regroup_and_permute(block: &mut [u8], shape: BlockShape, ratio: usize) -> Result<(), ShapeMismatch> {
    let piece_tokens = check(block, shape, ratio)?;
    let received = block.to_vec();
    let run = shape.content_bytes;
    for piece in 0..ratio {
        for head in 0..shape.heads {
            for token in 0..piece_tokens {
                let from = ((piece * shape.heads + head) * piece_tokens + token) * run;
                let to = ((piece * piece_tokens + token) * shape.heads + head) * run;
                block[to..to + run].copy_from_slice(&received[from..from + run]);
            }
        }
    }
    Ok(())
}

fn check(block: &[u8], shape: BlockShape, ratio: usize) -> Result<usize, ShapeMismatch> {
    let fits = ratio > 0 && shape.tokens.is_multiple_of(ratio) && shape.bytes() == Some(block.len());
    if fits { Ok(shape.tokens / ratio) } else { Err(ShapeMismatch { got: block.len() }) }
}

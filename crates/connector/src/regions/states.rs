//! State of state-space layers: the parts of a page and where a rank's share of them lies.

use thiserror::Error;

/// A state shape that does not decompose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ConvError {
    /// The parts do not add up to the width of the convolution state.
    #[error("a convolution of width {width} does not decompose with a temporal state of {temporal}")]
    Shape {
        /// Width of the convolution state on this rank.
        width: u64,
        /// Width that the temporal state accounts for.
        temporal: u64,
    },
    /// A size beyond 64 bits.
    #[error("a state size is out of range")]
    Overflow,
}

/// The convolution state of one page, cut into the projections that are sharded separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvSplit {
    /// Bytes of each projection on this rank, in memory order.
    pub part_bytes: Vec<u64>,
}

impl ConvSplit {
    /// Parts of the given widths.
    ///
    /// # Errors
    /// Sizes beyond 64 bits.
    pub fn new(widths: &[u64], rows: u64, element_bytes: u64) -> Result<Self, ConvError> {
        let row = rows.checked_mul(element_bytes).ok_or(ConvError::Overflow)?;
        let part_bytes: Option<Vec<u64>> = widths.iter().map(|width| width.checked_mul(row)).collect();
        let part_bytes = part_bytes.ok_or(ConvError::Overflow)?;
        part_bytes.iter().try_fold(0_u64, |sum, part| sum.checked_add(*part)).ok_or(ConvError::Overflow)?;
        Ok(Self { part_bytes })
    }

    /// Mamba 1: one projection, as wide as the temporal state.
    ///
    /// # Errors
    /// Widths that differ, sizes beyond 64 bits.
    pub fn mamba1(
        conv_width: u64,
        temporal_width: u64,
        rows: u64,
        element_bytes: u64,
    ) -> Result<Self, ConvError> {
        if conv_width != temporal_width {
            return Err(ConvError::Shape { width: conv_width, temporal: temporal_width });
        }
        Self::new(&[conv_width], rows, element_bytes)
    }

    /// Mamba 2: the inner projection and two equal state projections.
    ///
    /// # Errors
    /// Widths that leave no two equal parts, sizes beyond 64 bits.
    pub fn mamba2(
        conv_width: u64,
        heads: u64,
        head_dim: u64,
        tp: u64,
        rows: u64,
        element_bytes: u64,
    ) -> Result<Self, ConvError> {
        let inner = heads.checked_mul(head_dim).ok_or(ConvError::Overflow)?;
        let error = ConvError::Shape { width: conv_width, temporal: inner };
        let rest = conv_width.checked_sub(inner).and_then(|rest| rest.checked_mul(tp)).ok_or(error)?;
        if rest == 0 || !rest.is_multiple_of(2) || tp == 0 {
            return Err(error);
        }
        let state = rest / 2 / tp;
        Self::new(&[inner, state, state], rows, element_bytes)
    }

    /// Gated delta net: query and key of equal width, then the value.
    ///
    /// # Errors
    /// Widths that leave no two equal parts, sizes beyond 64 bits.
    pub fn gated_delta_net(
        conv_width: u64,
        value_heads: u64,
        value_dim: u64,
        rows: u64,
        element_bytes: u64,
    ) -> Result<Self, ConvError> {
        let value = value_heads.checked_mul(value_dim).ok_or(ConvError::Overflow)?;
        let error = ConvError::Shape { width: conv_width, temporal: value };
        let rest = conv_width.checked_sub(value).ok_or(error)?;
        if rest == 0 || !rest.is_multiple_of(2) {
            return Err(error);
        }
        Self::new(&[rest / 2, rest / 2, value], rows, element_bytes)
    }

    /// Offset and bytes of each part in the local page.
    pub fn local_offsets(&self) -> Vec<(u64, u64)> {
        let mut offset = 0_u64;
        self.part_bytes
            .iter()
            .map(|bytes| {
                let start = offset;
                offset = offset.saturating_add(*bytes);
                (start, *bytes)
            })
            .collect()
    }

    /// Offset and bytes of this rank's share of each part in a remote page.
    ///
    /// With a positive ratio the remote page is larger and `share` counts within it; with a
    /// negative one the whole of a smaller page is read. None when an offset has no 64 bits.
    pub fn remote_offsets(&self, share: u64, tp_ratio: i64) -> Option<Vec<(u64, u64)>> {
        let ratio = tp_ratio.unsigned_abs().max(1);
        let mut base = 0_u64;
        let mut offsets = Vec::with_capacity(self.part_bytes.len());
        for bytes in &self.part_bytes {
            if tp_ratio >= 1 {
                offsets.push((base.checked_add(share.checked_mul(*bytes)?)?, *bytes));
                base = base.checked_add(bytes.checked_mul(ratio)?)?;
            } else {
                offsets.push((base, bytes / ratio));
                base = base.checked_add(bytes / ratio)?;
            }
        }
        Some(offsets)
    }
}

/// The state-space layers of the local rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateGeometry {
    /// Parts of the convolution state.
    pub conv: ConvSplit,
    /// Bytes of the convolution and of the temporal state per logical block.
    pub sizes: [u64; 2],
    /// Logical blocks.
    pub num_blocks: u64,
    /// Regions that hold state; empty means all of them.
    pub regions: Vec<usize>,
    /// Regions of circular attention buffers, ascending.
    pub scratch_regions: Vec<usize>,
    /// Region and kernel page bytes of per-layer embeddings.
    pub ple: Option<(usize, u64)>,
}

impl StateGeometry {
    /// Regions that hold state, of `count` regions in all.
    pub fn state_regions(&self, count: usize) -> Vec<usize> {
        if self.regions.is_empty() { (0..count).collect() } else { self.regions.clone() }
    }

    /// Descriptor regions of the state: every part of every region, and the temporal states.
    pub fn descriptor_regions(&self, count: usize) -> u64 {
        let per_region = self.conv.part_bytes.len() as u64 + 1;
        let regions = if self.regions.is_empty() { count } else { self.regions.len() };
        per_region.saturating_mul(regions as u64)
    }
}

//! The orders in which a cache stores layers, blocks, heads, tokens and contents.

/// Physical order of a KV cache, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// v2: head, token, content inside a block.
    Hnd,
    /// v2: token, head, content inside a block.
    Nhd,
    /// Layer, block, head, token, content; what a connector asks for.
    Lbhnc,
    /// Layer, block, token, head, content.
    Lbnhc,
    /// Layer, head, block, token, content.
    Lhbnc,
    /// Block, layer, head, token, content.
    Blhnc,
    /// Block, layer, token, head, content.
    Blnhc,
    /// Block, head, layer, token, content.
    Bhlnc,
}

impl Layout {
    /// All names of both generations.
    pub const ALL: [Self; 8] =
        [Self::Hnd, Self::Nhd, Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// The name in agent metadata.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hnd => "HND",
            Self::Nhd => "NHD",
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }

    /// The layout of that name, if there is one.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|layout| layout.as_str() == name)
    }

    /// The full five-letter order; v2 names have layers and blocks outermost.
    pub fn order(self) -> [Axis; 5] {
        use Axis::{Block, Content, Head, Layer, Token};
        match self {
            Self::Hnd | Self::Lbhnc => [Layer, Block, Head, Token, Content],
            Self::Nhd | Self::Lbnhc => [Layer, Block, Token, Head, Content],
            Self::Lhbnc => [Layer, Head, Block, Token, Content],
            Self::Blhnc => [Block, Layer, Head, Token, Content],
            Self::Blnhc => [Block, Layer, Token, Head, Content],
            Self::Bhlnc => [Block, Head, Layer, Token, Content],
        }
    }

    /// Whether the heads of a block follow one another, so that a slice of heads is one run.
    pub fn is_block_contiguous(self) -> bool {
        matches!(self.order(), [_, _, Axis::Head, Axis::Token, Axis::Content])
    }

    /// Whether all layers of a block lie together.
    pub fn is_block_outermost(self) -> bool {
        self.order()[0] == Axis::Block
    }

    /// Whether each layer is one run of memory.
    pub fn is_layer_compact(self) -> bool {
        self.order()[0] == Axis::Layer
    }

    /// Whether one layer's part of a block is one run of memory.
    pub fn is_block_compact(self) -> bool {
        let place = |axis| self.order().iter().position(|other| *other == axis);
        place(Axis::Head) > place(Axis::Block) && place(Axis::Head) > place(Axis::Layer)
    }

    /// Byte strides of layer, block, head, token and content for extents in the same order.
    ///
    /// None when the whole cache has no size in 64 bits.
    pub fn strides(self, extents: [u64; 5], content_bytes: u64) -> Option<[u64; 5]> {
        let mut strides = [0; 5];
        let mut stride = content_bytes;
        for axis in self.order().into_iter().rev() {
            strides[axis as usize] = stride;
            stride = stride.checked_mul(extents[axis as usize])?;
        }
        Some(strides)
    }
}

/// One dimension of a KV cache; its value is the index in extents and strides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Layer.
    Layer = 0,
    /// Block.
    Block = 1,
    /// KV head or head slot.
    Head = 2,
    /// Token or state within a block.
    Token = 3,
    /// Content of one token and head, key and value together.
    Content = 4,
}

//! Host and device memory on one rank: where regions lie and how a mixed list is divided.

use crate::transport::{Descriptor, MemoryType};

use super::Region;

/// The kind of memory a KV buffer device names; a platform may name its own.
///
/// None for a device that neither the platform nor the connector knows.
pub fn kv_buffer_memory(device: &str, platform: &[(&str, MemoryType)]) -> Option<MemoryType> {
    if let Some((_, memory)) = platform.iter().find(|(name, _)| *name == device) {
        return Some(*memory);
    }
    match device {
        "cuda" | "xpu" => Some(MemoryType::Vram),
        "cpu" => Some(MemoryType::Dram),
        _ => None,
    }
}

/// Whether a rank leaves host memory to rank 0, which fills a pool that all ranks share.
pub fn shares_host_pool(mixed: bool, shared_host_pool: bool, tp_rank: u32) -> bool {
    mixed && shared_host_pool && tp_rank != 0
}

/// How the one list of local descriptors is divided between host and device memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemorySplit {
    /// Per descriptor: its kind of memory and its place among those of the same kind.
    places: Vec<(MemoryType, u64)>,
}

/// Local and remote descriptor ids of one transfer.
pub type IdPairs = (Vec<u64>, Vec<u64>);

impl MemorySplit {
    /// The division for blocks cut into `sub_blocks`; none when all regions are of one kind.
    pub fn new(regions: &[Region], sub_blocks: u64) -> Option<Self> {
        let first = regions.first()?.memory;
        if regions.iter().all(|region| region.memory == first) {
            return None;
        }
        let (mut dram, mut vram) = (0_u64, 0_u64);
        let mut places = Vec::new();
        for region in regions {
            let next = match region.memory {
                MemoryType::Dram => &mut dram,
                MemoryType::Vram => &mut vram,
            };
            for _ in 0..region.num_blocks.saturating_mul(sub_blocks.max(1)).min(super::MAX_DESCRIPTORS) {
                places.push((region.memory, *next));
                *next += 1;
            }
        }
        Some(Self { places })
    }

    /// Divides a list into its host part, whose device is 0, and its device part.
    pub fn divide(&self, list: &[Descriptor]) -> (Vec<Descriptor>, Vec<Descriptor>) {
        let (mut dram, mut vram) = (Vec::new(), Vec::new());
        for (descriptor, (memory, _)) in list.iter().zip(&self.places) {
            match memory {
                MemoryType::Dram => dram.push(Descriptor { device: 0, ..*descriptor }),
                MemoryType::Vram => vram.push(*descriptor),
            }
        }
        (dram, vram)
    }

    /// Divides paired ids into those of the host list and those of the device list.
    ///
    /// None when a local id is beyond the list or the two sides differ in number.
    pub fn translate(&self, local: &[u64], remote: &[u64]) -> Option<(IdPairs, IdPairs)> {
        if local.len() != remote.len() {
            return None;
        }
        let (mut dram, mut vram) = (IdPairs::default(), IdPairs::default());
        for (local, remote) in local.iter().zip(remote) {
            let (memory, place) = *self.places.get(usize::try_from(*local).ok()?)?;
            let pairs = match memory {
                MemoryType::Dram => &mut dram,
                MemoryType::Vram => &mut vram,
            };
            pairs.0.push(place);
            pairs.1.push(*remote);
        }
        Some((dram, vram))
    }
}

//! Prepared lists over this rank's memory: whole blocks per block size, slices per source rank.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::regions::descriptors::{local_descriptors, split_local_descriptors};
use crate::regions::{DescriptorIndex, LocalGeometry, MemorySplit, PeerGeometry};
use crate::transport::{Descriptor, ListId, MemoryType, Transport};

use super::config::{HandshakeError, WorkerSetupError};
use super::log_failed;

/// One list of descriptors as the transport knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PreparedList {
    One(ListId),
    /// Divided by kind of memory.
    Mixed {
        dram: ListId,
        vram: ListId,
    },
}

/// What decides how local blocks are cut into slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SliceKey {
    tp_ratio: i64,
    remote_block_size: u64,
    remote_dcp: u32,
}

/// Lists and index of blocks cut into as many pieces as a remote block size asks for.
#[derive(Debug)]
pub(super) struct SubBlocks {
    pub(super) list: PreparedList,
    pub(super) index: DescriptorIndex,
    pub(super) division: Option<MemorySplit>,
}

/// All lists over this rank's memory; they live until shutdown.
#[derive(Debug, Default)]
pub(super) struct LocalLists {
    by_ratio: HashMap<u64, SubBlocks>,
    slices: HashMap<SliceKey, Vec<PreparedList>>,
}

impl LocalLists {
    /// The lists every worker has: its blocks as they are.
    pub(super) fn whole(
        transport: &mut impl Transport,
        local: &LocalGeometry,
    ) -> Result<Self, WorkerSetupError> {
        let list = local_descriptors(local, 1)?;
        let division = MemorySplit::new(&local.regions, 1);
        let prepared = prepare(transport, local, &list, division.as_ref())?;
        let index = DescriptorIndex::local(local, 1)?;
        let whole = SubBlocks { list: prepared, index, division };
        Ok(Self { by_ratio: HashMap::from([(1, whole)]), slices: HashMap::new() })
    }

    /// Prepares what transfers with `peer` need, unless it is there already.
    pub(super) fn prepare_for(
        &mut self,
        transport: &mut impl Transport,
        local: &LocalGeometry,
        peer: &PeerGeometry,
    ) -> Result<(), HandshakeError> {
        let ratio = peer.block_size_ratio;
        let key = slice_key(peer);
        let needs_slices = peer.mapping.needs_split(local.topology.is_mla) && !self.slices.contains_key(&key);
        if self.by_ratio.contains_key(&ratio) && !needs_slices {
            return Ok(());
        }
        let list = local_descriptors(local, ratio)?;
        let division = MemorySplit::new(&local.regions, ratio);
        if needs_slices {
            let mut prepared = Vec::new();
            for slice in split_local_descriptors(local, &peer.mapping, &list, ratio)? {
                match prepare(transport, local, &slice, division.as_ref()) {
                    Ok(list) => prepared.push(list),
                    Err(error) => {
                        prepared.into_iter().for_each(|list| release(transport, list));
                        return Err(error.into());
                    }
                }
            }
            self.slices.insert(key, prepared);
        }
        if let Entry::Vacant(vacant) = self.by_ratio.entry(ratio) {
            let index = DescriptorIndex::local(local, ratio)?;
            let list = prepare(transport, local, &list, division.as_ref())?;
            vacant.insert(SubBlocks { list, index, division });
        }
        Ok(())
    }

    pub(super) fn sub_blocks(&self, peer: &PeerGeometry) -> Option<&SubBlocks> {
        self.by_ratio.get(&peer.block_size_ratio)
    }

    /// The slices of local blocks in the order of the peer's source ranks.
    pub(super) fn slices(&self, peer: &PeerGeometry) -> Option<&[PreparedList]> {
        self.slices.get(&slice_key(peer)).map(Vec::as_slice)
    }

    pub(super) fn release_all(&mut self, transport: &mut impl Transport) {
        for (_, whole) in self.by_ratio.drain() {
            release(transport, whole.list);
        }
        for list in self.slices.drain().flat_map(|(_, lists)| lists) {
            release(transport, list);
        }
    }
}

fn slice_key(peer: &PeerGeometry) -> SliceKey {
    SliceKey {
        tp_ratio: peer.mapping.tp_ratio,
        remote_block_size: peer.topology.block_size,
        remote_dcp: peer.topology.sizes.dcp,
    }
}

fn release(transport: &mut impl Transport, list: PreparedList) {
    let lists = match list {
        PreparedList::One(list) => vec![list],
        PreparedList::Mixed { dram, vram } => vec![dram, vram],
    };
    for list in lists {
        log_failed("release a list of local descriptors", transport.release_list(list));
    }
}

fn prepare(
    transport: &mut impl Transport,
    local: &LocalGeometry,
    list: &[Descriptor],
    division: Option<&MemorySplit>,
) -> Result<PreparedList, crate::transport::TransportError> {
    let Some(division) = division else {
        let memory = local.regions.first().map_or(MemoryType::Dram, |region| region.memory);
        return transport.prepare_local(memory, list).map(PreparedList::One);
    };
    let (host, device) = division.divide(list);
    let dram = transport.prepare_local(MemoryType::Dram, &host)?;
    match transport.prepare_local(MemoryType::Vram, &device) {
        Ok(vram) => Ok(PreparedList::Mixed { dram, vram }),
        Err(error) => {
            log_failed("release a list of local descriptors", transport.release_list(dram));
            Err(error)
        }
    }
}

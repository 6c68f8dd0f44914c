//! The rules in the order in which a handshake meets them.

use crate::protocol::params::TransferMode;
use crate::regions::descriptors::{DescriptorError, remote_descriptors, split_local_descriptors};
use crate::regions::{
    DescriptorIndex, LocalGeometry, MAX_DESCRIPTORS, PeerGeometry, PeerRequest, validate_peer,
};
use crate::topology::{ParallelSizes, handshake_ranks};
use crate::worker::HandshakeError;

use super::local::{Guess, Shape, geometry, guesses};
use super::{Fit, Misfit, PublishedEngine, PublishedRank, Side, Unknown};

/// Most distinct groups of regions that are believed; more is nonsense.
const MAX_RANKS: u32 = 4096;

/// One side of a handshake.
struct Party<'a> {
    side: Side,
    engine: &'a PublishedEngine<'a>,
    first: &'a PublishedRank<'a>,
    sizes: ParallelSizes,
    stages: u32,
}

impl<'a> Party<'a> {
    fn of(side: Side, engine: &'a PublishedEngine<'a>) -> Result<Self, Stop> {
        let Some(first) = engine.ranks.first() else { return Err(Unknown::Payloads(side).into()) };
        for rank in &engine.ranks {
            let disagree = |what| Err(Misfit::RanksDisagree { side, what }.into());
            if rank.metadata.generation() != first.metadata.generation() {
                return disagree("connector version");
            }
            if rank.compatibility_hash != first.compatibility_hash {
                return disagree("compatibility hash");
            }
        }
        let beyond = |rank: fn(&PublishedRank<'_>) -> u32| {
            engine.ranks.iter().map(rank).max().unwrap_or(0).saturating_add(1)
        };
        let dcp = engine.traits.dcp_size.unwrap_or_else(|| Shape::of(first).dcp_size());
        Ok(Self {
            side,
            engine,
            first,
            sizes: ParallelSizes {
                tp: engine.traits.tp_size.unwrap_or_else(|| beyond(|rank| rank.tp_rank)),
                dcp,
            },
            stages: engine.traits.pp_size.unwrap_or_else(|| beyond(|rank| rank.pp_rank)),
        })
    }

    fn rank(&self, pp_rank: u32, tp_rank: u32) -> Result<&'a PublishedRank<'a>, Misfit> {
        let found = self.engine.ranks.iter().find(|rank| (rank.pp_rank, rank.tp_rank) == (pp_rank, tp_rank));
        found.ok_or(Misfit::MissingRank { side: self.side, pp_rank, tp_rank })
    }

    /// A rank of its own, which it knows even if it has not published it yet.
    fn own_rank(&self, tp_rank: u32) -> &'a PublishedRank<'a> {
        self.rank(0, tp_rank).unwrap_or(self.first)
    }

    fn refuses(&self, tp_rank: u32, error: impl Into<HandshakeError>) -> Misfit {
        Misfit::Refused { side: self.side, tp_rank, error: Box::new(error.into()) }
    }
}

/// Why the judgement ends early.
enum Stop {
    Misfit(Misfit),
    Unknown(Unknown),
}

impl From<Misfit> for Stop {
    fn from(misfit: Misfit) -> Self {
        Self::Misfit(misfit)
    }
}

impl From<Unknown> for Stop {
    fn from(unknown: Unknown) -> Self {
        Self::Unknown(unknown)
    }
}

/// Foresees the handshakes of all ranks of a decode and a prefill engine.
///
/// What the transport itself may object to is not foreseen.
///
/// # Errors
/// Why they would fail.
pub fn judge(prefill: &PublishedEngine<'_>, decode: &PublishedEngine<'_>) -> Result<Fit, Misfit> {
    match examine(prefill, decode) {
        Ok(()) => Ok(Fit::Passes),
        Err(Stop::Unknown(unknown)) => Ok(Fit::Unknown(unknown)),
        Err(Stop::Misfit(misfit)) => Err(misfit),
    }
}

fn examine(prefill: &PublishedEngine<'_>, decode: &PublishedEngine<'_>) -> Result<(), Stop> {
    if prefill.engine_id == decode.engine_id {
        return Err(Misfit::OwnEngine.into());
    }
    if let (Some(p), Some(d)) = (prefill.model, decode.model)
        && p != d
    {
        return Err(Misfit::Models { prefill: p.to_owned(), decode: d.to_owned() }.into());
    }
    let modes = (prefill.traits.transfer_mode, decode.traits.transfer_mode);
    if let (Some(p), Some(d)) = modes
        && p != d
    {
        return Err(Misfit::Modes { prefill: p, decode: d }.into());
    }
    let p = Party::of(Side::Prefill, prefill)?;
    let d = Party::of(Side::Decode, decode)?;
    let generations = (p.first.metadata.generation(), d.first.metadata.generation());
    if generations.0 != generations.1 {
        return Err(Misfit::Generations { prefill: generations.0, decode: generations.1 }.into());
    }
    let push = modes.0.or(modes.1) == Some(TransferMode::Push);
    let enforced = |party: &Party<'_>| party.engine.traits.enforce_compat.unwrap_or(true);
    if p.first.compatibility_hash != d.first.compatibility_hash && (enforced(&d) || push && enforced(&p)) {
        let [prefill, decode] = [&p, &d].map(|party| party.first.compatibility_hash.to_owned());
        return Err(Misfit::Hashes { prefill, decode }.into());
    }
    if push {
        notifies(&d, &p)?;
        return connects(&p, &d, ParallelSizes::tp(d.sizes.tp));
    }
    if p.stages > 1 {
        return Err(d.refuses(0, HandshakeError::PipelineStages(p.stages)).into());
    }
    connects(&d, &p, p.sizes)
}

/// The handshake for notifications alone, which looks at no memory.
fn notifies(local: &Party<'_>, remote: &Party<'_>) -> Result<(), Stop> {
    for tp_rank in 0..local.sizes.tp.min(MAX_RANKS) {
        let ranks = handshake_ranks(tp_rank, local.sizes, ParallelSizes::tp(remote.sizes.tp))
            .map_err(|error| local.refuses(tp_rank, error))?;
        for stage in 0..remote.stages.min(MAX_RANKS) {
            for rank in &ranks {
                remote.rank(stage, *rank)?;
            }
        }
    }
    Ok(())
}

/// The whole handshake of every local rank.
fn connects(local: &Party<'_>, remote: &Party<'_>, sizes: ParallelSizes) -> Result<(), Stop> {
    if local.stages > 1 {
        return Err(Unknown::Stages(local.side).into());
    }
    let (own, theirs) = (Shape::of(local.first), Shape::of(remote.first));
    if own.has_states() || theirs.has_states() {
        // How the state is cut is not published; equal shapes of equal engines need no cutting.
        let equal = own.is_like(&theirs) && local.sizes == remote.sizes;
        return if equal { Ok(()) } else { Err(Unknown::States.into()) };
    }
    let mut passed = 0;
    let mut refused = None;
    for guess in guesses(local.engine.traits, remote.engine.traits, [local.sizes.tp, sizes.tp]) {
        match connects_if(local, remote, sizes, guess) {
            Ok(()) => passed += 1,
            Err(misfit) => refused = refused.or(Some(misfit)),
        }
    }
    match refused {
        None => Ok(()),
        Some(misfit) if passed == 0 => Err(misfit.into()),
        Some(_) => Err(Unknown::Traits(local.side).into()),
    }
}

fn connects_if(
    local: &Party<'_>,
    remote: &Party<'_>,
    sizes: ParallelSizes,
    guess: Guess,
) -> Result<(), Misfit> {
    for tp_rank in 0..local.sizes.tp.min(MAX_RANKS) {
        let refuses = |error| local.refuses(tp_rank, error);
        let ranks = handshake_ranks(tp_rank, local.sizes, sizes).map_err(|error| refuses(error.into()))?;
        let metadata = local.own_rank(tp_rank).metadata;
        let engine = local.engine;
        let place = (tp_rank, local.sizes);
        let Some(memory) = geometry(engine.engine_id, engine.traits, place, metadata, guess) else {
            return Err(Misfit::RanksDisagree { side: local.side, what: "sizes, which make no sense" });
        };
        let mut known: Option<PeerGeometry> = None;
        for rank in ranks {
            let published = remote.rank(0, rank)?;
            let request = PeerRequest { engine_id: remote.engine.engine_id, sizes, known: known.as_ref() };
            let memory = named_like(&memory, published);
            let peer = validate_peer(&memory, &request, published.metadata)
                .map_err(|error| refuses(error.into()))?;
            describes(&memory, &peer).map_err(refuses)?;
            known = known.or(Some(peer));
        }
    }
    Ok(())
}

/// Regions without published names take the peer's, which is as it is when both follow one model.
fn named_like(local: &LocalGeometry, remote: &PublishedRank<'_>) -> LocalGeometry {
    use crate::protocol::metadata::NixlAgentMetadata;
    let mut named = local.clone();
    if let NixlAgentMetadata::V14(metadata) = remote.metadata
        && named.regions.iter().all(|region| region.name.is_empty())
        && let Some(names) = &metadata.region_names
    {
        for (region, name) in named.regions.iter_mut().zip(names) {
            region.name.clone_from(name);
        }
    }
    named
}

/// Whether the lists of blocks can be made, without making all of their entries.
fn describes(local: &LocalGeometry, peer: &PeerGeometry) -> Result<(), HandshakeError> {
    let mut count = 0_u64;
    for (index, region) in peer.regions.iter().enumerate() {
        count = count.saturating_add(region.num_blocks);
        let last = region.num_blocks.saturating_sub(1).checked_mul(region.block_stride);
        let end = last.and_then(|last| region.base_address.checked_add(last)?.checked_add(region.block_len));
        if end.is_none() {
            return Err(DescriptorError::AddressOverflow { region: index }.into());
        }
    }
    let own = local.regions.iter().map(|region| region.num_blocks.saturating_mul(peer.block_size_ratio));
    let count = count.max(own.fold(0, u64::saturating_add));
    if count > MAX_DESCRIPTORS {
        return Err(DescriptorError::TooMany { count }.into());
    }
    DescriptorIndex::remote(local, peer)?;
    DescriptorIndex::local(local, peer.block_size_ratio)?;
    let (mut one, mut other) = (local.clone(), peer.clone());
    one.regions.iter_mut().for_each(|region| region.num_blocks = region.num_blocks.min(1));
    other.regions.iter_mut().for_each(|region| region.num_blocks = region.num_blocks.min(1));
    remote_descriptors(&one, &other)?;
    if peer.mapping.needs_split(local.topology.is_mla) {
        let list = crate::regions::descriptors::local_descriptors(&one, peer.block_size_ratio)?;
        split_local_descriptors(&one, &peer.mapping, &list, peer.block_size_ratio)?;
    }
    Ok(())
}

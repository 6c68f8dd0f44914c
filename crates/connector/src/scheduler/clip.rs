//! Clipping block lists to what is exchanged: windows, states and groups that stay local.

use crate::error::EngineFatal;

use super::{GroupClip, SchedulerConfig};

/// The exchanged part of a request's blocks.
pub(super) fn clip(
    config: &SchedulerConfig,
    request: &str,
    groups: Vec<Vec<u64>>,
) -> Result<Vec<Vec<u64>>, EngineFatal> {
    check_groups(config, request, &groups)?;
    Ok(clip_groups(config, groups))
}

/// As [`clip`] for the blocks of one step, of which no state can be told yet; a step may bring none.
pub(super) fn clip_windows(
    config: &SchedulerConfig,
    request: &str,
    groups: Vec<Vec<u64>>,
) -> Result<Vec<Vec<u64>>, EngineFatal> {
    if !groups.is_empty() {
        check_groups(config, request, &groups)?;
    }
    Ok(clipped(config, groups, false))
}

pub(super) fn clip_groups(config: &SchedulerConfig, groups: Vec<Vec<u64>>) -> Vec<Vec<u64>> {
    clipped(config, groups, true)
}

fn check_groups(config: &SchedulerConfig, request: &str, groups: &[Vec<u64>]) -> Result<(), EngineFatal> {
    if groups.len() == config.groups.len() {
        return Ok(());
    }
    Err(EngineFatal::GroupCountMismatch {
        request: request.to_owned(),
        local: config.groups.len(),
        remote: groups.len(),
    })
}

fn clipped(config: &SchedulerConfig, groups: Vec<Vec<u64>>, clips_states: bool) -> Vec<Vec<u64>> {
    let exchanged = config.groups.iter().zip(groups).filter(|(clip, _)| **clip != GroupClip::Local);
    exchanged
        .map(|(clip, mut ids)| {
            match *clip {
                _ if !config.hybrid_allocator => {}
                GroupClip::Full | GroupClip::Local => {}
                GroupClip::SlidingWindow { blocks } => {
                    ids.drain(..ids.len().saturating_sub(blocks));
                }
                GroupClip::StateSpace { .. } if !clips_states => {}
                GroupClip::StateSpace { scratch_blocks } => {
                    let kept = ids.len() - scratch_blocks.min(ids.len().saturating_sub(1));
                    ids.truncate(kept);
                    ids.drain(..ids.len().saturating_sub(1));
                }
            }
            ids
        })
        .collect()
}

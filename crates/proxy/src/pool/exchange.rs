//! The exchange of peers when the settings change: all at once or not at all.
//! What is in flight with a peer that goes, goes on.

use std::sync::Arc;

use super::peer::{Peer, PeerSpec, PeerSpecError};
use super::{Pool, Snapshot, checked_name, is_same_place, numbered};

/// What an exchange did.
#[derive(Debug, Default)]
pub(crate) struct Exchanged {
    pub(crate) added: Vec<Arc<Peer>>,
    /// Peers whose place stays and whose description is another one.
    pub(crate) updated: Vec<Arc<Peer>>,
    pub(crate) removed: Vec<Arc<Peer>>,
}

impl Pool {
    /// Takes out the peers of these descriptions and puts in those of the others. A new peer at the
    /// place of an old one begins with what was learnt of it.
    ///
    /// # Errors
    /// Everything that is wrong with the new ones; then nothing has changed.
    pub(crate) fn exchange(
        &self,
        gone: &[PeerSpec],
        come: Vec<PeerSpec>,
    ) -> Result<Exchanged, Vec<PeerSpecError>> {
        let mut numbers = self.changes.lock();
        let current = self.snapshot.load();
        let is_gone = |peer: &Peer| !peer.standing.origin().gives_way() && gone.contains(&peer.spec);
        let old: Vec<Arc<Peer>> = current.all().filter(|peer| is_gone(peer)).cloned().collect();
        let mut next = Snapshot::clone(&current);
        next.retain(|peer| !is_gone(peer));
        let (mut exchanged, mut wrong) = (Exchanged::default(), Vec::new());
        let mut kept = vec![false; old.len()];
        let mut counts = *numbers;
        for spec in come {
            let before = old.iter().position(|peer| is_same_place(&peer.spec, &spec));
            let before = before.filter(|position| !kept[*position]);
            match entered(&mut next, &mut counts, spec, before.map(|position| &old[position]), &|peer| {
                self.watched(peer)
            }) {
                Ok(peer) => match before {
                    Some(position) => {
                        kept[position] = true;
                        exchanged.updated.push(peer);
                    }
                    None => exchanged.added.push(peer),
                },
                Err(error) => wrong.push(error),
            }
        }
        if !wrong.is_empty() {
            return Err(wrong);
        }
        if self.pairing.load().warm_up {
            exchanged.added.iter().for_each(|peer| peer.warmth.cool());
        }
        *numbers = counts;
        exchanged.removed =
            old.into_iter().zip(kept).filter(|(_, kept)| !kept).map(|(peer, _)| peer).collect();
        self.snapshot.store(Arc::new(next));
        self.mark();
        self.relearn();
        Ok(exchanged)
    }
}

fn entered(
    next: &mut Snapshot,
    counts: &mut [usize; 2],
    spec: PeerSpec,
    before: Option<&Arc<Peer>>,
    watched: &dyn Fn(Peer) -> Peer,
) -> Result<Arc<Peer>, PeerSpecError> {
    let id = match (&spec.name, before) {
        (Some(name), _) => checked_name(name)?,
        (None, Some(before)) if before.spec.name.is_none() => before.id.clone(),
        (None, _) => numbered(next, counts, spec.role),
    };
    let is_here = |peer: &Peer| is_same_place(&peer.spec, &spec);
    let gives_way = |peer: &Peer| peer.standing.origin().gives_way() && is_here(peer);
    let twin = next.all().find(|peer| (peer.id == id || is_here(peer)) && !gives_way(peer));
    if let Some(twin) = twin {
        return Err(PeerSpecError::Exists { id: twin.id.clone() });
    }
    let unnamed = next.all().find(|peer| gives_way(peer)).cloned();
    let mut peer = watched(Peer::new(id, spec.clone())?);
    if let Some(before) = before.or(unnamed.as_ref()) {
        peer.learns_from(before);
        peer.health = Arc::clone(&before.health);
    }
    next.retain(|peer| !gives_way(peer));
    let peer = Arc::new(peer);
    next.push(Arc::clone(&peer));
    Ok(peer)
}

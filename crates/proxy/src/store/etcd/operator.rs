//! What operators decide, shared: each router adds what was decided at it to what the store has.
//! Two decisions at two routers at the same time are both kept; about the same peer the later one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, KeyValue, Txn, TxnOp};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::Etcd;
use super::wire::{self, SCHEMA, ValueFault};
use crate::Proxy;
use crate::pool::{OperatorState, PeerSpec};

/// Pause after a write that failed while etcd seems to be there.
const PAUSE: Duration = Duration::from_millis(500);

/// The decisions as the store has them.
#[derive(Clone, Debug, Default)]
pub(super) struct Decided {
    /// 0 when it has none.
    revision: i64,
    value: Value,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Value {
    schema: u32,
    state: OperatorState,
}

impl Decided {
    /// # Errors
    /// The value cannot be read.
    pub(super) fn read(stored: &KeyValue) -> Result<Self, ValueFault> {
        Ok(Self { revision: stored.mod_revision(), value: wire::read(stored.value())? })
    }
}

impl Etcd {
    /// Takes the decisions as the store has them now.
    pub(super) fn take_decided(&self, stored: Option<&KeyValue>) {
        let decided = stored.map_or_else(|| Ok(Decided::default()), Decided::read);
        match decided {
            Ok(decided) => drop(self.decided.send_replace(Some(decided))),
            Err(fault) => tracing::warn!(%fault, "the operators' decisions in the store are not used"),
        }
    }

    /// Keeps the router's decisions and the store's the same until `stop`.
    pub(crate) async fn follow_decisions(self: Arc<Self>, proxy: Proxy, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.share(&proxy) => {}
        }
    }

    async fn share(&self, proxy: &Proxy) {
        let mut here = proxy.subscribe_operator_state();
        let (mut there, mut up) = (self.decided.subscribe(), self.up.subscribe());
        // What both had last.
        let mut agreed = OperatorState::default();
        loop {
            let mine = Arc::clone(&here.borrow_and_update());
            let stored = there.borrow_and_update().clone();
            let is_up = *up.borrow_and_update();
            if let Some(Decided { revision, value }) = stored {
                let merged = merge(&agreed, &mine, &value.state);
                if !same(&merged, &mine) {
                    proxy.apply_operator_state(merged.clone());
                    here.mark_unchanged();
                }
                let is_news = !same(&merged, &value.state);
                agreed = value.state;
                if is_news && is_up && !self.write_decided(revision, merged).await {
                    tokio::time::sleep(PAUSE).await;
                    up.mark_changed();
                }
            }
            // Their senders live as long as this.
            let _changed = tokio::select! {
                changed = here.changed() => changed,
                changed = there.changed() => changed,
                changed = up.changed() => changed,
            };
        }
    }

    /// Writes the decisions unless others did meanwhile, which is heard of; whether etcd could be asked.
    async fn write_decided(&self, revision: i64, state: OperatorState) -> bool {
        let key = self.keys.decided();
        let unchanged = Compare::mod_revision(key.as_str(), CompareOp::Equal, revision);
        let put = TxnOp::put(key, wire::write(&Value { schema: SCHEMA, state }), None);
        let answer = self.link.transact(Txn::new().when([unchanged]).and_then([put])).await;
        if let Err(fault) = &answer {
            tracing::info!(%fault, "the store did not take the operators' decisions");
        }
        answer.is_ok()
    }
}

/// What is written of two states is the same; tokens are not written.
fn same(one: &OperatorState, other: &OperatorState) -> bool {
    wire::write(one) == wire::write(other)
}

fn same_spec(one: &PeerSpec, other: &PeerSpec) -> bool {
    wire::write(one) == wire::write(other)
}

/// `theirs`, with what `mine` decided since both were `base`.
fn merge(base: &OperatorState, mine: &OperatorState, theirs: &OperatorState) -> OperatorState {
    OperatorState {
        added: merge_added(&base.added, &mine.added, &theirs.added),
        removed: merge_set(&base.removed, &mine.removed, &theirs.removed),
        drained: merge_set(&base.drained, &mine.drained, &theirs.drained),
        quarantined: merge_set(&base.quarantined, &mine.quarantined, &theirs.quarantined),
    }
}

fn merge_set<T: Ord + Clone>(base: &BTreeSet<T>, mine: &BTreeSet<T>, theirs: &BTreeSet<T>) -> BTreeSet<T> {
    let taken_back = |item: &&T| base.contains(*item) && !mine.contains(*item);
    let kept = theirs.iter().filter(|item| !taken_back(item));
    kept.chain(mine.difference(base)).cloned().collect()
}

fn merge_added(
    base: &BTreeMap<String, PeerSpec>,
    mine: &BTreeMap<String, PeerSpec>,
    theirs: &BTreeMap<String, PeerSpec>,
) -> BTreeMap<String, PeerSpec> {
    let mut merged = theirs.clone();
    merged.retain(|id, _| !base.contains_key(id) || mine.contains_key(id));
    for (id, spec) in mine {
        let is_news = base.get(id).is_none_or(|before| !same_spec(before, spec));
        // The same but for a token, which only the router has at which it was given.
        let is_fuller = merged.get(id).is_some_and(|theirs| same_spec(theirs, spec));
        if is_news || is_fuller {
            merged.insert(id.clone(), spec.clone());
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Role;

    fn drained(ids: &[&str]) -> OperatorState {
        let drained = ids.iter().map(|id| (*id).to_owned()).collect();
        OperatorState { drained, ..OperatorState::default() }
    }

    #[test]
    fn decisions_of_both_are_kept() {
        let (base, mine, theirs) = (drained(&["a", "b"]), drained(&["b", "c"]), drained(&["a", "d"]));
        assert_eq!(merge(&base, &mine, &theirs), drained(&["c", "d"]));
        assert_eq!(merge(&base, &base, &theirs), theirs);
        assert_eq!(merge(&base, &mine, &base), mine);
        assert_eq!(merge(&theirs, &theirs, &theirs), theirs);
    }

    #[test]
    fn added_peers_come_and_go_and_tokens_stay_where_they_were_given() {
        let added = |specs: &[(&str, &PeerSpec)]| OperatorState {
            added: specs.iter().map(|(id, spec)| ((*id).to_owned(), (*spec).clone())).collect(),
            ..OperatorState::default()
        };
        let plain = PeerSpec::new(Role::Decode, "http://10.0.0.1:1");
        let secret = PeerSpec { token: Some("t".to_owned()), ..plain.clone() };
        let (none, both) = (added(&[]), added(&[("x", &plain), ("y", &plain)]));
        assert_eq!(merge(&none, &added(&[("x", &plain)]), &added(&[("y", &plain)])), both);
        assert_eq!(merge(&both, &added(&[("y", &plain)]), &both), added(&[("y", &plain)]));
        let mine = added(&[("x", &secret)]);
        let stored = added(&[("x", &plain)]);
        assert_eq!(merge(&stored, &mine, &stored), mine);
        assert!(same(&mine, &stored));
    }
}

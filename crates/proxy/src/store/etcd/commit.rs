//! Changes: each one a transaction that compares what its plan was made on, so that of two engines
//! that want the same id or address at the same time one gets it and the other is told.

use std::collections::BTreeMap;
use std::future::Future;

use etcd_client::{Compare, CompareOp, DeleteOptions, PutOptions, Txn, TxnOp};

use super::Etcd;
use super::link::LinkFault;
use super::wire::{BATCH_BYTES, BATCH_OPERATIONS, EngineValue, PIECE, RankValue, Removal, SCHEMA, write};
use crate::registry::shared::{Plan, lease_seconds};
use crate::registry::{EngineRecord, Rank, RankView, Registry, RegistryError, Writer};

/// How often a change is planned anew because others changed the same.
const ATTEMPTS: usize = 5;

/// What became of a transaction, with the revision at which it was decided.
enum Outcome {
    Done(i64),
    /// What it compared is not so any more.
    Overtaken(i64),
}

/// The lease of an engine's keys.
#[derive(Clone, Copy)]
struct Lease {
    /// 0 when there is none.
    id: i64,
    /// Made for this change.
    fresh: bool,
}

impl Lease {
    fn options(self) -> PutOptions {
        PutOptions::new().with_lease(self.id)
    }
}

impl Etcd {
    /// Makes a plan true for all routers. It is made anew when others changed what it was made on.
    ///
    /// # Errors
    /// The plan cannot be made, what it takes was taken meanwhile, or etcd is away; it is then open
    /// whether etcd took the last try, and asking again settles that.
    pub(super) async fn commit(
        &self,
        mut plan: impl FnMut(&Registry) -> Result<Plan, RegistryError> + Send,
    ) -> Result<Plan, RegistryError> {
        let mut first: Option<Plan> = None;
        for _attempt in 0..ATTEMPTS {
            let planned = plan(&self.registry)?;
            if let Some(lost) = first.as_ref().and_then(|first| planned.lost_since(first)) {
                return Err(lost);
            }
            if planned.is_done() {
                return Ok(first.unwrap_or(planned));
            }
            match self.attempt(self.write(&planned)).await? {
                Outcome::Done(revision) => {
                    self.applied_within_deadline(revision).await;
                    return Ok(first.unwrap_or(planned));
                }
                Outcome::Overtaken(revision) if self.applied_within_deadline(revision).await => {}
                Outcome::Overtaken(_) => return Err(RegistryError::StoreUnavailable),
            }
            first.get_or_insert(planned);
        }
        let engine_id = first.map(|plan| plan.record.engine_id).unwrap_or_default();
        Err(RegistryError::Contended { engine_id })
    }

    /// Lets an engine leave on purpose; whether it was there.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub(super) async fn commit_removal(
        &self,
        writer: &Writer,
        engine_id: &str,
    ) -> Result<bool, RegistryError> {
        for _attempt in 0..ATTEMPTS {
            let Some(record) = self.registry.engine(engine_id) else { return Ok(false) };
            writer.may_change(&record)?;
            let stored = self.registry.stored(engine_id).filter(|stored| !stored.lost);
            let Some(stored) = stored else { return Ok(self.registry.remove(engine_id)) };
            match self.attempt(self.erase(&record, stored.revision)).await? {
                Outcome::Done(revision) => {
                    self.applied_within_deadline(revision).await;
                    self.end_lease(stored.lease).await;
                    return Ok(true);
                }
                Outcome::Overtaken(revision) if self.applied_within_deadline(revision).await => {}
                Outcome::Overtaken(_) => return Err(RegistryError::StoreUnavailable),
            }
        }
        Err(RegistryError::Contended { engine_id: engine_id.to_owned() })
    }

    /// Tries while etcd is there; nobody is kept waiting for one that is known to be away.
    async fn attempt(
        &self,
        exchange: impl Future<Output = Result<Outcome, LinkFault>>,
    ) -> Result<Outcome, RegistryError> {
        if !self.is_up() {
            return Err(RegistryError::StoreUnavailable);
        }
        exchange.await.map_err(|fault| {
            tracing::info!(%fault, "the store did not take a change");
            RegistryError::StoreUnavailable
        })
    }

    async fn write(&self, plan: &Plan) -> Result<Outcome, LinkFault> {
        let engine_id = &plan.record.engine_id;
        let lease = self.lease_for(plan).await?;
        let token = uuid::Uuid::new_v4().simple().to_string();
        let places = self.places_of(plan, lease);
        let place = |view: &RankView| {
            let known = places.get(&(view.pp_rank, view.tp_rank));
            known.filter(|known| known.sha256 == view.sha256).map_or(&token, |known| &known.token).clone()
        };
        let value = EngineValue::new(&plan.record, place);
        let outcome = async {
            self.put_payloads(&plan.record, &value, &token, lease).await?;
            self.put_engine(plan, &value, lease).await
        };
        let outcome = outcome.await;
        if matches!(outcome, Ok(Outcome::Done(_))) {
            let before = plan.stored.map_or(0, |stored| stored.lease);
            if before != lease.id {
                self.end_lease(before).await;
            }
        } else if lease.fresh {
            self.end_lease(lease.id).await;
        } else {
            self.delete_batch(engine_id, &token).await;
        }
        outcome
    }

    async fn lease_for(&self, plan: &Plan) -> Result<Lease, LinkFault> {
        let Some(ttl) = plan.record.ttl else { return Ok(Lease { id: 0, fresh: false }) };
        let same_ttl = plan.known.as_ref().is_some_and(|known| known.ttl == Some(ttl));
        let usable = plan.stored.filter(|stored| same_ttl && plan.same_life() && stored.lease != 0);
        Ok(match usable {
            Some(stored) => Lease { id: stored.lease, fresh: false },
            None => Lease { id: self.link.grant(lease_seconds(ttl)).await?, fresh: true },
        })
    }

    /// Where the payloads lie that are attached to this lease already.
    fn places_of(&self, plan: &Plan, lease: Lease) -> BTreeMap<Rank, RankValue> {
        let kept = plan.stored.filter(|stored| stored.lease == lease.id);
        let places = self.places.lock();
        let found = kept.and_then(|stored| {
            places.get(&plan.record.engine_id).filter(|(revision, _)| *revision == stored.revision)
        });
        let ranks = found.map(|(_, ranks)| ranks.as_slice()).unwrap_or_default();
        ranks.iter().map(|rank| (rank.rank(), rank.clone())).collect()
    }

    async fn put_payloads(
        &self,
        record: &EngineRecord,
        value: &EngineValue,
        token: &str,
        lease: Lease,
    ) -> Result<(), LinkFault> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for rank in value.ranks.iter().filter(|rank| rank.token == token) {
            let Some(view) = record.ranks.get(&rank.rank()) else { continue };
            for (index, piece) in view.payload.chunks(PIECE).enumerate() {
                if bytes + piece.len() > BATCH_BYTES || batch.len() == BATCH_OPERATIONS {
                    self.link.transact(Txn::new().and_then(std::mem::take(&mut batch))).await?;
                    bytes = 0;
                }
                let key = self.keys.piece(&record.engine_id, rank, index);
                batch.push(TxnOp::put(key, piece, Some(lease.options())));
                bytes += piece.len();
            }
        }
        if !batch.is_empty() {
            self.link.transact(Txn::new().and_then(batch)).await?;
        }
        Ok(())
    }

    async fn put_engine(&self, plan: &Plan, value: &EngineValue, lease: Lease) -> Result<Outcome, LinkFault> {
        let (record, engine_id) = (&plan.record, &plan.record.engine_id);
        let key = self.keys.engine(engine_id);
        let mut compares = vec![match plan.stored {
            Some(stored) => Compare::mod_revision(key.as_str(), CompareOp::Equal, stored.revision),
            None => Compare::version(key.as_str(), CompareOp::Equal, 0),
        }];
        let mut operations = vec![TxnOp::put(key, write(value), Some(lease.options()))];
        if let Some(address) = record.address() {
            let key = self.keys.address(&address);
            compares.push(match &plan.holder {
                Some(holder) => Compare::value(key.as_str(), CompareOp::Equal, holder.as_str()),
                None => Compare::version(key.as_str(), CompareOp::Equal, 0),
            });
            operations.push(TxnOp::put(key, engine_id.as_str(), Some(lease.options())));
        }
        if plan.stored.is_some()
            && let Some(left) = plan.known.as_ref().and_then(|known| known.address())
            && record.address().as_ref() != Some(&left)
        {
            operations.push(TxnOp::delete(self.keys.address(&left), None));
        }
        if let Some(displaced) = plan.holder.as_ref().filter(|holder| *holder != engine_id) {
            operations.extend(self.forget(displaced));
        }
        if !plan.same_life() {
            operations.push(TxnOp::delete(self.keys.clock(engine_id), None));
        }
        operations.extend(self.stale_batches(plan, value));
        self.decide(Txn::new().when(compares).and_then(operations)).await
    }

    async fn erase(&self, record: &EngineRecord, revision: i64) -> Result<Outcome, LinkFault> {
        let engine_id = &record.engine_id;
        let unchanged = Compare::mod_revision(self.keys.engine(engine_id), CompareOp::Equal, revision);
        let removal = Removal { schema: SCHEMA, engine_id: engine_id.clone() };
        let mut operations = vec![TxnOp::put(self.keys.removal(), write(&removal), None)];
        operations.extend(self.forget(engine_id));
        if let Some(address) = record.address() {
            operations.push(TxnOp::delete(self.keys.address(&address), None));
        }
        self.decide(Txn::new().when([unchanged]).and_then(operations)).await
    }

    /// What deletes all of an engine but its address.
    fn forget(&self, engine_id: &str) -> [TxnOp; 3] {
        let below = DeleteOptions::new().with_prefix();
        [
            TxnOp::delete(self.keys.engine(engine_id), None),
            TxnOp::delete(self.keys.clock(engine_id), None),
            TxnOp::delete(self.keys.payloads(engine_id), Some(below)),
        ]
    }

    /// What deletes the payloads that only the value before named.
    fn stale_batches(&self, plan: &Plan, value: &EngineValue) -> Vec<TxnOp> {
        let engine_id = &plan.record.engine_id;
        let places = self.places.lock();
        let before = places.get(engine_id).map(|(_, ranks)| ranks.as_slice()).unwrap_or_default();
        let is_named = |token: &str| value.ranks.iter().any(|rank| rank.token == token);
        let mut tokens: Vec<&str> = before.iter().map(|rank| rank.token.as_str()).collect();
        tokens.sort_unstable();
        tokens.dedup();
        let stale = tokens.into_iter().filter(|token| !is_named(token)).take(BATCH_OPERATIONS);
        let below = || Some(DeleteOptions::new().with_prefix());
        stale.map(|token| TxnOp::delete(self.keys.batch(engine_id, token), below())).collect()
    }

    async fn decide(&self, txn: Txn) -> Result<Outcome, LinkFault> {
        let answer = self.link.transact(txn).await?;
        let revision = answer.header().ok_or(LinkFault::NoHeader)?.revision();
        self.heard();
        if answer.succeeded() {
            return Ok(Outcome::Done(revision));
        }
        // The newest revision of all etcd may be of something that is not followed. This one is, and
        // comes after whatever was in the way.
        let mark = TxnOp::put(self.keys.mark(), self.router.as_str(), None);
        let answer = self.link.transact(Txn::new().and_then([mark])).await?;
        Ok(Outcome::Overtaken(answer.header().ok_or(LinkFault::NoHeader)?.revision()))
    }

    /// Cleans up; what cannot be reached now ends with its lease anyway.
    async fn end_lease(&self, lease: i64) {
        if lease != 0
            && let Err(fault) = self.link.revoke(lease).await
        {
            tracing::debug!(%fault, "a lease was not ended");
        }
    }

    async fn delete_batch(&self, engine_id: &str, token: &str) {
        let below = DeleteOptions::new().with_prefix();
        let delete = TxnOp::delete(self.keys.batch(engine_id, token), Some(below));
        if let Err(fault) = self.link.transact(Txn::new().and_then([delete])).await {
            tracing::debug!(%fault, "payloads that nobody names were not deleted");
        }
    }
}

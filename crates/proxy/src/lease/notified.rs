//! The cheapest way to free an unread hand-off: the router tells the prefill engine itself.
//! Never once a decode engine may be reading: the engine would reuse the blocks under that read.

use bytes::Bytes;
use http::Method;
use kv_connector::protocol::params::Generation;

use super::Hold;
use super::release::NUDGES;
use crate::error::{Stage, UpstreamFailure};
use crate::notify::{NotNotified, Notice};
use crate::request::Endpoint;
use crate::request_id::RequestId;
use crate::upstream::{Leg, own_headers};

impl Hold {
    /// Whether the prefill engine was told.
    pub(super) async fn notify(&self) -> bool {
        if !self.prefill.spec.notify || self.given {
            return false;
        }
        // The other ways need their time too.
        let deadline = self.order.settings.timeouts.release / 2;
        match tokio::time::timeout(deadline, self.tell()).await.unwrap_or(Err(NotNotified::Timeout)) {
            Ok(()) => true,
            Err(error) => {
                self.core.metrics.not_notified(error.label());
                self.core.notifier.report(&self.prefill.id, &error);
                false
            }
        }
    }

    async fn tell(&self) -> Result<(), NotNotified> {
        let engine = self.core.registry.engine(&self.hand_off.engine_id);
        let engine = engine.ok_or(NotNotified::NotRegistered { rank: (0, 0) })?;
        let notice = Notice::new(&self.hand_off, &engine, self.prefill.spec.nixl_version.clone())?;
        self.core.notifier.notify(notice).await?;
        // An idle engine of version 2 looks at notifications only when it has something to do.
        if self.hand_off.generation == Generation::V2
            && let Err(failure) = self.nudge_prefill().await
        {
            tracing::debug!(kind = failure.broken.label(), "a notified engine could not be made to look");
        }
        Ok(())
    }

    async fn nudge_prefill(&self) -> Result<(), UpstreamFailure> {
        tokio::time::sleep(NUDGES[0]).await;
        let leg = Leg {
            stage: Stage::Prefill,
            peer: &self.prefill,
            method: Method::POST,
            path: Endpoint::Completions.path(),
            headers: own_headers(&RequestId::accept(None)),
            body: self.nudge_body(),
        };
        let response = self.core.upstream.send(leg, self.order.settings.timeouts.release).await?;
        let limit = self.order.settings.limits.answer_bytes;
        let _answer: Bytes = self.core.upstream.collect(Stage::Prefill, response.into_body(), limit).await?;
        Ok(())
    }
}

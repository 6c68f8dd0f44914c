//! The cheapest way to free an unread hand-off: the router tells the prefill engine itself.
//! Never while a decode engine may be reading: the engine would reuse the blocks under that read.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use kv_connector::protocol::params::Generation;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Hold;
use super::release::NUDGES;
use crate::error::{Stage, UpstreamFailure};
use crate::metrics::{HandOffResult, Way};
use crate::notify::{NotNotified, Notice};
use crate::request::Endpoint;
use crate::request_id::RequestId;
use crate::upstream::{Leg, own_headers};

/// How long a decode engine's host may take to say that nobody listens there.
const REFUSES: Duration = Duration::from_secs(1);

impl Hold {
    /// Ends a pushed hand-off that a decode engine had: the two settle it, unless that engine runs no more.
    pub(super) async fn settle(self: Box<Self>) {
        let released = HandOffResult::Released(Way::Notification);
        let result = if self.notify().await { released } else { HandOffResult::Pushed };
        self.core.ledger.close(self.key, result);
    }

    /// Whether the decode engine that has the hand-off runs no more: its host refuses to connect. Silence proves
    /// nothing, for the engine may be reading.
    async fn reader_is_gone(&self) -> bool {
        let Some(decode) = &self.decode else { return false };
        let connecting =
            timeout(REFUSES, TcpStream::connect((decode.host(), decode.wire_place().port()))).await;
        connecting
            .is_ok_and(|ended| ended.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused))
    }

    /// Whether the prefill engine was told.
    pub(super) async fn notify(&self) -> bool {
        if !self.prefill.spec.notify || (self.given && !self.reader_is_gone().await) {
            return false;
        }
        // The other ways need their time too.
        let deadline = self.order.settings.timeouts.release / 2;
        match timeout(deadline, self.tell()).await.unwrap_or(Err(NotNotified::Timeout)) {
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

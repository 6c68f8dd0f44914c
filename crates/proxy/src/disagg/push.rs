//! Push mode: the prefill engine writes into the decode engine's blocks, which must therefore be told beforehand.
//! Where it is known what the decode engine has to know of the other, both legs go out at once.

use std::sync::Arc;

use bytes::Bytes;
use kv_connector::protocol::params::{Generation, TransferMode};

use super::legs::{Given, Legs, Second, Sent, lost};
use super::tries::{Stopped, Tries};
use super::{Exchange, Order};
use crate::Core;
use crate::error::{ProxyError, Stage, UpstreamFailure};
use crate::handoff::{HandedOff, is_private_to_its_host};
use crate::lease::Lease;
use crate::pool::peer::{InFlight, Peer};
use crate::prefill::Answered;
use crate::retry::{self, PrefillFault, Verdict};
use crate::side_channel::channels::{ChannelAddress, NamedChannel};
use crate::splice::PromptPart;

/// What a decode engine is told of a prefill engine that has not answered yet.
pub(super) struct Pushed {
    given: Given,
    engine_id: String,
}

/// How two legs at once ended.
pub(super) enum Both {
    /// As far as the decode engine's answer.
    Sent(Box<Sent>),
    /// The decode engine is to be asked anew, with this hand-off or with one that is still to be had.
    Again(Option<Lease>),
    /// The first leg failed, and another engine may run it: perhaps the same one on another connection.
    AnotherPrefill(Option<InFlight>),
}

impl Core {
    /// What the decode engine of a pair has to be told for both legs to go out at once; none where the pair does
    /// not push, or where it is not known yet.
    pub(super) fn push_of(
        &self,
        order: &Order,
        exchange: &Exchange,
        prefill: &Peer,
        decode: &Peer,
    ) -> Option<Pushed> {
        if !order.settings.hand_off.push_at_once
            || !prefill.pushes()
            || !decode.hands_off_on(order.endpoint())
        {
            return None;
        }
        let (engine_id, channel) = prefill.announced()?;
        let id = exchange.request_id.unique();
        let raw = serde_json::json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [],
            "remote_engine_id": engine_id,
            // Engines want some, and find each other by the header.
            "remote_request_id": id.as_str(),
            "remote_host": channel.address.host,
            "remote_port": channel.address.port,
            "tp_size": channel.tp_size,
            "dcp_size": channel.dcp_size,
            "pp_size": channel.pp_size,
            "transfer_mode": "push",
        });
        let announced = HandedOff {
            raw: Bytes::from(raw.to_string()),
            engine_id,
            remote_request_id: id.as_str().to_owned(),
            blocks: 0,
            prompt_tokens: None,
            generation: Generation::V14,
            mode: TransferMode::Push,
            channel,
            sound: true,
            part: PromptPart::default(),
        };
        let announced = announced.by_way_of(order.settings.hand_off.registry_address.as_ref()).ok()?;
        let given = Given { raw: self.hand_off_for(&announced, decode), id: Some(id) };
        Some(Pushed { given, engine_id: announced.engine_id })
    }

    /// Both legs at once. The first that fails ends the other; where both do, the prefill engine's word counts.
    /// Only a decode engine that was not reached ends nothing: the blocks are for another then.
    ///
    /// # Errors
    /// How the request ends.
    pub(super) async fn both_legs(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
        (prefill, decode): (InFlight, InFlight),
        pushed: Pushed,
        tries: &mut Tries,
    ) -> Result<Both, Stopped> {
        let (of_prefill, of_decode) = (Arc::clone(&prefill.peer), Arc::clone(&decode.peer));
        let Pushed { given, engine_id } = pushed;
        let sent = self.send_prefill(order, exchange, prefill, given.id.as_ref(), tries);
        let second = {
            let (core, order, exchange) = (Arc::clone(self), Arc::clone(order), exchange.clone());
            Box::pin(async move { core.decode(&order, &exchange, decode, None, Some(&given), false).await })
        };
        let decode = Some(Second::Running(second));
        let core = Arc::clone(self);
        let mut legs = Legs { core, prefill: Some(sent), lease: None, decode, peer: Arc::clone(&of_decode) };
        let mut unsent = None;
        let answered = match first_of_both(&mut legs).await {
            Ok(answered) => answered,
            Err(failed) => {
                self.metrics.pushed("decode_failed");
                unsent = self.was_unsent(&failed);
                let Some(sent) = legs.prefill.as_mut() else { return Ok(Both::Sent(failed)) };
                if unsent.is_none() {
                    sent.leg.abort();
                    // What it was told may be out of date.
                    of_prefill.forget_channel();
                    exchange.account.prefilled();
                    return Ok(Both::Sent(failed));
                }
                sent.leg.answer().await
            }
        };
        let Some(sent) = legs.prefill.take() else { return Ok(Both::Again(None)) };
        let fault = match (self.prefilled(order, exchange, sent, answered, tries), unsent) {
            (Ok(Ok(Some(lease))), Some(failure)) => {
                exchange.account.prefilled();
                return Ok(Both::Sent(Box::new(Err((failure, Some(lease))))));
            }
            (Ok(Ok(Some(lease))), None) if lease.engine_id() == Some(&engine_id) => {
                self.metrics.pushed("at_once");
                exchange.account.prefilled();
                return Ok(Both::Sent(Box::new(legs.join(lease).await)));
            }
            // Another engine than the one that the decode engine was told of, or nothing to write.
            (Ok(Ok(lease)), _) => {
                of_prefill.forget_channel();
                self.metrics.pushed("prefill_failed");
                return Ok(Both::Again(lease));
            }
            // What runs on the decode engine ends with its connection, here and below.
            (Ok(Err(stopped)), _) => {
                self.metrics.pushed("prefill_failed");
                return Err(stopped);
            }
            (Err(fault), _) => fault,
        };
        drop(legs);
        self.metrics.pushed("prefill_failed");
        if let PrefillFault::Broke(failure) = fault {
            if tries.resend(failure) {
                return Ok(Both::AnotherPrefill(Some(of_prefill.enter())));
            }
            self.engine_failed(&of_prefill, failure);
        }
        tries.prefill.push(of_prefill);
        let error = ProxyError::from(fault);
        if retry::after_prefill(fault) == Verdict::GiveUp || !tries.again(self, Stage::Prefill) {
            return Err(Stopped::Error(error));
        }
        Ok(Both::AnotherPrefill(None))
    }
}

impl Core {
    /// How a decode leg failed whose engine cannot have seen it, if another engine could have the blocks instead.
    fn was_unsent(&self, sent: &Sent) -> Option<UpstreamFailure> {
        let failure = sent.as_ref().err()?.0;
        (failure.is_unseen() && self.pool.ready_peers(Stage::Decode).len() > 1).then_some(failure)
    }
}

/// The prefill engine's answer, or how the decode leg failed before that.
async fn first_of_both(legs: &mut Legs) -> Result<Answered, Box<Sent>> {
    let Some(prefill) = &mut legs.prefill else { return Ok(Err(lost())) };
    loop {
        let Some(Second::Running(decode)) = &mut legs.decode else { return Ok(prefill.leg.answer().await) };
        tokio::select! {
            biased;
            answered = prefill.leg.answer() => return Ok(answered),
            sent = decode.as_mut() => match sent {
                Ok((answer, guards)) if answer.status().is_success() => {
                    legs.decode = Some(Second::Headed(Box::new((answer, guards))));
                }
                failed => {
                    legs.decode = None;
                    return Err(Box::new(failed));
                }
            },
        }
    }
}

impl Peer {
    /// The engine behind the peer and its side channel, where they are known before it answers: as it registered, or
    /// as its last hand-off told.
    fn announced(&self) -> Option<(String, NamedChannel)> {
        let identity = self.identity.load();
        match (&identity.engines[..], identity.at_address) {
            ([engine], true) => {
                let traits = &engine.traits;
                let host = self.spec.kv_host.as_ref().or(traits.side_channel_host.as_ref())?;
                let is_private = self.spec.kv_host.is_none() && is_private_to_its_host(host);
                if is_private && !is_private_to_its_host(self.host()) {
                    return None;
                }
                let channel = NamedChannel {
                    address: ChannelAddress::new(host, self.spec.kv_port.or(traits.side_channel_port)?),
                    tp_size: traits.tp_size?,
                    pp_size: traits.pp_size.unwrap_or(1),
                    dcp_size: traits.dcp_size.unwrap_or(1),
                    mode: Some(TransferMode::Push),
                    shape: Some(Generation::V14),
                };
                Some((engine.engine_id.clone(), channel))
            }
            // Which of several would have the request is not known.
            (engines, true) if !engines.is_empty() => None,
            _ => self.channel_told(),
        }
    }
}

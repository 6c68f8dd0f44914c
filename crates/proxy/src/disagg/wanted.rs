//! What one request wants of the fleet, its first choice of both engines, and what is learnt of how long it took.

use std::time::Duration;

use http::Response;
use http::header::{HeaderName, HeaderValue};
use tokio::time::Instant;

use super::tries::Tries;
use super::{Exchange, Order};
use crate::Core;
use crate::error::{ProxyError, Stage};
use crate::handoff::HandedOff;
use crate::pool::peer::{InFlight, Peer};
use crate::routing::candidates::{Wanted, beginning};
use crate::routing::decide::Stays;
use crate::routing::facts::Computed;
use crate::routing::prefix::{Chunks, Matched};
use crate::routing::score::Cost;
use crate::routing::settings::Policy;
use crate::settings::OnMissing;

/// Asks for the choice to be told.
const ASKS: HeaderName = HeaderName::from_static("x-kvbaton-explain");

/// Tells it.
const TELLS: HeaderName = HeaderName::from_static("x-kvbaton-choice");

/// What was chosen beside the decode engine.
#[derive(Debug, Default)]
pub(super) struct FirstChoice {
    pub(super) prefill: Option<InFlight>,
    pub(super) stays: Option<Stays>,
    cost: Option<Cost>,
}

impl FirstChoice {
    /// The choice for the client, where it asks and the operator lets it.
    pub(super) fn shown(&self, order: &Order, exchange: &Exchange, decode: &Peer) -> Option<HeaderValue> {
        let routing = &order.settings.routing;
        if !routing.explain_header || exchange.headers.get(ASKS).is_none_or(|value| value != "1") {
            return None;
        }
        let [of_prefill, of_decode] = order.policies;
        let prefill = self.prefill.as_ref().map_or("none", |in_flight| in_flight.peer.id.as_str());
        let mut text = format!(
            "prefill={prefill}; decode={}; prefill_policy={}; decode_policy={}",
            decode.id,
            of_prefill.label(),
            of_decode.label()
        );
        if let Some(stays) = self.stays {
            text.push_str(&format!("; reason={}", stays.label()));
        }
        if let Some(cost) = &self.cost {
            text.push_str(&format!("; cost={:.6}", cost.total()));
        }
        HeaderValue::from_str(&text).ok()
    }
}

pub(super) fn explained_in<B>(mut response: Response<B>, explained: Option<HeaderValue>) -> Response<B> {
    if let Some(explained) = explained {
        response.headers_mut().insert(TELLS, explained);
    }
    response
}

impl Core {
    /// The prompt as it is remembered, where a policy goes by that.
    pub(super) fn chunks_of(&self, order: &Order) -> Chunks {
        if order.policies.iter().any(|policy| policy.goes_by_cache()) {
            self.pool.prefixes.chunks_of(&order.request.prompt_parts())
        } else {
            Chunks::default()
        }
    }

    fn wanted<'a>(&self, order: &'a Order, exchange: &'a Exchange, tries: &'a Tries) -> Wanted<'a> {
        let settings = &order.settings.routing;
        let (token_size, prefixes) = (&self.pool.token_size, &self.pool.prefixes);
        let policies = order.policies;
        let session = policies.contains(&Policy::Session);
        let hash = policies.contains(&Policy::ConsistentHash);
        Wanted {
            model: Some(order.model()),
            endpoint: order.endpoint(),
            prompt_tokens: token_size.tokens(order.request.prompt_bytes()),
            settings,
            policies,
            session: if session {
                exchange.headers.get(settings.session_header.as_str()).map(HeaderValue::as_bytes)
            } else {
                None
            },
            beginning: if hash { beginning(order.request.prompt_parts().open) } else { &[] },
            seen: match &tries.cached {
                Some(cached) => cached.clone(),
                None if tries.chunks.is_empty() => Matched::default(),
                None => prefixes.matched(&tries.chunks),
            },
            token_bytes: token_size.bytes(),
            tried: [&tries.prefill, &tries.decode],
        }
    }

    /// Both engines at once where a pair can have the request, else a decode engine by the policies for that.
    pub(super) fn choose_both(
        &self,
        order: &Order,
        exchange: &Exchange,
        tries: &Tries,
        first: &mut FirstChoice,
    ) -> Result<InFlight, ProxyError> {
        if order.bypass().is_none() {
            let wanted = self.wanted(order, exchange, tries);
            if let Some(chosen) = self.pool.choose_pair(&wanted, &order.settings.disaggregation) {
                *first =
                    FirstChoice { prefill: chosen.prefill, stays: chosen.stays, cost: Some(chosen.cost) };
                return Ok(chosen.decode);
            }
        }
        self.choose_decode(order, exchange, tries)
    }

    /// A decode engine to which some prefill engine can hand off, where that matters.
    pub(super) fn choose_decode(
        &self,
        order: &Order,
        exchange: &Exchange,
        tries: &Tries,
    ) -> Result<InFlight, ProxyError> {
        let wanted = self.wanted(order, exchange, tries);
        let alone = order.bypass().is_some();
        let choose = |fits: &dyn Fn(&Peer) -> bool| self.pool.choose_one(Stage::Decode, &wanted, None, fits);
        match choose(&|decode| alone || self.pool.has_partner(decode)) {
            Err(ProxyError::NoCompatiblePair) => {
                let no_prefill = !self.pool.is_any_ready(Stage::Prefill);
                if no_prefill || order.settings.hand_off.on_no_prefill == OnMissing::DecodeOnly {
                    // The first leg finds nobody, and applies the policy for that.
                    return choose(&|_| true);
                }
                Err(ProxyError::NoCompatiblePair)
            }
            chosen => chosen,
        }
    }

    /// A prefill engine for a decode engine that is held.
    pub(super) fn choose_prefill(
        &self,
        order: &Order,
        exchange: &Exchange,
        decode: &Peer,
        tries: &Tries,
    ) -> Result<InFlight, ProxyError> {
        let wanted = self.wanted(order, exchange, tries);
        self.pool.choose_one(Stage::Prefill, &wanted, Some(decode), |prefill| {
            prefill.hands_off_on(order.endpoint()) && self.pool.fits(prefill, decode)
        })
    }

    /// A prefill engine has answered; `waiting` are the tokens that waited there with this prompt.
    pub(super) fn learn_prefill(
        &self,
        order: &Order,
        peer: &Peer,
        hand_off: &HandedOff,
        waiting: u64,
        took: Duration,
        now: Instant,
    ) {
        let Some(tokens) = hand_off.prompt_tokens else { return };
        let engine = self.registry.engine(&hand_off.engine_id);
        let each = engine.map_or(0, |engine| engine.bytes_per_block());
        let computed = Computed {
            prompt_bytes: order.request.prompt_bytes(),
            tokens,
            cached: hand_off.part.cached_tokens.unwrap_or(0),
            waiting,
            took,
            kv_bytes: each.saturating_mul(hand_off.blocks as u64),
        };
        computed.learnt_of(peer, &self.pool.token_size, now);
    }
}

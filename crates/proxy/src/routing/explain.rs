//! Why which pair would serve a request: the choice as it would be made now, without letting anything in.
//! Names peers by their ids only.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::candidates::Wanted;
use super::choose::Table;
use super::decide;
use super::prefix::Matched;
use super::score::{Ask, Cost};
use super::settings::Policy;
use crate::Core;
use crate::Proxy;
use crate::error::Stage;
use crate::pool::peer::Peer;
use crate::request::{ClientRequest, Endpoint, InjectedHandOff, PromptParts};
use crate::settings::Settings;

/// Most pairs, and most peers that are ruled out, that are shown.
const MOST: usize = 64;

/// Tokens of a prompt of which nothing is told.
const TOKENS: f64 = 1000.0;

/// A request that is not made.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExplainAsk {
    /// The model that it names.
    pub model: Option<String>,
    /// Its prompt.
    pub prompt: Option<String>,
    /// The length of its prompt, where that is not given.
    pub prompt_tokens: Option<u64>,
    /// The value of its session header.
    pub session: Option<String>,
    /// The endpoint; completions when absent.
    pub endpoint: Option<Endpoint>,
}

/// One pair that could have the request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedPair {
    /// Id of the prefill peer.
    pub prefill: String,
    /// Id of the decode peer.
    pub decode: String,
    /// The expected cost by its parts, in seconds.
    pub cost: Cost,
    /// All of it.
    pub total: f64,
    /// Whether both list the model, and nothing speaks against their health; others come after those.
    pub preferred: bool,
}

/// A peer that could not have the request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RuledOut {
    /// Its id.
    pub peer: String,
    /// Why.
    pub reason: &'static str,
}

/// The pair that would be taken.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedChoice {
    /// Id of the prefill peer; none where the decode engine would compute the prompt.
    pub prefill: Option<String>,
    /// Id of the decode peer.
    pub decode: String,
    /// `disaggregated` or `decode_only`.
    pub decision: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// The choice as it would be made now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// How the prefill engine is chosen.
    pub prefill_policy: Policy,
    /// How the decode engine is chosen.
    pub decode_policy: Policy,
    /// Tokens of the prompt as they are estimated.
    pub prompt_tokens: f64,
    /// Nobody where no pair can have it.
    pub chosen: Option<ExplainedChoice>,
    /// The pairs that were looked at, the cheapest first; of many peers only some are.
    pub pairs: Vec<ExplainedPair>,
    /// Who was not looked at, and why.
    pub ruled_out: Vec<RuledOut>,
}

impl Proxy {
    /// What would be chosen for a request now, and why. Nothing is sent but, where a policy goes by engines' KV
    /// events, the question for the prompt's tokens.
    pub async fn explain(&self, ask: &ExplainAsk) -> Explanation {
        self.core.pool.learn(&self.core.registry);
        self.core.explain(ask, &self.core.settings()).await
    }
}

impl Core {
    async fn explain(&self, ask: &ExplainAsk, settings: &Settings) -> Explanation {
        let served = ask.model.as_deref().and_then(|model| self.would_serve(model, ask.session.as_deref()));
        let (model, prompt) =
            (served.as_deref().or(ask.model.as_deref()), ask.prompt.as_deref().unwrap_or_default());
        let estimated = match (ask.prompt_tokens, &ask.prompt) {
            (Some(tokens), _) => tokens as f64,
            (None, Some(prompt)) => self.pool.token_size.tokens(prompt.len()),
            (None, None) => TOKENS,
        };
        // As it would stand in a body.
        let quoted = serde_json::to_string(prompt).unwrap_or_default();
        let open = quoted.strip_suffix('"').unwrap_or(&quoted).as_bytes();
        let parts = PromptParts::of_text(model.unwrap_or_default(), None, open);
        let policies = settings.routing.policies(model);
        let seen = match (&ask.prompt, self.cached_of(model, &quoted, policies).await) {
            (None, _) => Matched::default(),
            (_, Some(known)) => known,
            (_, None) => self.pool.prefixes.matched(&self.pool.prefixes.chunks_of(&parts)),
        };
        let wanted = Wanted {
            model,
            endpoint: ask.endpoint.unwrap_or(Endpoint::Completions),
            prompt_tokens: estimated,
            settings: &settings.routing,
            policies,
            session: ask.session.as_deref().map(str::as_bytes),
            beginning: super::candidates::beginning(open),
            seen,
            token_bytes: self.pool.token_size.bytes(),
            tried: [&[], &[]],
        };
        let (roster, now) = (self.pool.roster(), Instant::now());
        let table = self.pool.table(&wanted, &roster, now);
        let chosen = self.would_choose(&table, &wanted, settings);
        let mut pairs: Vec<ExplainedPair> = table.pairs.iter().map(|pair| explained(&table, pair)).collect();
        pairs.sort_by(|one, other| {
            other.preferred.cmp(&one.preferred).then(one.total.total_cmp(&other.total))
        });
        pairs.truncate(MOST);
        let all = roster.snapshot.of(Stage::Prefill).iter().chain(roster.snapshot.of(Stage::Decode));
        let ruled_out = all.filter_map(|peer| {
            let reason = self.ruled_out(peer, &wanted, &table, now)?;
            Some(RuledOut { peer: peer.id.clone(), reason })
        });
        let ruled_out = ruled_out.take(MOST).collect();
        let [prefill_policy, decode_policy] = policies;
        Explanation { prefill_policy, decode_policy, prompt_tokens: estimated, chosen, pairs, ruled_out }
    }

    /// What engines' events tell of a prompt, as it stands in a body.
    async fn cached_of(&self, model: Option<&str>, prompt: &str, policies: [Policy; 2]) -> Option<Matched> {
        let model = serde_json::to_string(model?).ok()?;
        let body = Bytes::from(format!(r#"{{"model":{model},"prompt":{prompt}}}"#));
        let request = ClientRequest::parse(Endpoint::Completions, body, InjectedHandOff::Refuse).ok()?;
        self.cached_by_events(&request, policies).await
    }

    fn would_choose(
        &self,
        table: &Table<'_>,
        wanted: &Wanted<'_>,
        settings: &Settings,
    ) -> Option<ExplainedChoice> {
        let roster = self.pool.roster();
        let best = self.pool.best(table, wanted, &roster)?;
        let (decode, d_facts) = &table.decode[best.decode];
        let (prefill, p_facts) = &table.prefill[best.prefill];
        let (ask, weights) = (Ask { prompt_tokens: wanted.prompt_tokens }, settings.routing.weights());
        let (rule, cached) = (&settings.disaggregation, wanted.cached(decode.peer));
        let never = rule.mode == super::settings::DisaggregationMode::Never;
        let dialect = !decode.peer.hands_off_on(wanted.endpoint);
        let stays = decide::stays(rule, &ask, &best.cost, (p_facts, d_facts), cached, &weights);
        let alone = match stays {
            _ if never => Some("never"),
            _ if dialect => Some("dialect"),
            stays => stays.map(decide::Stays::label),
        };
        Some(ExplainedChoice {
            prefill: alone.is_none().then(|| prefill.peer.id.clone()),
            decode: decode.peer.id.clone(),
            decision: if alone.is_some() { "decode_only" } else { "disaggregated" },
            reason: alone.unwrap_or("pair"),
        })
    }

    /// Whether others take the model's requests by its ratio.
    fn leaves_out(&self, stage: Stage, wanted: &Wanted<'_>, peer: &Arc<Peer>) -> bool {
        let roster = self.pool.roster();
        let share = roster.share(stage, wanted.model);
        share.is_some_and(|share| !share.iter().any(|other| Arc::ptr_eq(other, peer)))
    }

    /// Why a peer cannot have a request, or is asked only where there is no other.
    fn ruled_out(
        &self,
        peer: &Arc<Peer>,
        wanted: &Wanted<'_>,
        table: &Table<'_>,
        now: Instant,
    ) -> Option<&'static str> {
        let stage = peer.spec.role.stage();
        let has_pair = match stage {
            Stage::Prefill => {
                table.pairs.iter().any(|pair| Arc::ptr_eq(table.prefill[pair.prefill].0.peer, peer))
            }
            Stage::Decode => {
                table.pairs.iter().any(|pair| Arc::ptr_eq(table.decode[pair.decode].0.peer, peer))
            }
        };
        let standing = &peer.standing;
        Some(match () {
            () if standing.is_leaving() => "leaving",
            () if standing.is_drained() => "drained",
            () if !standing.is_open() => "closed_by_its_engine",
            () if !peer.is_ready() => "not_ready",
            () if !peer.is_open() => "cold",
            () if !peer.may_have(wanted.model) => "bound_to_other_models",
            () if stage == Stage::Prefill && !peer.hands_off_on(wanted.endpoint) => "dialect",
            () if standing.is_quarantined() => "quarantined",
            () if !peer.health.is_sound(now) => "unsound",
            () if wanted.model.is_some_and(|model| !peer.serves(model)) => "does_not_list_the_model",
            () if has_pair => return None,
            () if self.leaves_out(stage, wanted, peer) => "pd_ratio",
            () => {
                let seats = table.prefill.iter().map(|(seat, _)| seat.peer);
                let mut seats = seats.chain(table.decode.iter().map(|(seat, _)| seat.peer));
                if seats.any(|seat| Arc::ptr_eq(seat, peer)) { "no_partner" } else { "not_drawn" }
            }
        })
    }
}

fn explained(table: &Table<'_>, pair: &super::choose::Scored) -> ExplainedPair {
    let (prefill, decode) = (&table.prefill[pair.prefill].0, &table.decode[pair.decode].0);
    ExplainedPair {
        prefill: prefill.peer.id.clone(),
        decode: decode.peer.id.clone(),
        cost: pair.cost,
        total: pair.total,
        preferred: prefill.tier() == 0 && decode.tier() == 0,
    }
}

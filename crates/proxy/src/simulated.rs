//! The routing of requests whose engines are a model in simulated time. Pool, choice, ledger, what is learnt and
//! admission are those that serve requests, called in the order in which `disagg.rs` calls them; nothing is sent,
//! nothing fails, and time and chance are told.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::admission::simulated::{Entered, Place, Places, Turns};
use crate::dial::Dials;
use crate::error::Stage;
use crate::pool::origin::Origin;
use crate::pool::peer::{InFlight, Peer, PeerSpec, PeerSpecError, PeerState, Role};
use crate::pool::probe::read_models;
use crate::pool::{Pool, scrape};
use crate::registry::{Registry, RegistryLimits};
use crate::request::{Endpoint, PromptParts};
use crate::routing::PeerKey;
use crate::routing::candidates::{Wanted, beginning};
use crate::routing::facts::Computed;
use crate::routing::prefix::{Chunks, Matched, PrefixTree};
use crate::routing::settings::{DisaggregationMode, Policy};
use crate::routing::surroundings::Surroundings;
use crate::settings::Settings;

/// An engine of the fleet.
#[derive(Clone, Debug)]
pub struct SimulatedPeer {
    /// Its role.
    pub role: Role,
    /// Its name, unlike all others'.
    pub name: String,
    /// Where it is.
    pub labels: BTreeMap<String, String>,
    /// Bytes of KV for a token; zero where the router does not know.
    pub kv_bytes_per_token: u64,
}

/// A prompt as it stands in a request.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedPrompt<'a> {
    /// How long it is.
    pub bytes: usize,
    /// Itself, where [`SimulatedRouter::reads_prompts`] says that it counts.
    pub text: &'a [u8],
    /// The value of its session header.
    pub session: Option<&'a [u8]>,
}

/// Why a request has one leg or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whether a prefill engine computes the prompt.
    pub disaggregated: bool,
    /// Why, as in the metrics.
    pub reason: &'static str,
}

/// What became of a request at the door.
#[derive(Debug)]
pub enum Admitted {
    /// It may run.
    Runs(Permit),
    /// It waits; it must be withdrawn when its time is over.
    Waits(Turn),
    /// It is told to come again.
    Refused,
}

/// The places that a running request holds.
#[derive(Debug)]
pub struct Permit(Places);

/// A place among those who wait.
#[derive(Clone, Copy, Debug)]
pub struct Turn(Place);

/// A request on its way.
#[derive(Debug)]
pub struct Routed {
    /// The prefill engine's place among the peers, if it has one.
    pub prefill: Option<usize>,
    /// The decode engine's place among the peers.
    pub decode: usize,
    /// Why.
    pub decision: Decision,
    chunks: Chunks,
    prompt_bytes: usize,
    on_prefill: Option<InFlight>,
    on_decode: Option<InFlight>,
    sent: Instant,
    waiting: u64,
    /// The prefill engine, when it answered, and the bytes that wait there.
    handed_off: Option<(PeerKey, Instant, u64)>,
}

/// A router without a network.
#[derive(Debug)]
pub struct SimulatedRouter {
    pool: Pool,
    settings: Settings,
    model: String,
    peers: Vec<(Arc<Peer>, u64)>,
    places: HashMap<PeerKey, usize>,
    turns: Turns,
}

impl SimulatedRouter {
    /// A router with these peers, all ready and listing the model.
    ///
    /// # Errors
    /// A peer's name cannot be used.
    pub fn new(
        settings: Settings,
        model: &str,
        peers: Vec<SimulatedPeer>,
        seed: u64,
    ) -> Result<Self, PeerSpecError> {
        let mut pool = Pool::new(&settings, Dials::new(settings.timeouts.slow_connect));
        pool.surroundings = Surroundings::simulated(seed);
        let keys = [seed, 1, 2, 3];
        pool.prefixes = PrefixTree::with_keys(settings.routing.prefix.clone(), keys);
        let list = serde_json::json!({ "data": [{ "id": model }] }).to_string();
        let models = read_models(list.as_bytes()).unwrap_or_default();
        let mut all = Vec::with_capacity(peers.len());
        for peer in peers {
            let mut spec = PeerSpec::new(peer.role, format!("http://{}.simulated:80", peer.name));
            spec.name = Some(peer.name);
            spec.labels = peer.labels;
            let entered = pool.add_of(Origin::Settings, spec)?;
            entered.observed.change(|observed| {
                observed.state = PeerState::Ready;
                observed.models = Arc::clone(&models);
                observed.models_changed += 1;
            });
            all.push((entered, peer.kv_bytes_per_token));
        }
        pool.learn(&Registry::new(RegistryLimits::default()));
        let engines = [pool.ready(Stage::Prefill), pool.ready(Stage::Decode)];
        let turns = Turns::new(&settings.admission, engines, pool.surroundings.now());
        let places = all.iter().enumerate().map(|(place, (peer, _))| (peer.routing.key, place)).collect();
        Ok(Self { pool, settings, model: model.to_owned(), peers: all, places, turns })
    }

    /// It is so long after the beginning.
    pub fn tell_time(&self, since_began: Duration) {
        self.pool.surroundings.tell(since_began);
    }

    /// Whether any policy goes by what stands in prompts.
    #[must_use]
    pub fn reads_prompts(&self) -> bool {
        let by_prompt = |policy: &Policy| policy.goes_by_cache() || *policy == Policy::ConsistentHash;
        self.policies().iter().any(by_prompt)
    }

    /// Whether any policy goes by what engines tell of their caches.
    #[must_use]
    pub fn hears_of_caches(&self) -> bool {
        self.policies().contains(&Policy::KvEvents)
    }

    fn policies(&self) -> [Policy; 2] {
        self.settings.routing.policies(Some(&self.model))
    }

    /// How long a request waits at most before it runs.
    #[must_use]
    pub fn longest_wait(&self) -> Duration {
        self.turns.longest_wait()
    }

    /// A request has come.
    pub fn admit(&mut self, request: u64, prompt_bytes: usize) -> Admitted {
        let now = self.pool.surroundings.now();
        let two_legs = self.settings.disaggregation.mode != DisaggregationMode::Never
            && prompt_bytes >= self.settings.hand_off.min_prompt_bytes;
        match self.turns.enter(request, two_legs, &self.model, prompt_bytes, now) {
            Entered::Runs(places) => Admitted::Runs(Permit(places)),
            Entered::Waits(place) => Admitted::Waits(Turn(place)),
            Entered::Refused => Admitted::Refused,
        }
    }

    /// Its turn has come.
    #[must_use]
    pub fn take(&self, turn: Turn) -> Permit {
        Permit(turn.0.taken(self.pool.surroundings.now()))
    }

    /// Whether one still waited, which now has gone.
    pub fn withdraw(&mut self, turn: Turn) -> bool {
        self.turns.withdraw(turn.0)
    }

    /// Both engines for a request, or its decode engine; `cached` are the prompt tokens that peers say to have,
    /// of `tokens`. None where nobody can have it.
    #[must_use]
    pub fn choose(
        &self,
        prompt: &SimulatedPrompt<'_>,
        tokens: u64,
        cached: Option<&[(usize, u64)]>,
    ) -> Option<Routed> {
        let policies = self.policies();
        let chunks = if policies.iter().any(|policy| policy.goes_by_cache()) {
            self.pool.prefixes.chunks_of(&PromptParts::of_text(&self.model, None, prompt.text))
        } else {
            Chunks::default()
        };
        let bytes = |cached: u64| prompt.bytes as u64 * cached / tokens.max(1);
        let told = cached.map(|cached| {
            let of = |(place, cached): &(usize, u64)| (self.peers[*place].0.routing.key, bytes(*cached));
            Matched::known(cached.iter().map(of).collect())
        });
        let wanted = Wanted {
            model: Some(&self.model),
            endpoint: Endpoint::Completions,
            prompt_tokens: self.pool.token_size.tokens(prompt.bytes),
            settings: &self.settings.routing,
            policies,
            session: prompt.session.filter(|_| policies.contains(&Policy::Session)),
            beginning: beginning(prompt.text),
            seen: match told {
                Some(told) => told,
                None if chunks.is_empty() => Matched::default(),
                None => self.pool.prefixes.matched(&chunks),
            },
            token_bytes: self.pool.token_size.bytes(),
            tried: [&[], &[]],
        };
        let rule = &self.settings.disaggregation;
        let short = prompt.bytes < self.settings.hand_off.min_prompt_bytes;
        let alone = match rule.mode {
            DisaggregationMode::Never => Some("never"),
            _ if short => Some("short_prompt"),
            _ => None,
        };
        let chosen = match alone {
            Some(_) => None,
            None => self.pool.choose_pair(&wanted, rule),
        };
        let (prefill, decode, reason) = match chosen {
            Some(chosen) => (chosen.prefill, chosen.decode, chosen.stays.map_or("pair", |why| why.label())),
            None => {
                let decode = self.pool.choose_one(Stage::Decode, &wanted, None, |_| true).ok()?;
                (None, decode, alone.unwrap_or("no_prefill"))
            }
        };
        let place = |peer: &Peer| self.places.get(&peer.routing.key).copied();
        let of_prefill = prefill.as_ref().and_then(|entered| place(&entered.peer));
        let routed = Routed {
            prefill: of_prefill,
            decode: place(&decode.peer)?,
            decision: Decision { disaggregated: of_prefill.is_some(), reason },
            chunks,
            prompt_bytes: prompt.bytes,
            waiting: prefill.as_ref().map_or(0, |entered| entered.peer.routing.waiting_tokens()),
            on_prefill: prefill,
            on_decode: Some(decode),
            sent: self.pool.surroundings.now(),
            handed_off: None,
        };
        if of_prefill.is_none() {
            self.decoding(&routed);
        }
        Some(routed)
    }

    /// The prefill engine has answered, of whose prompt so many tokens were cached. Whose turn it is now.
    pub fn prefilled(
        &mut self,
        routed: &mut Routed,
        permit: &mut Permit,
        tokens: u64,
        cached: u64,
    ) -> Vec<u64> {
        let now = self.pool.surroundings.now();
        if let Some(entered) = routed.on_prefill.take() {
            let each = routed.prefill.map_or(0, |place| self.peers[place].1);
            let computed = Computed {
                prompt_bytes: routed.prompt_bytes,
                tokens,
                cached,
                waiting: routed.waiting,
                took: now.saturating_duration_since(routed.sent),
                kv_bytes: each.saturating_mul(tokens),
            };
            computed.learnt_of(&entered.peer, &self.pool.token_size, now);
            self.pool.prefixes.record(&routed.chunks, entered.peer.routing.key);
            routed.handed_off = Some((entered.peer.routing.key, now, computed.kv_bytes));
            entered.peer.succeeded();
        }
        self.decoding(routed);
        self.turns.prefilled(&mut permit.0, now)
    }

    fn decoding(&self, routed: &Routed) {
        if let Some(decode) = &routed.on_decode {
            self.pool.prefixes.record(&routed.chunks, decode.peer.routing.key);
        }
    }

    /// The first bytes of a stream have come.
    pub fn began(&self, routed: &mut Routed) {
        if let Some(decode) = &mut routed.on_decode {
            decode.prompt_is_done();
        }
        if let (Some((from, since, bytes)), Some(decode)) = (routed.handed_off.take(), &routed.on_decode)
            && bytes > 0
        {
            let now = self.pool.surroundings.now();
            decode.peer.routing.moved(from, bytes, now.saturating_duration_since(since), now);
        }
    }

    /// The request has ended. Whose turn it is now.
    pub fn ended(&mut self, routed: Option<Routed>, permit: &Permit) -> Vec<u64> {
        if let Some(decode) = routed.and_then(|routed| routed.on_decode) {
            decode.peer.succeeded();
        }
        self.turns.leave(&permit.0, self.pool.surroundings.now())
    }

    /// An engine's metrics page was read.
    pub fn page_read(&self, place: usize, page: &str) {
        scrape::was_read(&self.pool, &self.peers[place].0, page, self.pool.surroundings.now());
    }
}

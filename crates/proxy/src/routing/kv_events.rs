//! What engines' prefix caches hold, as their own KV events tell: precise, where an engine publishes them.
//!
//! An engine's hashes depend on its algorithm and seed, so that blocks are kept under hashes of our own, made
//! of the tokens that come with the events. Never a reason to fail a request: what is not known is not cached.

mod follow;
mod index;
mod peer;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use ahash::RandomState;
use serde::{Deserialize, Serialize};

use self::index::Chain;
pub(crate) use self::peer::EventAddress;
pub use self::peer::KvEventsView;
pub(crate) use self::peer::PeerEvents;
use self::tokens::Recent;
use super::prefix::Matched;
use super::settings::Policy;
use crate::Core;
use crate::pool::peer::Peer;
use crate::request::ClientRequest;

/// How the router learns what engines have cached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvEventsSettings {
    /// How long an engine may take to turn a prompt into tokens; without them the request is routed by what
    /// is known of its text.
    #[serde(with = "humantime_serde")]
    pub tokenize_within: Duration,
    /// Longest request body that an engine is asked to turn into tokens, in bytes.
    pub tokenize_bytes: usize,
    /// Of how many recent requests the tokens are remembered.
    pub recent_prompts: usize,
    /// Most blocks that are remembered of one engine; some 100 bytes of memory each.
    pub blocks: usize,
}

impl Default for KvEventsSettings {
    fn default() -> Self {
        Self {
            tokenize_within: Duration::from_millis(50),
            tokenize_bytes: 1 << 20,
            recent_prompts: 1024,
            blocks: 1 << 18,
        }
    }
}

/// What all engines' events have in common.
#[derive(Debug)]
pub(crate) struct KvEvents {
    /// Drawn for this process: whoever does not know them cannot make prompts whose hashes collide.
    keys: RandomState,
    recent: Recent,
}

impl Default for KvEvents {
    fn default() -> Self {
        let keys = RandomState::with_seeds(rand::random(), rand::random(), rand::random(), rand::random());
        Self { recent: Recent::new(keys.clone()), keys }
    }
}

/// A request's prompt as engines see it.
#[derive(Clone, Debug)]
pub(crate) struct PromptTokens {
    tokens: Arc<[u32]>,
    salt: Option<String>,
}

/// How many tokens of a prompt an engine has cached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CachedPrompt {
    /// The peer.
    pub peer: String,
    /// How many tokens of the prompt its engine has.
    pub tokens: usize,
    /// How many the prompt has.
    pub of: usize,
}

impl Core {
    /// The tokens of a request's prompt: its own if it is given so, else as an engine makes them. None where
    /// no engine could in time, or where the request has no prompt of its own.
    pub(crate) async fn prompt_tokens(
        &self,
        request: &ClientRequest,
        tokenizer: &Peer,
    ) -> Option<PromptTokens> {
        let parts = request.prompt_parts();
        let salt = match parts.salt {
            Some(salt) => Some(serde_json::from_slice(salt).ok()?),
            None => None,
        };
        let tokens = match tokens::given(parts.open) {
            Some(tokens) => tokens.into(),
            None => self.tokenized(request, tokenizer).await?,
        };
        Some(PromptTokens { tokens, salt })
    }

    /// How many tokens of a prompt each of these peers has cached, as far as its engine's events tell.
    pub(crate) fn cached_tokens<'a>(
        &self,
        model: &str,
        prompt: &PromptTokens,
        peers: impl IntoIterator<Item = &'a Peer>,
    ) -> Vec<usize> {
        let mut chains: Vec<Chain> = Vec::new();
        let one = |peer: &Peer| {
            let lora = peer.is_adapter(model).then_some(model);
            peer.events.cached(|block_size| {
                let at = chains.iter().position(|chain| chain.is_of(block_size, lora)).unwrap_or_else(|| {
                    chains.push(Chain::new(&self.kv_events.keys, prompt, block_size, lora));
                    chains.len() - 1
                });
                chains[at].clone()
            })
        };
        peers.into_iter().map(one).collect()
    }

    /// What engines that publish their events have cached of a request.
    pub(crate) async fn cached(&self, request: &ClientRequest) -> Vec<CachedPrompt> {
        let Some(told) = self.told(request).await else { return Vec::new() };
        let view =
            |(peer, tokens): (Arc<Peer>, usize)| CachedPrompt { peer: peer.id.clone(), tokens, of: told.of };
        told.peers.into_iter().map(view).collect()
    }

    /// Who has cached how much of a prompt by engines' own events, where a policy goes by that and any tells.
    pub(crate) async fn cached_by_events(
        &self,
        request: &ClientRequest,
        policies: [Policy; 2],
    ) -> Option<Matched> {
        if !policies.contains(&Policy::KvEvents) {
            return None;
        }
        let told = Box::pin(self.told(request)).await?;
        let bytes = |tokens: usize| (request.prompt_bytes() * tokens / told.of.max(1)) as u64;
        let known = told.peers.iter().map(|(peer, tokens)| (peer.routing.key, bytes(*tokens)));
        Some(Matched::known(known.collect()))
    }

    /// The same with the engines themselves. None where no engine publishes its events, or where the prompt's
    /// tokens could not be had in time.
    async fn told(&self, request: &ClientRequest) -> Option<Told> {
        let mut peers = self.pool.all();
        peers.retain(|peer| peer.events.is_any() && peer.is_ready() && peer.serves(request.model()));
        let prompt = self.prompt_tokens(request, peers.first()?).await?;
        let cached = self.cached_tokens(request.model(), &prompt, peers.iter().map(|peer| &**peer));
        Some(Told { peers: peers.into_iter().zip(cached).collect(), of: prompt.tokens.len() })
    }
}

/// What engines' events tell of one prompt.
#[derive(Debug)]
pub(crate) struct Told {
    /// The engines that publish their events, each with the tokens that it has cached.
    pub(crate) peers: Vec<(Arc<Peer>, usize)>,
    /// How many tokens the prompt has.
    pub(crate) of: usize,
}

/// Starts the task that subscribes; it ends with the core's stop token.
pub(crate) fn start(core: &Arc<Core>) {
    core.tasks.spawn(follow::watch(Arc::clone(core)));
}

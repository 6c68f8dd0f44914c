//! From a prefill engine's answer to a hand-off that is safe to send to a decode engine.
//! Whatever would park, kill or corrupt a decode engine is refused here.

use bytes::Bytes;
use kv_connector::protocol::params::{Generation, TransferMode};

use crate::error::HandOffRefusal;
use crate::pool::peer::Peer;
use crate::request::ClientRequest;
use crate::side_channel::channels::{ChannelAddress, NamedChannel};
use crate::splice::{Granted, PrefillAnswer, PromptPart, rewrite_address};

/// Longest engine or request id, in bytes; both are kept, and shown to operators.
const MAX_ID: usize = 1024;

/// A validated hand-off: the bytes for the decode leg, and what the router itself needs of it.
#[derive(Clone, Debug)]
pub(crate) struct HandedOff {
    /// The JSON object as the decode engine gets it.
    pub(crate) raw: Bytes,
    pub(crate) engine_id: String,
    pub(crate) remote_request_id: String,
    pub(crate) blocks: usize,
    /// The tokens of the prompt as its engine counts them.
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) generation: Generation,
    pub(crate) mode: TransferMode,
    /// Where its engine's side channel is, and what else the router must know to ask there.
    pub(crate) channel: NamedChannel,
    /// Whether a decode engine may read the blocks at all; what does not fit the prompt may kill it.
    pub(crate) sound: bool,
    /// What the client is to get of the prefill engine's answer.
    pub(crate) part: PromptPart,
}

/// A hand-off that must not be used.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    pub(crate) refusal: HandOffRefusal,
    /// The hand-off itself where it can be read, so that its blocks can be freed.
    pub(crate) unused: Option<Box<HandedOff>>,
}

impl From<HandOffRefusal> for Refused {
    fn from(refusal: HandOffRefusal) -> Self {
        Self { refusal, unused: None }
    }
}

/// Reads and checks the hand-off in a prefill engine's whole answer.
///
/// # Errors
/// Why nothing of it may reach a decode engine.
///
/// `tokens_per_block` answers for an engine id, where it is known and to be checked.
pub(crate) fn accept(
    request: &ClientRequest,
    answer: &Bytes,
    prefill: &Peer,
    same_host: bool,
    tokens_per_block: impl FnOnce(&str) -> Option<u64>,
) -> Result<HandedOff, Refused> {
    let mut answer = PrefillAnswer::parse(answer).map_err(|_| HandOffRefusal::Garbage)?;
    let Granted { raw, read } = answer.hand_off.take().ok_or(HandOffRefusal::Missing)?;
    let hand_off = read.map_err(HandOffRefusal::Defect)?;
    if hand_off.remote_engine_id.len() > MAX_ID || hand_off.remote_request_id.len() > MAX_ID {
        return Err(HandOffRefusal::Garbage.into());
    }
    let host = reachable_host(prefill, hand_off.remote_host.as_ref(), same_host);
    if host.is_some() && prefill.spec.kv_host.is_none() && prefill.is_first_private_address() {
        tracing::warn!(
            peer = %prefill.id,
            reported = %hand_off.remote_host,
            "a prefill engine's hand-offs name an address that only its own host can use, that host's is put in \
             place: set VLLM_NIXL_SIDE_CHANNEL_HOST there, or kv_host here"
        );
    }
    let rewritten = if host.is_some() || prefill.spec.kv_port.is_some() {
        rewrite_address(&raw, host, prefill.spec.kv_port).map_err(|_| HandOffRefusal::Garbage)?
    } else {
        // The answer's buffer must not live as long as the hand-off.
        Bytes::copy_from_slice(&raw)
    };
    let flat = hand_off.remote_block_ids.is_flat();
    let covered = hand_off.remote_num_tokens;
    let handed_off = HandedOff {
        engine_id: hand_off.remote_engine_id,
        remote_request_id: hand_off.remote_request_id,
        blocks: hand_off.remote_block_ids.total(),
        prompt_tokens: answer.prompt_tokens,
        generation: if flat { Generation::V2 } else { Generation::V14 },
        mode: hand_off.transfer_mode.unwrap_or(TransferMode::Pull),
        channel: NamedChannel {
            address: ChannelAddress::new(
                host.unwrap_or(&hand_off.remote_host),
                prefill.spec.kv_port.unwrap_or(hand_off.remote_port),
            ),
            tp_size: hand_off.tp_size,
            pp_size: hand_off.pp_size,
            dcp_size: hand_off.dcp_size,
            mode: hand_off.transfer_mode,
            // Versions in between hand over lists of lists too, but tell no mode.
            shape: match (flat, hand_off.transfer_mode) {
                (true, None) => Some(Generation::V2),
                (false, Some(_)) => Some(Generation::V14),
                _ => None,
            },
        },
        raw: rewritten,
        sound: true,
        part: PromptPart::default(),
    };
    let longest = hand_off.remote_block_ids.groups().iter().map(Vec::len).max().unwrap_or(0) as u64;
    let per_block = tokens_per_block(&handed_off.engine_id);
    match misfit(&answer, covered).or_else(|| shortfall(&answer, covered, longest, per_block)) {
        None => match PromptPart::take(&answer, request.wanted_of_prefill(), request.prompt().as_ref()) {
            Some(part) => Ok(HandedOff { part, ..handed_off }),
            None => {
                let refusal = HandOffRefusal::NoPromptLogprobs;
                Err(Refused { refusal, unused: Some(Box::new(handed_off)) })
            }
        },
        Some(refusal) => {
            Err(Refused { refusal, unused: Some(Box::new(HandedOff { sound: false, ..handed_off })) })
        }
    }
}

/// Whether the blocks may not be those of the prompt. They are paired from the end of the list: one
/// token more, and the decode engine silently reads blocks that are shifted by one.
fn misfit(answer: &PrefillAnswer, covered: Option<u64>) -> Option<HandOffRefusal> {
    if answer.completion_tokens != Some(1) {
        return Some(HandOffRefusal::TokenCount(answer.completion_tokens));
    }
    let (covered, prompt) = (covered?, answer.prompt_tokens?);
    (covered > prompt).then_some(HandOffRefusal::Coverage { covered, prompt })
}

/// Whether the list is shorter than the tokens need, on which a decode engine dies.
fn shortfall(
    answer: &PrefillAnswer,
    covered: Option<u64>,
    blocks: u64,
    tokens_per_block: Option<u64>,
) -> Option<HandOffRefusal> {
    let needed = covered.or(answer.prompt_tokens)?.div_ceil(tokens_per_block?);
    (blocks < needed).then_some(HandOffRefusal::TooFewBlocks { blocks, needed })
}

/// The host to put in place of the one that P reports: the operator's word, or P's own address
/// when P names one that only P itself can use.
fn reachable_host<'a>(prefill: &'a Peer, reported: &str, same_host: bool) -> Option<&'a str> {
    if let Some(host) = &prefill.spec.kv_host {
        return Some(host);
    }
    (!same_host && is_private_to_its_host(reported)).then(|| prefill.host())
}

pub(crate) fn is_private_to_its_host(host: &str) -> bool {
    if host.eq_ignore_ascii_case("localhost") || host.to_ascii_lowercase().ends_with(".localhost") {
        return true;
    }
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.parse::<std::net::IpAddr>().is_ok_and(|ip| {
        let ip = ip.to_canonical();
        ip.is_loopback() || ip.is_unspecified()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::peer::{PeerSpec, Role};
    use crate::request::{Endpoint, InjectedHandOff};

    fn accept(
        answer: &Bytes,
        prefill: &Peer,
        same_host: bool,
        tokens_per_block: impl FnOnce(&str) -> Option<u64>,
    ) -> Result<HandedOff, Refused> {
        let body = Bytes::from_static(br#"{"model":"m","prompt":"p"}"#);
        let request = ClientRequest::parse(Endpoint::Completions, body, InjectedHandOff::Refuse).unwrap();
        super::accept(&request, answer, prefill, same_host, tokens_per_block)
    }

    fn prefill(spec: impl FnOnce(&mut PeerSpec)) -> Peer {
        let mut description = PeerSpec::new(Role::Prefill, "http://10.0.0.7:8100");
        spec(&mut description);
        Peer::new("prefill-1".into(), description).unwrap()
    }

    fn answer(hand_off: &str, tokens: u64) -> Bytes {
        Bytes::from(format!(
            r#"{{"choices":[],"usage":{{"prompt_tokens":40,"completion_tokens":{tokens}}},"kv_transfer_params":{hand_off}}}"#
        ))
    }

    fn hand_off(host: &str) -> String {
        format!(
            r#"{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e","remote_request_id":"cmpl-r-0-aaaaaaaa","remote_host":"{host}","remote_port":5600,"tp_size":1,"remote_num_tokens":40,"x":1.50}}"#
        )
    }

    #[test]
    fn a_good_hand_off_passes_byte_for_byte() {
        let accepted = accept(&answer(&hand_off("10.0.0.7"), 1), &prefill(|_| {}), false, |_| None).unwrap();
        assert_eq!(accepted.raw, hand_off("10.0.0.7"));
        assert_eq!(accepted.blocks, 3);
        assert_eq!(accepted.generation, Generation::V14);
        assert_eq!(accepted.mode, TransferMode::Pull);
        assert_eq!(accepted.engine_id, "e");
    }

    #[test]
    fn item_41_an_address_private_to_p_becomes_ps_own() {
        for private in ["localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "0.0.0.0", "::", "::1", "[::1]"] {
            let accepted = accept(&answer(&hand_off(private), 1), &prefill(|_| {}), false, |_| None).unwrap();
            assert_eq!(accepted.raw, hand_off("10.0.0.7"), "{private}");
        }
    }

    #[test]
    fn item_41_that_is_told_once() {
        let peer = prefill(|_| {});
        assert!(peer.is_first_private_address());
        assert!(!peer.is_first_private_address());
        let quiet = prefill(|_| {});
        accept(&answer(&hand_off("10.0.0.7"), 1), &quiet, false, |_| None).unwrap();
        accept(&answer(&hand_off("localhost"), 1), &quiet, true, |_| None).unwrap();
        assert!(quiet.is_first_private_address(), "nothing was rewritten");
        let told = prefill(|_| {});
        accept(&answer(&hand_off("localhost"), 1), &told, false, |_| None).unwrap();
        assert!(!told.is_first_private_address());
    }

    #[test]
    fn on_the_same_host_a_private_address_stays() {
        let accepted = accept(&answer(&hand_off("localhost"), 1), &prefill(|_| {}), true, |_| None).unwrap();
        assert_eq!(accepted.raw, hand_off("localhost"));
    }

    #[test]
    fn the_operators_word_wins() {
        let peer = prefill(|spec| {
            spec.kv_host = Some("kv.internal".into());
            spec.kv_port = Some(7000);
        });
        let accepted = accept(&answer(&hand_off("10.0.0.7"), 1), &peer, true, |_| None).unwrap();
        assert_eq!(accepted.raw, hand_off("kv.internal").replace("5600", "7000"));
    }

    #[test]
    fn two_tokens_are_refused() {
        let refused =
            accept(&answer(&hand_off("10.0.0.7"), 2), &prefill(|_| {}), false, |_| None).unwrap_err();
        assert_eq!(refused.refusal, HandOffRefusal::TokenCount(Some(2)));
        assert_eq!(refused.refusal.label(), "refused");
        assert_eq!(refused.unused.unwrap().raw, hand_off("10.0.0.7"), "its blocks can still be freed");
    }

    #[test]
    fn more_tokens_than_the_prompt_has_are_refused() {
        let covering = hand_off("10.0.0.7").replace(r#""remote_num_tokens":40"#, r#""remote_num_tokens":41"#);
        let refused = accept(&answer(&covering, 1), &prefill(|_| {}), false, |_| None).unwrap_err();
        assert_eq!(refused.refusal, HandOffRefusal::Coverage { covered: 41, prompt: 40 });
    }

    #[test]
    fn fewer_blocks_than_the_tokens_fill_are_refused() {
        let with = |tokens_per_block| {
            accept(&answer(&hand_off("10.0.0.7"), 1), &prefill(|_| {}), false, |id| {
                assert_eq!(id, "e");
                tokens_per_block
            })
        };
        assert!(with(Some(16)).is_ok(), "40 tokens fill 3 blocks of 16");
        assert!(with(None).is_ok());
        let refused = with(Some(10)).unwrap_err();
        assert_eq!(refused.refusal, HandOffRefusal::TooFewBlocks { blocks: 3, needed: 4 });
    }

    #[test]
    fn null_and_absent_are_missing() {
        let missing = [answer("null", 1), Bytes::from_static(b"{}")];
        for body in missing {
            let refused = accept(&body, &prefill(|_| {}), false, |_| None).unwrap_err();
            assert_eq!(refused.refusal, HandOffRefusal::Missing);
        }
        let garbage = accept(&Bytes::from_static(b"<html>"), &prefill(|_| {}), false, |_| None).unwrap_err();
        assert_eq!(garbage.refusal, HandOffRefusal::Garbage);
    }
}

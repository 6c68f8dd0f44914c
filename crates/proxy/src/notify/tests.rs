use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::{AgentMetadataV14, NixlAgentMetadata};
use kv_connector::protocol::params::TransferMode;

use super::*;
use crate::registry::{RankPayload, Registration, RegistryLimits};
use crate::side_channel::channels::{ChannelAddress, NamedChannel};
use crate::splice::PromptPart;

fn hand_off(pp_size: u32, tp_size: u32) -> HandedOff {
    HandedOff {
        raw: bytes::Bytes::new(),
        engine_id: "e".into(),
        remote_request_id: "cmpl-r-0-aaaaaaaa".into(),
        blocks: 3,
        prompt_tokens: None,
        generation: Generation::V14,
        mode: TransferMode::Pull,
        channel: NamedChannel {
            address: ChannelAddress::new("10.0.0.7", 5600),
            tp_size,
            pp_size,
            dcp_size: 1,
            mode: None,
            shape: None,
        },
        part: PromptPart::default(),
        sound: true,
    }
}

pub(super) fn payload(engine_id: &str, blob: &[u8]) -> bytes::Bytes {
    let metadata = AgentMetadataV14 {
        engine_id: engine_id.to_owned(),
        agent_metadata: blob.to_vec(),
        ..AgentMetadataV14::default()
    };
    NixlHandshakePayload {
        compatibility_hash: "h".to_owned(),
        agent_metadata_bytes: NixlAgentMetadata::V14(Box::new(metadata)).encode(),
    }
    .encode()
    .into()
}

pub(super) fn registered(registry: &Registry, engine_id: &str, blobs: &[&[u8]]) -> Arc<EngineRecord> {
    let rank = |(tp_rank, blob): (u32, &&[u8])| RankPayload {
        pp_rank: 0,
        tp_rank,
        payload: payload(engine_id, blob),
    };
    registry
        .register(Registration {
            engine_id: engine_id.to_owned(),
            ranks: Some((0..).zip(blobs).map(rank).collect()),
            ..Registration::default()
        })
        .unwrap();
    registry.engine(engine_id).unwrap()
}

pub(super) fn notice(engine_id: &str, engine: &EngineRecord) -> Notice {
    let tp_size = u32::try_from(engine.ranks.len()).unwrap();
    let hand_off = HandedOff { engine_id: engine_id.into(), ..hand_off(1, tp_size) };
    Notice::new(&hand_off, engine, Some("1.5.1".into())).unwrap()
}

#[tokio::test]
async fn a_notice_goes_to_every_rank_or_is_none() {
    let registry = Registry::new(RegistryLimits::default());
    let engine = registered(&registry, "e", &[b"a", b"b"]);
    let notice = Notice::new(&hand_off(1, 2), &engine, None).unwrap();
    assert_eq!(notice.ranks.len(), 2);
    assert_eq!(notice.message, b"cmpl-r-0-aaaaaaaa:1");
    for (pp_size, tp_size, missing) in [(1, 3, (0, 2)), (2, 2, (1, 0)), (u32::MAX, 2, (1, 0))] {
        let refused = Notice::new(&hand_off(pp_size, tp_size), &engine, None).unwrap_err();
        assert_eq!(refused, NotNotified::NotRegistered { rank: missing });
    }
}

#[test]
fn small_talk_is_for_those_who_ignore_it() {
    assert_eq!(Notice::small_talk(Generation::V14).as_deref(), Some(&b"HB:"[..]));
    assert_eq!(Notice::small_talk(Generation::V2), None);
}

#[tokio::test]
async fn without_an_agent_every_notice_fails_at_once() {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let registry = Registry::new(RegistryLimits::default());
    let notifier = Notifier::start(Nixl::default(), registry.clone(), &tasks, stop.clone());
    notifier.prepare();
    let engine = registered(&registry, "e", &[b"a"]);
    for _ in 0..3 {
        assert_eq!(notifier.notify(notice("e", &engine)).await, Err(NotNotified::Unavailable));
    }
    stop.cancel();
    tasks.close();
    tasks.wait().await;
    assert_eq!(notifier.notify(notice("e", &engine)).await, Err(NotNotified::Busy));
}

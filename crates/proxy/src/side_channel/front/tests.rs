use kv_connector::protocol::handshake::{NixlHandshakePayload, decode_clock};
use kv_connector::protocol::metadata::{AgentMetadataV2, AgentMetadataV14, NixlAgentMetadata};
use kv_connector::protocol::params::Generation;
use proptest::prelude::*;

use super::*;
use crate::registry::{RankPayload, Registration, RegistryLimits};

fn payload(metadata: NixlAgentMetadata) -> Bytes {
    let agent_metadata_bytes = metadata.encode();
    NixlHandshakePayload { compatibility_hash: "h".to_owned(), agent_metadata_bytes }.encode().into()
}

fn registry(clock: Option<f64>) -> Registry {
    let registry = Registry::new(RegistryLimits::default());
    let newest = |tp_rank: u8| {
        payload(NixlAgentMetadata::V14(Box::new(AgentMetadataV14 {
            engine_id: "e".to_owned(),
            agent_metadata: vec![tp_rank],
            ..AgentMetadataV14::default()
        })))
    };
    let ranks = (0..2).map(|tp_rank| RankPayload { pp_rank: 0, tp_rank, payload: newest(tp_rank as u8) });
    let ranks = Some(ranks.collect());
    registry
        .register(Registration { engine_id: "e".to_owned(), clock, ranks, ..Registration::default() })
        .unwrap();
    registry
}

fn request(generation: Generation, pp_rank: u32, tp_rank: u32) -> Vec<Vec<u8>> {
    vec![Vec::new(), HandshakeRequest { pp_rank, tp_rank }.encode(generation)]
}

#[tokio::test(start_paused = true)]
async fn every_rank_is_answered_in_the_askers_dialect_byte_for_byte() {
    let registry = registry(Some(1000.0));
    tokio::time::advance(Duration::from_secs(5)).await;
    for tp_rank in 0..2 {
        let exact = registry.get("e", 0, tp_rank).unwrap().payload.to_vec();
        let newest = answer(&registry, "e", &request(Generation::V14, 0, tp_rank)).unwrap();
        assert_eq!((newest.len(), &newest[0]), (2, &exact));
        let clock = decode_clock(&newest[1]).unwrap();
        assert!((clock - 1005.0).abs() < 0.01, "{clock}");
        assert_eq!(answer(&registry, "e", &request(Generation::V2, 0, tp_rank)), Some(vec![exact]));
    }
}

#[tokio::test]
async fn without_a_clock_every_expiry_counts_as_past() {
    let reply = answer(&registry(None), "e", &request(Generation::V14, 0, 0)).unwrap();
    assert_eq!(decode_clock(&reply[1]), Ok(FAR_AHEAD));
}

#[tokio::test]
async fn what_is_not_served_gets_no_answer() {
    let registry = registry(None);
    for frames in [
        request(Generation::V14, 0, 2),
        request(Generation::V14, 1, 0),
        request(Generation::V2, 0, 9),
        vec![b"x".to_vec(), request(Generation::V14, 0, 0).remove(1)],
        vec![request(Generation::V14, 0, 0).remove(1)],
        vec![Vec::new(), b"get_meta_msg".to_vec()],
        Vec::new(),
    ] {
        assert_eq!(answer(&registry, "e", &frames), None, "{frames:?}");
    }
    assert_eq!(answer(&registry, "other", &request(Generation::V14, 0, 0)), None);
    registry.remove("e");
    assert_eq!(answer(&registry, "e", &request(Generation::V14, 0, 0)), None);
}

#[tokio::test]
async fn a_place_is_an_address_or_an_engine() {
    let registry = Registry::new(RegistryLimits::default());
    let metadata = |engine_id: &str| {
        payload(NixlAgentMetadata::V2(AgentMetadataV2 {
            engine_id: engine_id.to_owned(),
            ..Default::default()
        }))
    };
    let register = |engine_id: &str, base_url: Option<&str>, state: EngineState, ranks: bool| {
        let payload = metadata(engine_id);
        let rank = RankPayload { pp_rank: 0, tp_rank: 0, payload };
        let registration = Registration {
            engine_id: engine_id.to_owned(),
            base_url: base_url.map(str::to_owned),
            state,
            ranks: Some(if ranks { vec![rank] } else { Vec::new() }),
            ..Registration::default()
        };
        registry.register(registration).unwrap();
    };
    register("a", Some("http://10.0.0.1:8000"), EngineState::Ready, true);
    register("b", None, EngineState::Draining, true);
    register("c", None, EngineState::Registering, true);
    register("d", None, EngineState::Ready, false);
    let places = engines_by_place(&registry);
    let places: Vec<(&str, &str)> = places.iter().map(|(place, id)| (place.as_str(), id.as_str())).collect();
    assert_eq!(places, [("b", "b"), ("http://10.0.0.1:8000 0", "a")]);
    register("a2", Some("http://10.0.0.1:8000"), EngineState::Ready, true);
    assert_eq!(engines_by_place(&registry)["http://10.0.0.1:8000 0"], "a2");
}

proptest! {
    #[test]
    fn whatever_comes_in_ends_nothing(
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..5),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _entered = runtime.enter();
        let _reply = answer(&registry(None), "e", &frames);
    }
}

use proptest::prelude::*;
use tokio::net::TcpListener;

use super::*;
use crate::golden::{list, strings, unhex, vectors};

fn case(name: &str) -> serde_json::Value {
    let all = vectors("kv_events.json");
    list(&all["cases"]).iter().find(|case| case["name"] == name).unwrap().clone()
}

fn hashes(case: &serde_json::Value) -> Vec<BlockHash> {
    list(&case["hashes"]).iter().map(|hash| BlockHash::Bytes(unhex(hash).into())).collect()
}

fn tokens(case: &serde_json::Value) -> Vec<u32> {
    list(&case["tokens"]).iter().map(|token| token.as_u64().unwrap() as u32).collect()
}

#[test]
fn the_current_form_is_read_whatever_the_hash() {
    for name in ["sha256", "sha256_cbor"] {
        let case = case(name);
        let (hashes, tokens) = (hashes(&case), tokens(&case));
        let salted = BlocksStored {
            hashes: hashes[..1].to_vec(),
            tokens: tokens[..4].to_vec(),
            block_size: 4,
            medium: Some("GPU".to_owned()),
            extra_keys: Some(vec![extra_keys(None, Some("s1"))]),
            group: Some(0),
            ..BlocksStored::default()
        };
        let next = BlocksStored {
            hashes: hashes[1..].to_vec(),
            parent: Some(hashes[0].clone()),
            tokens: tokens[4..].to_vec(),
            extra_keys: Some(vec![None]),
            ..salted.clone()
        };
        let removed =
            KvEvent::Removed { hashes: hashes[1..].to_vec(), medium: Some("GPU".to_owned()), group: Some(0) };
        let events = vec![KvEvent::Stored(salted), KvEvent::Stored(next), removed, KvEvent::Cleared];
        let batch = EventBatch { rank: Some(0), events };
        assert_eq!(EventBatch::decode(&unhex(&case["payload"])), Ok(batch.clone()));
        // What this engine writes reads the same.
        assert_eq!(EventBatch::decode(&batch.encode(1.5)), Ok(batch));
    }
}

#[test]
fn numbers_and_adapters_are_read() {
    let case = case("numbers_and_lora");
    let batch = EventBatch::decode(&unhex(&case["payload"])).unwrap();
    let [KvEvent::Stored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
    assert_eq!(batch.rank, Some(3));
    let numbers =
        strings(&case["hashes"]).iter().map(|hash| BlockHash::Number(hash.parse().unwrap())).collect();
    assert_eq!((&stored.hashes, &stored.lora), (&numbers, &Some("ad".to_owned())));
    assert_eq!(stored.extra_keys, Some(vec![extra_keys(Some("ad"), None); 2]));
    assert_eq!(EventBatch::decode(&batch.encode(0.0)), Ok(batch.clone()));
}

#[test]
fn the_former_form_is_read() {
    let case = case("arrays");
    let batch = EventBatch::decode(&unhex(&case["payload"])).unwrap();
    let [
        KvEvent::Stored(stored),
        KvEvent::Removed { hashes: removed, medium, group: None },
        KvEvent::Cleared,
    ] = &batch.events[..]
    else {
        panic!("{batch:?}")
    };
    assert_eq!((&stored.hashes, &stored.tokens, stored.block_size), (&hashes(&case), &tokens(&case), 4));
    assert_eq!((&stored.parent, &stored.extra_keys, &stored.lora), (&None, &None, &None));
    assert_eq!((removed, medium.as_deref()), (&hashes(&case)[1..].to_vec(), Some("GPU")));
}

#[test]
fn strange_batches_are_refused() {
    let good = unhex(&case("sha256")["payload"]);
    for length in 0..good.len() {
        // The rank is the last byte; without it the head lies.
        assert!(EventBatch::decode(&good[..length]).is_err(), "{length} bytes of it");
    }
    let deep = [vec![0x92, 0xc0], vec![0x91; 100_000]].concat();
    assert_eq!(EventBatch::decode(&deep), Err(BadBatch::Malformed));
    let endless = [&[0x92, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff][..], &[0xc0]].concat();
    assert_eq!(EventBatch::decode(&endless), Err(BadBatch::Malformed));
    let unknown = [&[0x92, 0xc0, 0x91, 0x81, 0xa4][..], b"type", &[0xa3], b"New"].concat();
    assert_eq!(EventBatch::decode(&unknown), Ok(EventBatch::default()));
}

proptest! {
    #[test]
    fn garbage_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = EventBatch::decode(&bytes);
    }

    /// What differs from a good batch in some bytes is read or refused.
    #[test]
    fn damage_is_survived(
        which in 0..4_usize, damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let all = vectors("kv_events.json");
        let mut bytes = unhex(&list(&all["cases"])[which]["payload"]);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(batch) = EventBatch::decode(&bytes) {
            for event in &batch.events {
                if let KvEvent::Stored(stored) = event {
                    prop_assert_eq!(stored.tokens.len(), stored.hashes.len() * stored.block_size);
                }
            }
        }
    }
}

#[tokio::test]
async fn batches_arrive_and_those_that_were_missed_can_be_had() {
    let publisher = EventPublisher::new(3);
    let (live, missed) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let (live_port, missed_port) = (live.local_addr().unwrap().port(), missed.local_addr().unwrap().port());
    for number in 0..5 {
        publisher.publish(vec![number]);
    }
    let reading = async {
        let mut subscriber = EventSubscriber::connect("127.0.0.1", live_port).await.unwrap();
        let mut kept = Vec::new();
        replay("127.0.0.1", missed_port, 1, |published| kept.push(published)).await.unwrap();
        let expected = |number: u64| Published { number, payload: vec![number as u8] };
        // Number 1 is no longer kept.
        assert_eq!(kept, [expected(2), expected(3), expected(4)]);
        // The subscription has no answer; it may take a moment to be seen.
        let publishing = async {
            for number in 5_u8.. {
                publisher.publish(vec![number]);
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        let first = tokio::select! {
            () = publishing => unreachable!(),
            first = subscriber.next() => first.unwrap(),
        };
        assert!(first.number >= 5 && first == expected(first.number), "{first:?}");
    };
    tokio::select! {
        () = publisher.clone().serve(live) => panic!("it ended"),
        () = publisher.clone().serve_replays(missed) => panic!("it ended"),
        () = reading => {}
    }
}

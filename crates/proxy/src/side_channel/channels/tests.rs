use super::*;
use crate::pool::peer::Role;

fn named(host: &str, port: u16) -> NamedChannel {
    NamedChannel {
        address: ChannelAddress::new(host, port),
        tp_size: 2,
        pp_size: 1,
        dcp_size: 1,
        mode: Some(TransferMode::Pull),
        shape: Some(Generation::V14),
    }
}

fn configured(address: &str, dp_size: u32) -> Channels {
    let mut spec = PeerSpec::new(Role::Prefill, "http://10.0.0.7:8100");
    (spec.side_channel, spec.dp_size) = (Some(address.to_owned()), Some(dp_size));
    Channels::of(&spec)
}

fn read(engine_id: &str) -> Outcome {
    Outcome::Read { engine_id: engine_id.to_owned(), ranks: 2, dialect: Generation::V14 }
}

const AUTO: ReadSideChannels = ReadSideChannels::Auto;

#[test]
fn addresses_are_read_and_written() {
    for text in ["10.0.0.7:5600", "host:1", "[::1]:5600"] {
        assert_eq!(ChannelAddress::parse(text).unwrap().to_string(), text);
    }
    assert_eq!(ChannelAddress::parse("[::1]:5600").unwrap().host, "::1");
    for text in ["", "host", "host:", ":1", "host:0", "host:65536", "::1:5600", "[::1:5600", "a]:1"] {
        assert_eq!(ChannelAddress::parse(text), None, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_look_is_due_once_and_again_when_a_hand_off_names_somebody_new() {
    let channels = Channels::default();
    let now = Instant::now();
    assert!(channels.due(now).is_empty());
    assert_eq!(channels.named("e1", &named("h", 5600), AUTO), News { ask: true, replaced: None });
    assert_eq!(channels.named("e1", &named("h", 5600), AUTO), News::default());
    let due = channels.due(now);
    assert_eq!(due.len(), 1);
    assert_eq!(due[0].named.as_ref().unwrap().1.ranks(), [(0, 0), (0, 1)]);
    assert!(channels.due(now).is_empty(), "it is under way");
    let next = now + Duration::from_secs(5);
    assert!(channels.looked(&due[0].address, read("e1"), now, next));
    assert!(channels.due(now).is_empty());
    let restarted = channels.named("e2", &named("h", 5600), AUTO);
    assert_eq!(restarted, News { ask: true, replaced: Some("e1".to_owned()) });
    let due = channels.due(now);
    assert_eq!((due.len(), &due[0].engine_id), (1, &None));
    // Another one comes while the look is under way: its answer is not the last word.
    assert!(channels.named("e3", &named("h", 5600), AUTO).ask);
    assert!(channels.looked(&due[0].address, read("e2"), now, next));
    assert_eq!(channels.due(now).len(), 1);
}

#[test]
fn each_data_parallel_rank_has_a_port_and_a_place() {
    let channels = configured("10.0.0.7:5600", 3);
    let due = channels.due(Instant::now());
    let places: Vec<(u16, u32)> = due.iter().map(|due| (due.address.port, due.place)).collect();
    assert_eq!(places, [(5600, 0), (5601, 1), (5602, 2)]);
    assert_eq!(configured("h:65535", 3).due(Instant::now()).len(), 1);
}

#[test]
fn an_operators_word_stands_for_another_name_of_its_host() {
    let channels = configured("10.0.0.7:5600", 1);
    assert!(channels.named("e", &named("p.internal", 5600), AUTO).ask);
    assert_eq!(channels.views().len(), 1);
    assert!(channels.named("f", &named("p.internal", 5601), AUTO).ask);
    let due = channels.due(Instant::now());
    assert_eq!(due.iter().map(|due| due.place).collect::<Vec<_>>(), [0, 1]);
    let strict = configured("10.0.0.7:5600", 1);
    assert_eq!(strict.named("f", &named("h", 5601), ReadSideChannels::Configured), News::default());
    assert_eq!(strict.views().len(), 1);
}

#[test]
fn hand_offs_cannot_fill_the_memory() {
    let channels = configured("10.0.0.7:1", 1);
    for port in 2..5000 {
        channels.named(&format!("e{port}"), &named("h", port), AUTO);
    }
    assert!(channels.views().len() <= MAX_CHANNELS);
    assert!(channels.views().iter().any(|view| view.configured));
    let mut absurd = named("h", 9);
    (absurd.tp_size, absurd.pp_size) = (u32::MAX, u32::MAX);
    assert_eq!(absurd.ranks(), [(0, 0)]);
}

#[tokio::test(start_paused = true)]
async fn a_learnt_side_channel_that_moved_is_forgotten() {
    let channels = configured("10.0.0.7:5600", 1);
    channels.named("e1", &named("h", 5700), AUTO);
    let (old, fixed) = (ChannelAddress::new("h", 5700), ChannelAddress::new("10.0.0.7", 5600));
    let failed = || Outcome::Failed { reason: "gone".to_owned() };
    let look = |address: &ChannelAddress, outcome| {
        channels.due(Instant::now());
        channels.looked(address, outcome, Instant::now(), Instant::now());
    };
    look(&old, read("e1"));
    look(&fixed, read("e0"));
    tokio::time::advance(Duration::from_secs(1)).await;
    look(&old, failed());
    assert_eq!(channels.forget_if_moved(&old), None, "its listener may have ended");
    channels.named("e2", &named("h", 5800), AUTO);
    assert_eq!(channels.forget_if_moved(&fixed), None, "the operator named it");
    assert_eq!(channels.forget_if_moved(&old), Some("e1".to_owned()));
    assert_eq!(channels.views().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_engine_of_a_fixed_id_that_comes_back_at_another_port_keeps_its_place() {
    let channels = Channels::default();
    channels.named("e0", &named("h", 5600), AUTO);
    channels.named("e", &named("h", 5700), AUTO);
    let (now, address) = (Instant::now(), ChannelAddress::new("h", 5700));
    assert_eq!(channels.due(now).iter().map(|due| due.place).collect::<Vec<_>>(), [0, 1]);
    channels.looked(&address, read("e"), now, now);
    let moved = News { ask: true, replaced: Some("e".to_owned()) };
    assert_eq!(channels.named("e", &named("h", 5701), AUTO), moved);
    let due = channels.due(now);
    let places: Vec<(u16, u32)> = due.iter().map(|due| (due.address.port, due.place)).collect();
    assert_eq!(places, [(5701, 1)]);
    assert!(!channels.is_elsewhere("e", &due[0].address));
    assert!(!channels.looked(&address, read("e"), now, now), "the old one is not there any more");
    // Another name of the same host, at the same port, is no restart.
    assert_eq!(channels.named("e", &named("g", 5701), AUTO), News { ask: true, replaced: None });
    // What the operator has named does not move.
    let channels = configured("10.0.0.7:5600", 1);
    channels.named("e", &named("h", 5600), AUTO);
    assert_eq!(channels.named("e", &named("h", 5601), AUTO), News { ask: true, replaced: None });
}

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::settings::{ModelSettings, ModelTarget, PdRatio};
use super::turns::Turns;
use super::{Candidate, Key, ModelTable, divide};

fn entry(name: &str, targets: &[(&str, u32)]) -> ModelSettings {
    let targets =
        targets.iter().map(|(model, weight)| ModelTarget { model: (*model).into(), weight: *weight });
    ModelSettings { name: name.into(), targets: targets.collect(), ..ModelSettings::default() }
}

fn first(table: &ModelTable, name: &str, key: Option<Key<'_>>) -> Arc<str> {
    table.entry(name).unwrap().1.choose(key).next().cloned().unwrap()
}

#[test]
fn names_aliases_and_the_default_lead_to_their_models() {
    let mut chat = entry("chat", &[("llama", 1)]);
    chat.aliases = vec!["gpt-4".into(), "gpt-4o".into()];
    chat.default = true;
    let table = ModelTable::of(&[chat, entry("plain", &[])]);
    for name in ["chat", "gpt-4", "gpt-4o"] {
        assert_eq!(&*first(&table, name, None), "llama");
    }
    assert_eq!(&*first(&table, "plain", None), "plain", "without targets, the model of that name");
    assert!(table.entry("llama").is_none(), "what engines list needs no entry");
    assert_eq!(table.default_name().map(|name| &**name), Some("chat"));
    let names: Vec<&str> = table.all().map(|(name, _)| &**name).collect();
    assert_eq!(names, ["chat", "gpt-4", "gpt-4o", "plain"]);
}

#[test]
fn a_target_of_weight_zero_gets_nothing_and_others_stand_in_for_one_another() {
    let table = ModelTable::of(&[entry("m", &[("a", 9), ("off", 0), ("b", 1)])]);
    let (_, entry) = table.entry("m").unwrap();
    for _ in 0..20 {
        let order: Vec<&str> = entry.choose(None).map(|model| &**model).collect();
        assert!(order == ["a", "b"] || order == ["b", "a"], "{order:?}");
    }
    assert_eq!(entry.models().map(|model| &**model).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn a_key_stays_with_its_model_and_few_move_when_shares_change() {
    let old = ModelTable::of(&[entry("m", &[("a", 90), ("b", 10)])]);
    let new = ModelTable::of(&[entry("m", &[("a", 80), ("b", 20)])]);
    let (mut canary, mut moved) = (0, 0);
    for number in 0..10_000 {
        let key = format!("user-{number}");
        let of = |table| first(table, "m", Some(Key::User(key.as_bytes())));
        assert_eq!(of(&old), of(&old));
        assert_eq!(of(&old), first(&old, "m", Some(Key::Session(key.as_bytes()))));
        canary += usize::from(&*of(&old) == "b");
        moved += usize::from(of(&old) != of(&new));
    }
    assert!((900..1100).contains(&canary), "{canary}");
    assert!((900..1100).contains(&moved), "{moved}: only those whose part of the line changes hands");
}

#[test]
fn what_cannot_be_used_is_named_with_its_place() {
    let mut second = entry("b", &[("x", 0)]);
    second.aliases = vec!["a".into()];
    let mut third = entry("c", &[("x", 1), ("x", 1)]);
    (third.default, third.pd_ratio) = (true, Some(PdRatio { prefill: 0, decode: 1 }));
    let mut fourth = entry("d", &[("x", 1001)]);
    (fourth.default, fourth.pd_ratio) = (true, Some(PdRatio { prefill: 1, decode: 1 }));
    let all = [entry("a", &[]), second, third, fourth];
    let places: Vec<usize> = ModelSettings::faults(&all).into_iter().map(|(at, ..)| at).collect();
    assert_eq!(places, [1, 1, 2, 2, 2, 3, 3, 3]);
    assert!(ModelSettings::faults(&[entry("a", &[("a", 9), ("a-new", 1)])]).is_empty());
}

fn divided<'a>(ratio: [u32; 2], prefill: &[&'a str], decode: &[&'a str]) -> [BTreeSet<&'a str>; 2] {
    let of = |places: &[&'a str]| places.iter().map(|place| Candidate { place }).collect::<Vec<_>>();
    let (p, d) = (of(prefill), of(decode));
    let shared = divide("m", PdRatio { prefill: ratio[0], decode: ratio[1] }, &p, &d);
    [
        shared.prefill.iter().map(|at| prefill[*at]).collect(),
        shared.decode.iter().map(|at| decode[*at]).collect(),
    ]
}

#[test]
fn a_ratio_limits_the_side_of_which_there_is_too_much() {
    let sizes = |ratio, p: usize, d: usize| {
        let names: Vec<String> = (0..p + d).map(|number| format!("http://{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        divided(ratio, &names[..p], &names[p..]).map(|side| side.len())
    };
    assert_eq!(sizes([1, 3], 4, 6), [2, 6]);
    assert_eq!(sizes([1, 3], 4, 7), [3, 7], "rounded up: rather too much than too little");
    assert_eq!(sizes([1, 3], 1, 9), [1, 3]);
    assert_eq!(sizes([3, 1], 2, 5), [2, 1]);
    assert_eq!(sizes([1, 1], 0, 5), [0, 1], "one waits for the other side to come");
    assert_eq!(sizes([1, 3], 0, 0), [0, 0]);
}

#[test]
fn engines_that_may_do_either_do_one_of_both() {
    let both = ["a", "b", "c", "d"];
    let [prefill, decode] = divided([1, 3], &both, &both);
    assert_eq!((prefill.len(), decode.len()), (1, 3));
    assert!(prefill.is_disjoint(&decode));
    let [prefill, decode] = divided([1, 1], &["a", "b", "p"], &["a", "b"]);
    assert_eq!((prefill.len(), decode.len()), (1, 1), "of three, one is too much: {prefill:?} {decode:?}");
    assert_eq!(divided([1, 3], &["a"], &["a"]), [BTreeSet::from(["a"]), BTreeSet::from(["a"])]);
}

proptest! {
    #[test]
    fn each_target_has_its_share_to_within_one_at_every_moment(
        weights in prop::collection::vec(0_u32..60, 1..8),
        rounds in 1_usize..3,
    ) {
        let total: u32 = weights.iter().sum();
        prop_assume!(total > 0);
        let turns = Turns::of(&weights);
        let mut had = vec![0_i64; weights.len()];
        for turn in 1..=(total as usize * rounds) {
            had[turns.take()] += 1;
            for (count, weight) in had.iter().zip(&weights) {
                // |count - share| < 1, in whole numbers.
                let off = count * i64::from(total) - i64::from(*weight) * turn as i64;
                prop_assert!(off.abs() < i64::from(total), "after {turn} of {weights:?}: {had:?}");
            }
        }
    }

    #[test]
    fn a_ratio_keeps_both_sides_and_moves_few(
        ratio in (1_u32..5, 1_u32..5),
        prefill in 1_usize..12,
        decode in 1_usize..12,
        both in 0_usize..6,
    ) {
        let name = |kind: &str, number: usize| format!("http://{kind}-{number}");
        let shared: Vec<String> = (0..both).map(|number| name("b", number)).collect();
        let side = |kind: &str, count: usize| {
            (0..count).map(|number| name(kind, number)).chain(shared.iter().cloned()).collect::<Vec<_>>()
        };
        let (p, d) = (side("p", prefill), side("d", decode));
        let (p, d): (Vec<&str>, Vec<&str>) =
            (p.iter().map(String::as_str).collect(), d.iter().map(String::as_str).collect());
        let ratio = [ratio.0, ratio.1];
        let [of_p, of_d] = divided(ratio, &p, &d);
        prop_assert!(!of_p.is_empty() && !of_d.is_empty());
        prop_assert!(of_p.is_disjoint(&of_d));
        // Neither side has a whole engine more than the ratio gives it.
        let (np, nd) = (of_p.len(), of_d.len());
        let (rp, rd) = (ratio[0] as usize, ratio[1] as usize);
        prop_assert!((np - 1) * rd < nd * rp || np == 1, "{np}:{nd} for {rp}:{rd}");
        prop_assert!((nd - 1) * rp < np * rd || nd == 1, "{np}:{nd} for {rp}:{rd}");
        // The order in which engines are known does not matter.
        let (mut p_again, mut d_again) = (p.clone(), d.clone());
        p_again.reverse();
        d_again.rotate_left(d.len() / 2);
        prop_assert_eq!(divided(ratio, &p_again, &d_again), [of_p.clone(), of_d.clone()]);
        // One that did not take part can go without moving anybody, where roles are fixed.
        if both == 0 && let Some(idle) = p.iter().find(|place| !of_p.contains(**place)) {
            let rest: Vec<&str> = p.iter().copied().filter(|place| place != idle).collect();
            prop_assert_eq!(divided(ratio, &rest, &d), [of_p, of_d]);
        }
    }
}

use std::collections::HashMap as Map;

use proptest::prelude::*;

use super::*;

fn bounds(requests: usize) -> Bounds {
    Bounds { requests, ..Bounds::default() }
}

fn ask(scopes: Scopes, client: &str) -> Ask {
    Ask { scopes, priority: 0, tokens: 10, client: Some(client.into()) }
}

fn queue(bounds: &[Bounds]) -> Queue<u32> {
    Queue::new(bounds, 0, Duration::from_secs(60), Instant::now())
}

const ONE: Scopes = [0, NONE, NONE, NONE];

fn waits(queue: &mut Queue<u32>, ask: &Ask, name: u32) -> Order {
    match queue.offer(ask, name, Instant::now()) {
        Offer::Waits(order) => order,
        other => panic!("{other:?}"),
    }
}

fn refused(queue: &mut Queue<u32>, ask: &Ask) -> Refusal {
    match queue.offer(ask, 0, Instant::now()) {
        Offer::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

fn runs(queue: &mut Queue<u32>, ask: &Ask) {
    assert!(matches!(queue.offer(ask, 0, Instant::now()), Offer::Runs));
}

/// Who runs when one after the other ends.
fn served(queue: &mut Queue<u32>, scopes: Scopes, count: usize) -> Vec<u32> {
    let mut woken = Vec::new();
    for _ in 0..count {
        queue.leave(scopes, Duration::from_secs(1), &mut woken);
    }
    woken
}

#[test]
fn clients_take_turns_and_the_urgent_goes_first() {
    let mut queue = queue(&[bounds(1)]);
    runs(&mut queue, &ask(ONE, "a"));
    for name in 0..4 {
        waits(&mut queue, &ask(ONE, "a"), name);
    }
    for name in 10..12 {
        waits(&mut queue, &ask(ONE, "b"), name);
    }
    waits(&mut queue, &Ask { priority: -1, ..ask(ONE, "a") }, 99);
    waits(&mut queue, &Ask { priority: 5, ..ask(ONE, "b") }, 55);
    assert_eq!(served(&mut queue, ONE, 8), [99, 0, 10, 1, 11, 2, 3, 55]);
}

#[test]
fn one_that_leaves_makes_room_at_once() {
    let limited = Bounds { requests: 1, waiting: 2, ..Bounds::default() };
    let mut queue = queue(&[limited]);
    runs(&mut queue, &ask(ONE, "a"));
    let first = waits(&mut queue, &ask(ONE, "a"), 1);
    waits(&mut queue, &ask(ONE, "a"), 2);
    assert_eq!(refused(&mut queue, &ask(ONE, "a")).full, Full::Places);
    assert!(queue.withdraw(ONE, first));
    assert!(!queue.withdraw(ONE, first));
    waits(&mut queue, &ask(ONE, "a"), 3);
    assert_eq!(served(&mut queue, ONE, 2), [2, 3]);
}

#[test]
fn a_client_at_its_limit_holds_nobody_up() {
    // 0: the stage; 1: one client's own limit.
    let mut queue = queue(&[bounds(2), bounds(1)]);
    let (limited, free) = ([0, 1, NONE, NONE], ONE);
    runs(&mut queue, &ask(limited, "a"));
    waits(&mut queue, &ask(limited, "a"), 1);
    runs(&mut queue, &ask(free, "b"));
    waits(&mut queue, &ask(free, "b"), 2);
    // b's place is free: a waits for its own limit, so b goes on.
    assert_eq!(served(&mut queue, free, 1), [2]);
    assert_eq!(served(&mut queue, limited, 1), [1]);
}

#[test]
fn waiting_tokens_are_bounded() {
    let mut queue = queue(&[Bounds { requests: 1, waiting_tokens: 25, ..Bounds::default() }]);
    runs(&mut queue, &ask(ONE, "a"));
    waits(&mut queue, &ask(ONE, "a"), 1);
    waits(&mut queue, &ask(ONE, "a"), 2);
    assert_eq!(refused(&mut queue, &ask(ONE, "a")).full, Full::Places);
    assert_eq!(queue.counts(0).waiting_tokens, 20);
}

#[test]
fn the_time_to_try_again_follows_what_was_served() {
    let mut queue = queue(&[Bounds { requests: 2, waiting: 3, ..Bounds::default() }]);
    for _ in 0..2 {
        runs(&mut queue, &ask(ONE, "a"));
    }
    for name in 0..3 {
        waits(&mut queue, &ask(ONE, "a"), name);
    }
    assert_eq!(refused(&mut queue, &ask(ONE, "a")).after, UNKNOWN_WAIT);
    let mut woken = Vec::new();
    queue.leave(ONE, Duration::from_secs(8), &mut woken);
    assert_eq!(woken, [0]);
    waits(&mut queue, &ask(ONE, "a"), 3);
    // The fourth in a row for two places that are held for 8 s each.
    assert_eq!(refused(&mut queue, &ask(ONE, "a")).after, Duration::from_secs(16));
}

#[test]
fn nobody_waits_in_vain() {
    let mut queue = queue(&[bounds(1)]);
    runs(&mut queue, &ask(ONE, "a"));
    let mut woken = Vec::new();
    queue.leave(ONE, Duration::from_secs(100), &mut woken);
    runs(&mut queue, &ask(ONE, "a"));
    // At 100 s each, its turn would come after the longest wait.
    assert_eq!(refused(&mut queue, &ask(ONE, "a")).after, Duration::from_secs(100));
}

#[test]
fn what_comes_too_often_is_told_when_to_come() {
    let mut queue = queue(&[Bounds { rate: 0.5, burst: 1, ..Bounds::default() }]);
    let now = Instant::now();
    assert!(matches!(queue.offer(&ask(ONE, "a"), 0, now), Offer::Runs));
    let Offer::Refused(refusal) = queue.offer(&ask(ONE, "a"), 0, now) else { panic!("it ran") };
    assert_eq!((refusal.full, refusal.after), (Full::Rate, Duration::from_secs(2)));
    assert!(matches!(queue.offer(&ask(ONE, "a"), 0, now + Duration::from_secs(2)), Offer::Runs));
}

#[derive(Clone, Debug)]
enum Move {
    Offer { scopes: Scopes, priority: i32, client: u8 },
    Leave(usize),
    LeaveFirst(usize),
    Withdraw(usize),
    Resize(ScopeId, usize),
}

fn scopes() -> impl Strategy<Value = Scopes> {
    proptest::sample::subsequence(vec![0_u16, 1, 2, 3], 1..=4).prop_map(|some| {
        let mut scopes = [NONE; 4];
        scopes[..some.len()].copy_from_slice(&some);
        scopes
    })
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        5 => (scopes(), -1..2, 0_u8..3)
            .prop_map(|(scopes, priority, client)| Move::Offer { scopes, priority, client }),
        3 => any::<usize>().prop_map(Move::Leave),
        1 => any::<usize>().prop_map(Move::LeaveFirst),
        1 => any::<usize>().prop_map(Move::Withdraw),
        1 => (0_u16..4, 1_usize..4).prop_map(|(scope, places)| Move::Resize(scope, places)),
    ]
}

proptest! {
    #[test]
    fn nobody_is_lost_no_limit_is_passed_and_no_place_stays_empty(
        moves in proptest::collection::vec(moves(), 1..250),
    ) {
        let mut queue = queue(&[bounds(2), bounds(3), bounds(1), bounds(2)]);
        let mut running: Vec<Scopes> = Vec::new();
        let mut waiting: Map<u32, (Scopes, Order)> = Map::new();
        let mut places = [2, 3, 1, 2];
        let mut shrunk = false;
        for (name, next) in moves.into_iter().enumerate() {
            let name = name as u32;
            let mut woken = Vec::new();
            match next {
                Move::Offer { scopes, priority, client } => {
                    let ask = Ask { scopes, priority, tokens: 1, client: Some(client.to_string().into()) };
                    match queue.offer(&ask, name, Instant::now()) {
                        Offer::Runs => running.push(scopes),
                        Offer::Waits(order) => drop(waiting.insert(name, (scopes, order))),
                        Offer::Refused(refusal) => prop_assert!(false, "{refusal:?}"),
                    }
                }
                Move::Leave(at) if !running.is_empty() => {
                    let scopes = running.swap_remove(at % running.len());
                    queue.leave(scopes, Duration::from_millis(1), &mut woken);
                }
                Move::LeaveFirst(at) if !running.is_empty() => {
                    let at = at % running.len();
                    let first = [running[at][0], NONE, NONE, NONE];
                    if first[0] != NONE {
                        running[at].rotate_left(1);
                        running[at][3] = NONE;
                        queue.leave(first, Duration::from_millis(1), &mut woken);
                    }
                }
                Move::Withdraw(at) if !waiting.is_empty() => {
                    let name = *waiting.keys().nth(at % waiting.len()).unwrap();
                    let (scopes, order) = waiting.remove(&name).unwrap();
                    prop_assert!(queue.withdraw(scopes, order));
                }
                Move::Resize(scope, count) => {
                    shrunk |= count < places[usize::from(scope)];
                    places[usize::from(scope)] = count;
                    queue.resize(scope, count, &mut woken);
                }
                _ => {}
            }
            for name in woken {
                running.push(waiting.remove(&name).unwrap().0);
            }
            for scope in 0..4_u16 {
                let counts = queue.counts(scope);
                let held = running.iter().filter(|scopes| scopes.contains(&scope)).count();
                let wait = waiting.values().filter(|(scopes, _)| scopes.contains(&scope)).count();
                prop_assert_eq!((counts.running, counts.waiting), (held, wait));
                prop_assert!(shrunk || held <= places[usize::from(scope)]);
            }
            for (scopes, _) in waiting.values() {
                prop_assert!(queue.blocking(*scopes).is_some(), "one waits that could run: {:?}", scopes);
            }
        }
        // Everybody gets their turn.
        while let Some(scopes) = running.pop() {
            let mut woken = Vec::new();
            queue.leave(scopes, Duration::from_millis(1), &mut woken);
            for name in woken {
                running.push(waiting.remove(&name).unwrap().0);
            }
        }
        prop_assert!(waiting.is_empty() && queue.lanes.is_empty());
    }
}

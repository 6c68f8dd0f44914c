use proptest::prelude::*;

use super::*;

fn settings() -> BreakerSettings {
    BreakerSettings { failures: 3, good_trials: 2, trials: 1, ..BreakerSettings::default() }
}

fn opened(breaker: &mut Breaker, now: Instant) {
    while breaker.failed(now).is_none() {}
    assert_eq!(breaker.state(), BreakerState::Open);
}

#[test]
fn failures_in_a_row_open_it_and_a_success_between_does_not_let_them() {
    let now = Instant::now();
    let mut breaker = Breaker::new(settings(), now);
    assert_eq!([breaker.failed(now), breaker.failed(now)], [None, None]);
    assert_eq!(breaker.succeeded(now), None);
    assert_eq!([breaker.failed(now), breaker.failed(now)], [None, None]);
    assert_eq!(breaker.failed(now), Some(Turn::Opened(Duration::from_secs(5))));
    assert_eq!((breaker.gate(now), breaker.state()), (Gate::Shut, BreakerState::Open));
}

#[test]
fn half_of_many_failing_opens_it() {
    let now = Instant::now();
    let mut breaker = Breaker::new(settings(), now);
    for _ in 0..9 {
        assert_eq!(breaker.succeeded(now), None);
        assert_eq!(breaker.failed(now), None);
    }
    assert_eq!(breaker.succeeded(now), None);
    assert_eq!(breaker.failed(now), Some(Turn::Opened(Duration::from_secs(5))), "10 of 20");
}

#[test]
fn old_failures_are_forgotten() {
    let mut now = Instant::now();
    let mut breaker = Breaker::new(settings(), now);
    for _ in 0..100 {
        assert_eq!(breaker.failed(now), None);
        assert_eq!(breaker.succeeded(now), None);
        now += Duration::from_secs(4);
    }
}

#[test]
fn few_requests_try_it_and_their_success_closes_it() {
    let mut now = Instant::now();
    let mut breaker = Breaker::new(settings(), now);
    opened(&mut breaker, now);
    assert_eq!(breaker.enter(false, now), None);
    assert!(breaker.enter(true, now).is_some(), "when there is nobody else");
    now += Duration::from_secs(5);
    let first = breaker.enter(false, now).unwrap();
    assert_eq!((breaker.enter(false, now), breaker.state()), (None, BreakerState::HalfOpen));
    assert_eq!(breaker.succeeded(now), None);
    breaker.leave(first);
    let second = breaker.enter(false, now).unwrap();
    assert_eq!(breaker.succeeded(now), Some(Turn::Closed));
    breaker.leave(second);
    assert_eq!((breaker.gate(now), breaker.share(now)), (Gate::Passes, FIRST_SHARE));
    assert_eq!(breaker.share(now + Duration::from_secs(5)), 500);
    assert_eq!(breaker.share(now + Duration::from_secs(10)), WHOLE);
}

#[test]
fn a_trial_whose_client_left_makes_room_for_another() {
    let mut now = Instant::now();
    let mut breaker = Breaker::new(settings(), now);
    opened(&mut breaker, now);
    now += Duration::from_secs(5);
    let ticket = breaker.enter(false, now).unwrap();
    breaker.leave(ticket);
    assert_eq!(breaker.gate(now), Gate::Tries);
}

#[test]
fn failing_trials_double_the_pause_up_to_a_bound() {
    let mut now = Instant::now();
    let mut breaker = Breaker::new(settings(), now);
    opened(&mut breaker, now);
    for seconds in [10, 20, 40, 60, 60] {
        now += Duration::from_secs(60);
        assert!(breaker.enter(false, now).is_some());
        assert_eq!(breaker.failed(now), Some(Turn::Opened(Duration::from_secs(seconds))));
    }
    assert_eq!(breaker.opened(), 6);
}

#[test]
fn good_probes_after_a_death_begin_the_trials_at_once() {
    let now = Instant::now();
    let mut breaker = Breaker::new(settings(), now);
    breaker.revived(now);
    assert_eq!(breaker.share(now), FIRST_SHARE);
    opened(&mut breaker, now);
    breaker.revived(now);
    assert_eq!(breaker.gate(now), Gate::Tries);
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Enter,
    Leave,
    Good,
    Bad,
    Wait(u64),
    Revive,
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        3 => Just(Move::Enter),
        2 => Just(Move::Leave),
        2 => Just(Move::Good),
        3 => Just(Move::Bad),
        2 => (0_u64..20_000).prop_map(Move::Wait),
        1 => Just(Move::Revive),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_it_lets_few_try_and_always_comes_back(
        moves in proptest::collection::vec(moves(), 1..200),
        trials in 1_u32..4,
    ) {
        let settings = BreakerSettings { trials, ..settings() };
        let mut now = Instant::now();
        let mut breaker = Breaker::new(settings.clone(), now);
        let mut inside: Vec<Ticket> = Vec::new();
        for next in moves {
            match next {
                Move::Enter => {
                    let gate = breaker.gate(now);
                    let ticket = breaker.enter(false, now);
                    prop_assert_eq!(ticket.is_some(), gate != Gate::Shut);
                    inside.extend(ticket);
                }
                Move::Leave => {
                    if let Some(ticket) = inside.pop() {
                        breaker.leave(ticket);
                    }
                }
                Move::Good => drop(breaker.succeeded(now)),
                Move::Bad => drop(breaker.failed(now)),
                Move::Wait(millis) => now += Duration::from_millis(millis),
                Move::Revive => breaker.revived(now),
            }
            if let Phase::Trying { running, good } = breaker.phase {
                let trying = inside.iter().filter(|ticket| ticket.series == Some(breaker.series)).count();
                prop_assert_eq!(running as usize, trying);
                prop_assert!(running <= trials && good < settings.good_trials);
            }
            prop_assert!((FIRST_SHARE..=WHOLE).contains(&breaker.share(now)));
        }
        for ticket in inside {
            breaker.leave(ticket);
        }
        // However often it failed, a healthy engine has its whole share again soon.
        now += settings.longest_pause;
        for _ in 0..settings.good_trials {
            let ticket = breaker.enter(false, now);
            prop_assert!(ticket.is_some());
            breaker.succeeded(now);
            breaker.leave(ticket.unwrap());
        }
        prop_assert_eq!(breaker.gate(now), Gate::Passes);
        prop_assert_eq!(breaker.share(now + settings.slow_start), WHOLE);
    }
}

#[test]
fn item_58_other_settings_hold_at_once_and_what_was_counted_stays() {
    let mut now = Instant::now();
    let mut breaker = Breaker::new(settings(), now);
    assert_eq!([breaker.failed(now), breaker.failed(now)], [None, None]);
    breaker.tune(BreakerSettings { failures: 4, ..settings() }, now);
    assert_eq!((breaker.in_a_row(), breaker.failed(now)), (2, None));
    assert_eq!(breaker.failed(now), Some(Turn::Opened(Duration::from_secs(5))), "the fourth in a row");
    breaker.tune(BreakerSettings { pause: Duration::from_secs(60), ..settings() }, now);
    assert_eq!(breaker.opens_in(now), Some(Duration::from_secs(5)), "it opens when it was to");
    let short = Duration::from_secs(1);
    breaker.tune(BreakerSettings { pause: short, longest_pause: short, ..settings() }, now);
    assert_eq!((breaker.opens_in(now), breaker.opened()), (Some(short), 1));
    now += short;
    assert_eq!(breaker.gate(now), Gate::Tries);
}

#[test]
fn item_58_a_window_of_another_length_holds_the_same_outcomes() {
    let mut now = Instant::now();
    let many = BreakerSettings { failures: 0, failure_rate: 2.0, ..settings() };
    let mut breaker = Breaker::new(many.clone(), now);
    for _ in 0..12 {
        breaker.failed(now);
        now += Duration::from_secs(2);
    }
    let window = |breaker: &mut Breaker, seconds, now| {
        let window = Duration::from_secs(seconds);
        breaker.tune(BreakerSettings { window, ..many.clone() }, now);
        breaker.window.totals(now).1
    };
    assert_eq!(window(&mut breaker, 300, now), 12, "nothing is forgotten");
    let strict = BreakerSettings { window: Duration::from_secs(300), failure_rate: 0.5, ..many.clone() };
    breaker.tune(BreakerSettings { least_requests: 13, ..strict }, now);
    assert_eq!(breaker.failed(now), Some(Turn::Opened(Duration::from_secs(5))), "the thirteenth");
    now += Duration::from_secs(40);
    assert_eq!(window(&mut breaker, 10, now), 0, "all are older than that");
}

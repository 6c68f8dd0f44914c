use proptest::prelude::*;

use super::*;

/// One heartbeat: pause before it, way there, way back, whether the answer arrived.
type Beat = (f64, f64, f64, bool);

/// An engine whose clock is an affine function of the router's, and what it would echo.
struct Engine {
    offset: f64,
    rate: f64,
    echo: Option<Echo>,
}

impl Engine {
    fn clock(&self, router: f64) -> f64 {
        self.offset + router * (1.0 + self.rate)
    }

    /// Returns the router's clock after the exchange.
    fn beat(&mut self, track: &mut ClockTrack, start: f64, (pause, there, back, arrived): Beat) -> f64 {
        let sent = start + pause;
        let received = sent + there;
        track.observe(self.clock(sent), received, self.echo);
        let router_clock = track.answer(received);
        let end = received + back;
        if arrived {
            self.echo = Some(Echo { router_clock, received: self.clock(end) });
        }
        end
    }
}

fn beats() -> impl Strategy<Value = Vec<Beat>> {
    let delay = || prop_oneof![0.0..0.001, 0.0..0.5, Just(0.0)];
    prop::collection::vec((0.0..30.0, delay(), delay(), prop::bool::weighted(0.8)), 1..40)
}

proptest! {
    #[test]
    fn the_true_clock_is_always_inside_the_error(
        offset in -1e6..1e6_f64,
        rate in -DRIFT..DRIFT,
        beats in beats(),
        later in 0.0..100.0,
    ) {
        let mut engine = Engine { offset, rate, echo: None };
        let (mut track, mut now) = (ClockTrack::default(), 0.0);
        for beat in beats {
            now = engine.beat(&mut track, now, beat);
            for at in [now, now + later] {
                let reading = track.reading(at).unwrap();
                let truth = engine.clock(at);
                match reading.error {
                    None => prop_assert!(reading.seconds <= truth + SLACK),
                    Some(error) => prop_assert!((reading.seconds - truth).abs() <= error),
                }
            }
        }
    }

    #[test]
    fn a_jump_of_the_clock_is_noticed_within_two_exchanges(
        jump in prop_oneof![-1e5..-2.0, 2.0..1e5_f64],
        beats in beats(),
    ) {
        let mut engine = Engine { offset: 5e5, rate: 0.0, echo: None };
        let (mut track, mut now) = (ClockTrack::default(), 0.0);
        for beat in beats {
            now = engine.beat(&mut track, now, beat);
        }
        engine.offset += jump;
        engine.echo = None;
        for _ in 0..2 {
            now = engine.beat(&mut track, now, (1.0, 0.001, 0.001, true));
        }
        // What was known before may be looser than the jump, never wrong by more than its error.
        let reading = track.reading(now).unwrap();
        let error = reading.error.unwrap();
        prop_assert!((reading.seconds - engine.clock(now)).abs() <= error);
    }
}

#[test]
fn one_exchange_bounds_from_below_and_the_second_from_both_sides() {
    let mut track = ClockTrack::default();
    assert_eq!(track.reading(1.0), None);
    // The engine's clock is 100 s ahead; each way takes 10 ms.
    track.observe(101.0, 1.010, None);
    let answered = track.answer(1.010);
    let first = track.reading(1.010).unwrap();
    assert_eq!(first.error, None);
    assert!((first.seconds - 101.0).abs() < 1e-9, "{first:?}");
    track.observe(102.0, 2.010, Some(Echo { router_clock: answered, received: 101.020 }));
    let second = track.reading(2.010).unwrap();
    let error = second.error.unwrap();
    assert!((second.seconds - 102.010).abs() < 1e-3, "{second:?}");
    assert!((0.010..0.0105).contains(&error), "{error}");
}

#[test]
fn the_error_grows_with_the_age_of_what_is_known() {
    let mut track = ClockTrack::default();
    let answered = track.answer(1.0);
    track.observe(101.0, 1.0, Some(Echo { router_clock: answered, received: 101.0 }));
    let error = |track: &ClockTrack, at| track.reading(at).unwrap().error.unwrap();
    assert!(error(&track, 1.0) <= 2.0 * SLACK);
    let after = error(&track, 1001.0);
    assert!((after - 1000.0 * DRIFT).abs() < 2.0 * SLACK, "{after}");
}

#[test]
fn an_echo_of_an_answer_that_was_never_given_proves_nothing() {
    let mut track = ClockTrack::default();
    let answered = track.answer(1.0);
    track.observe(101.0, 1.0, Some(Echo { router_clock: answered + 0.5, received: 100.9 }));
    assert_eq!(track.reading(1.0).unwrap().error, None);
    // Received after the request that tells of it was sent.
    track.observe(101.0, 1.0, Some(Echo { router_clock: answered, received: 101.5 }));
    assert_eq!(track.reading(1.0).unwrap().error, None);
}

#[test]
fn only_the_newest_answers_are_remembered() {
    let mut track = ClockTrack::default();
    let oldest = track.answer(0.5);
    for second in 1..=REMEMBERED_ANSWERS {
        track.answer(second as f64);
    }
    track.observe(110.0, 10.0, Some(Echo { router_clock: oldest, received: 109.0 }));
    assert_eq!(track.reading(10.0).unwrap().error, None);
}

#[test]
fn one_exchange_of_the_routers_own_bounds_a_clock_from_both_sides() {
    let mut track = ClockTrack::default();
    // The engine is 900 s ahead; it told its clock in the middle of an exchange of 20 ms.
    track.sampled(1000.01, 100.0, 100.02);
    let reading = track.reading(100.02).unwrap();
    assert!((reading.seconds - 1000.02).abs() < 1e-4, "{reading:?}");
    let error = reading.error.unwrap();
    assert!((0.01..0.011 + 2.0 * DRIFT * 100.02).contains(&error), "{reading:?}");
    // A quicker one is better, a jump is followed.
    track.sampled(1010.0, 110.0, 110.001);
    assert!(track.reading(110.001).unwrap().error.unwrap() < 0.003);
    track.sampled(5.0, 120.0, 120.002);
    assert!((track.reading(120.002).unwrap().seconds - 5.0).abs() < 0.01);
}

use super::*;

fn at(seconds: u64) -> ClockTime {
    Duration::from_secs(seconds)
}

fn registration(request: &str) -> PushRegistration {
    PushRegistration { request_id: request.to_owned(), ..PushRegistration::default() }
}

fn pair(push: Option<Push>) -> Option<(String, String)> {
    push.map(|push| (push.request, push.registration.request_id))
}

fn names(request: &str, registration: &str) -> Option<(String, String)> {
    Some((request.to_owned(), registration.to_owned()))
}

#[test]
fn either_side_may_come_first() {
    let mut matcher = PushMatcher::default();
    assert_eq!(matcher.on_finished("r", vec![vec![1]]), None);
    assert!(matcher.awaits_registration());
    let push = matcher.on_registration(registration("r"), at(0)).unwrap();
    assert_eq!((push.request.as_str(), push.local_block_ids), ("r", vec![vec![1]]));
    assert!(!matcher.awaits_registration());
    assert_eq!(matcher.on_registration(registration("q"), at(0)), None);
    assert_eq!(pair(matcher.on_finished("q", vec![])), names("q", "q"));
    assert_eq!(matcher.on_finished("q", vec![]), None, "a pair is used up");
}

#[test]
fn an_exact_id_goes_before_one_that_only_begins_alike() {
    let mut matcher = PushMatcher::default();
    matcher.on_registration(registration("cmpl-x-0-11111111"), at(0));
    matcher.on_registration(registration("cmpl-x-0-22222222"), at(0));
    assert_eq!(
        pair(matcher.on_finished("cmpl-x-0-22222222", vec![])),
        names("cmpl-x-0-22222222", "cmpl-x-0-22222222")
    );
    assert_eq!(
        pair(matcher.on_finished("cmpl-x-0-DEADBEEF", vec![])),
        names("cmpl-x-0-DEADBEEF", "cmpl-x-0-11111111")
    );
    matcher.on_finished("cmpl-y-0-33333333", vec![]);
    assert_eq!(matcher.on_registration(registration("cmpl-y-1-33333333"), at(0)), None);
    assert_eq!(
        pair(matcher.on_registration(registration("cmpl-y-0"), at(0))),
        names("cmpl-y-0-33333333", "cmpl-y-0")
    );
}

#[test]
fn what_is_evicted_or_stale_matches_nothing() {
    let mut matcher = PushMatcher::default();
    matcher.on_finished("r", vec![]);
    matcher.evict("r");
    assert!(!matcher.awaits_registration());
    assert_eq!(matcher.on_registration(registration("r"), at(0)), None);
    matcher.forget_stale(at(479), at(480));
    assert_eq!(matcher.registrations.entries.len(), 1);
    matcher.on_registration(registration("r"), at(100));
    matcher.forget_stale(at(480), at(480));
    assert_eq!(matcher.registrations.entries.len(), 1, "announced again");
    matcher.forget_stale(at(580), at(480));
    assert_eq!(matcher.on_finished("r", vec![]), None);
    assert!(matcher.registrations.same_base.is_empty() && matcher.arrivals.is_empty());
}

#[test]
fn announcements_are_bounded() {
    let mut matcher = PushMatcher::default();
    for i in 0..=MAX_REGISTRATIONS {
        matcher.on_registration(registration(&format!("r{i}")), at(0));
    }
    assert_eq!(matcher.registrations.entries.len(), MAX_REGISTRATIONS);
}

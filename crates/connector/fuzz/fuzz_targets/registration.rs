//! Announcements from a hostile decode engine, and their matching against a plain model.

#![no_main]

use std::time::Duration;

use kv_connector::protocol::registration::{PUSH_REGISTRATION_PREFIX, PushRegistration, base_request_id};
use kv_connector::push::PushMatcher;
use libfuzzer_sys::fuzz_target;

const IDS: [&str; 8] =
    ["x", "x-0000000a", "x-0000000B", "x-0000000a\n", "-0000000a", "", "y", "x-0000000a-0000000b"];
const TIMEOUT: Duration = Duration::from_secs(4);

fuzz_target!(|bytes: &[u8]| {
    decode(bytes);
    decode(&[PUSH_REGISTRATION_PREFIX, bytes].concat());
    matching(bytes);
});

fn decode(bytes: &[u8]) {
    if let Some(Ok(registration)) = PushRegistration::decode(bytes) {
        let again = PushRegistration::decode(&registration.encode());
        assert_eq!(again, Some(Ok(registration.clone())));
        let id = registration.request_id.as_str();
        let base = base_request_id(id);
        assert!(matches!(id.len() - base.len(), 0 | 9));
    }
}

/// Ids with a time, oldest first.
#[derive(Default)]
struct Model(Vec<(&'static str, Duration)>);

impl Model {
    fn insert(&mut self, id: &'static str, now: Duration) {
        match self.0.iter_mut().find(|(known, _)| *known == id) {
            Some(entry) => entry.1 = now,
            None => self.0.push((id, now)),
        }
    }

    fn take(&mut self, id: &str) -> Option<&'static str> {
        let exact = self.0.iter().position(|(known, _)| *known == id);
        let base = || self.0.iter().position(|(known, _)| base_request_id(known) == base_request_id(id));
        exact.or_else(base).map(|index| self.0.remove(index).0)
    }
}

fn matching(bytes: &[u8]) {
    let mut matcher = PushMatcher::default();
    let (mut finished, mut announced) = (Model::default(), Model::default());
    let mut now = Duration::ZERO;
    for byte in bytes {
        let id = IDS[usize::from(byte & 7)];
        match byte >> 3 & 3 {
            0 => {
                let push = matcher.on_finished(id, Vec::new());
                assert!(push.as_ref().is_none_or(|push| push.request == id));
                let expected = announced.take(id);
                assert_eq!(push.as_ref().map(|push| push.registration.request_id.as_str()), expected);
                if expected.is_none() {
                    finished.insert(id, now);
                }
            }
            1 => {
                let registration =
                    PushRegistration { request_id: id.to_owned(), ..PushRegistration::default() };
                let push = matcher.on_registration(registration, now);
                let expected = finished.take(id);
                assert_eq!(push.as_ref().map(|push| push.request.as_str()), expected);
                if expected.is_none() {
                    announced.insert(id, now);
                }
            }
            2 => {
                matcher.evict(id);
                finished.0.retain(|(known, _)| *known != id);
                announced.take(id);
            }
            _ => {
                now += Duration::from_secs(u64::from(byte >> 5));
                matcher.forget_stale(now, TIMEOUT);
                announced.0.retain(|(_, at)| now - *at < TIMEOUT);
            }
        }
        assert_eq!(matcher.awaits_registration(), !finished.0.is_empty());
    }
}

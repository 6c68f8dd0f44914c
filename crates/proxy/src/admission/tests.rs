use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::*;

type Entering = Pin<Box<dyn Future<Output = Result<Permit, Busy>>>>;

/// One that has begun to wait.
fn waiting(admission: &Arc<Admission>) -> Entering {
    let (here, asked) = (Arc::clone(admission), ask());
    let mut entering: Entering = Box::pin(async move { here.enter(&asked, Instant::now()).await });
    assert!(entering.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    entering
}

fn admission(requests: usize, longest_wait: Duration) -> Arc<Admission> {
    let settings = AdmissionSettings {
        decode: StageLimits { requests, waiting: 2, ..StageLimits::default() },
        longest_wait,
        ..AdmissionSettings::default()
    };
    Admission::new(&settings, Metrics::new())
}

fn ask() -> Ask {
    Ask { scopes: [DECODE, NONE, NONE, NONE], priority: 0, tokens: 1, client: None }
}

fn counts(admission: &Admission) -> (usize, usize) {
    let counts = admission.queue.lock().counts(DECODE);
    (counts.running, counts.waiting)
}

#[tokio::test(start_paused = true)]
async fn a_place_that_gets_free_goes_to_the_one_that_waits() {
    let admission = admission(1, Duration::from_secs(10));
    let first = admission.enter(&ask(), Instant::now()).await.unwrap();
    let second = waiting(&admission);
    assert_eq!(counts(&admission), (1, 1));
    drop(first);
    assert_eq!(counts(&admission), (1, 0));
    drop(second.await.unwrap());
    assert_eq!(counts(&admission), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_while_it_waits_leaves_no_trace() {
    let admission = admission(1, Duration::from_secs(10));
    let first = admission.enter(&ask(), Instant::now()).await.unwrap();
    drop(waiting(&admission));
    assert_eq!(counts(&admission), (1, 0));
    let second = waiting(&admission);
    drop(first);
    assert_eq!(counts(&admission), (1, 0), "its turn has come");
    drop(second);
    assert_eq!(counts(&admission), (0, 0), "a turn that had come is given back");
}

#[tokio::test(start_paused = true)]
async fn whose_turn_does_not_come_is_told_so_in_time() {
    let admission = admission(1, Duration::from_secs(10));
    let _first = admission.enter(&ask(), Instant::now()).await.unwrap();
    let began = Instant::now();
    let busy = admission.enter(&ask(), Instant::now()).await.unwrap_err();
    assert_eq!((busy.scope, busy.reason), (BusyScope::Stage(Stage::Decode), BusyReason::Late));
    assert_eq!(began.elapsed(), Duration::from_secs(10));
    assert_eq!(counts(&admission), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn who_finds_the_queue_full_is_refused_at_once() {
    let admission = admission(1, Duration::from_secs(10));
    let _first = admission.enter(&ask(), Instant::now()).await.unwrap();
    let _waiting = [waiting(&admission), waiting(&admission)];
    let asked = ask();
    let mut refused = std::pin::pin!(admission.enter(&asked, Instant::now()));
    // At the first look, which is no wait at all.
    let Poll::Ready(Err(busy)) = refused.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("it waits, or runs");
    };
    assert_eq!((busy.scope, busy.reason), (BusyScope::Stage(Stage::Decode), BusyReason::Full));
    assert_eq!(counts(&admission), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn the_prefill_place_is_given_back_first() {
    let settings = AdmissionSettings::default();
    let admission = Admission::new(&settings, Metrics::new());
    let both = Ask { scopes: [PREFILL, DECODE, NONE, NONE], ..ask() };
    let mut permit = admission.enter(&both, Instant::now()).await.unwrap();
    let running = |scope| admission.queue.lock().counts(scope).running;
    assert_eq!((running(PREFILL), running(DECODE)), (1, 1));
    permit.prefilled();
    permit.prefilled();
    assert_eq!((running(PREFILL), running(DECODE)), (0, 1));
    drop(permit);
    assert_eq!((running(PREFILL), running(DECODE)), (0, 0));
}

#[test]
fn priorities_are_whole_numbers_within_bounds() {
    let of = |text: &str| {
        let headers =
            HeaderMap::from_iter([(http::HeaderName::from_static(PRIORITY), text.parse().unwrap())]);
        priority(&headers, None)
    };
    assert_eq!(of("-5"), Ok(-5));
    assert_eq!(of("1000"), Ok(1000));
    assert_eq!(of("1001"), Err(BadRequest::Priority));
    assert_eq!(of("high"), Err(BadRequest::Priority));
    assert_eq!(priority(&HeaderMap::new(), None), Ok(0));
}

fn counted(admission: &Admission, scope: ScopeId) -> (usize, usize) {
    let counts = admission.queue.lock().counts(scope);
    (counts.running, counts.waiting)
}

#[tokio::test(start_paused = true)]
async fn other_limits_hold_at_once_and_whoever_runs_stays_counted() {
    let admission = admission(1, Duration::from_secs(10));
    let first = admission.enter(&ask(), Instant::now()).await.unwrap();
    let second = waiting(&admission);
    let third = waiting(&admission);
    let limits = |requests, per_engine| AdmissionSettings {
        decode: StageLimits { requests, per_engine, ..StageLimits::default() },
        ..AdmissionSettings::default()
    };
    admission.reload(&limits(5, 2), |_| 1);
    assert_eq!(counts(&admission), (2, 1), "one more runs, on the one engine");
    admission.resize(Stage::Decode, || 2);
    assert_eq!(counts(&admission), (3, 0));
    admission.reload(&limits(1, 0), |_| 2);
    drop((first, second.await.unwrap()));
    assert_eq!(counts(&admission), (1, 0));
    let busy = waiting(&admission);
    assert_eq!(counts(&admission), (1, 1), "as many run as may now");
    admission.reload(&limits(0, 0), |_| 2);
    drop((busy.await.unwrap(), third.await.unwrap()));
    assert_eq!(counts(&admission), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_name_keeps_its_scope_while_others_come_and_go() {
    let limits = |names: &[&str], requests| AdmissionSettings {
        keys: names
            .iter()
            .map(|name| NamedLimits { name: (*name).to_owned(), requests, ..NamedLimits::default() })
            .collect(),
        ..AdmissionSettings::default()
    };
    let admission = Admission::new(&limits(&["a", "b"], 1), Metrics::new());
    let scope = |name| admission.rules.load().named.key(name);
    let b = scope("b").unwrap();
    let of_b = Ask { scopes: [DECODE, b, NONE, NONE], ..ask() };
    let permit = admission.enter(&of_b, Instant::now()).await.unwrap();
    admission.reload(&limits(&["c", "b"], 1), |_| 1);
    assert_eq!((scope("a"), scope("b")), (None, Some(b)));
    assert!(scope("c").is_some_and(|c| c != b && c > b));
    assert_eq!(counted(&admission, b), (1, 0));
    let busy = admission.enter(&of_b, Instant::now()).await.unwrap_err();
    assert_eq!((busy.scope, busy.reason), (BusyScope::Key, BusyReason::Late));
    admission.reload(&limits(&[], 1), |_| 1);
    assert_eq!(scope("b"), None);
    let _other = admission.enter(&of_b, Instant::now()).await.unwrap();
    drop(permit);
    assert_eq!(counted(&admission, b), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn another_rate_does_not_forget_who_came() {
    let limits = |rate, burst| AdmissionSettings {
        decode: StageLimits { rate, burst, ..StageLimits::default() },
        ..AdmissionSettings::default()
    };
    let admission = Admission::new(&limits(1.0, 4), Metrics::new());
    for _ in 0..3 {
        drop(admission.enter(&ask(), Instant::now()).await.unwrap());
    }
    admission.reload(&limits(0.5, 4), |_| 1);
    drop(admission.enter(&ask(), Instant::now()).await.unwrap());
    let busy = admission.enter(&ask(), Instant::now()).await.unwrap_err();
    assert_eq!((busy.reason, busy.after), (BusyReason::Rate, Duration::from_secs(2)));
    admission.reload(&limits(0.0, 0), |_| 1);
    assert!(admission.enter(&ask(), Instant::now()).await.is_ok());
}

use std::time::Duration;

use super::track::MOST_STEPS;
use super::*;

fn id(text: &'static str) -> RequestId {
    RequestId::accept(Some(&http::HeaderValue::from_static(text)))
}

fn ids(timelines: &Timelines, running: Option<bool>) -> Vec<String> {
    timelines.views(100, running).into_iter().map(|view| view.facts.request_id).collect()
}

#[tokio::test(start_paused = true)]
async fn a_request_is_told_step_by_step() {
    let timelines = Timelines::new(4);
    let record = timelines.open(id("a"), "completions");
    let (p, d): (Arc<str>, Arc<str>) = ("p-1".into(), "d-1".into());
    let wait = |millis| tokio::time::advance(Duration::from_millis(millis));
    record.read("sim", true, 120, None);
    wait(10).await;
    record.step(Step::Admitted, None);
    record.step(Step::PrefillSent, Some(&p));
    wait(20).await;
    record.step(Step::PrefillAnswered(200), Some(&p));
    record.step(Step::HandedOff(3), Some(&p));
    record.step(Step::DecodeSent, Some(&d));
    wait(5).await;
    record.step(Step::FirstByte, Some(&d));
    record.sent(7);
    let running = timelines.view("a").unwrap().request.facts;
    assert_eq!((running.state, running.status, running.outcome), ("running", None, None));
    wait(100).await;
    record.set_status(200);
    record.set_outcome(Outcome::of_status(200));
    timelines.close(&record);
    wait(1000).await;

    let told = timelines.view("a").unwrap();
    let facts = &told.request.facts;
    assert_eq!((facts.state, facts.status, facts.model.as_deref()), ("ended", Some(200), Some("sim")));
    assert_eq!(
        (facts.prefill.as_deref(), facts.decode.as_deref(), facts.tries),
        (Some("p-1"), Some("d-1"), 2)
    );
    assert_eq!((facts.request_bytes, facts.answer_bytes, facts.answer_pieces), (Some(120), 7, 1));
    let times =
        [facts.queue_seconds, facts.prefill_seconds, facts.hand_off_seconds, facts.first_byte_seconds];
    assert_eq!(times, [Some(0.01), Some(0.02), Some(0.005), Some(0.035)]);
    assert_eq!(told.request.seconds, 0.135);
    let steps: Vec<&str> = told.steps.iter().map(|step| step.step).collect();
    assert_eq!(
        steps,
        [
            "received",
            "read",
            "admitted",
            "prefill_sent",
            "prefill_answered",
            "handed_off",
            "decode_sent",
            "first_byte",
            "ended"
        ]
    );
    assert_eq!((told.steps[4].status, told.steps[5].blocks, told.steps_left_out), (Some(200), Some(3), 0));
}

#[tokio::test]
async fn the_ring_forgets_the_oldest_but_not_those_that_run() {
    let timelines = Timelines::new(3);
    let long = timelines.open(id("long"), "completions");
    for name in ["a", "b", "c", "d", "e", "f", "g"] {
        let record = timelines.open(id(name), "completions");
        timelines.close(&record);
    }
    assert_eq!(ids(&timelines, Some(true)), ["long"]);
    assert_eq!(ids(&timelines, Some(false)), ["g", "f"]);
    assert_eq!(timelines.running(), 1);
    timelines.close(&long);
    assert_eq!(timelines.running(), 0);
    assert!(timelines.view("a").is_none());
}

#[tokio::test]
async fn more_running_requests_than_places_cost_no_more_than_places() {
    let timelines = Timelines::new(2);
    let all: Vec<_> = (0..100).map(|_| timelines.open(RequestId::accept(None), "completions")).collect();
    assert_eq!((timelines.views(100, None).len(), timelines.running()), (2, 100));
    all.iter().for_each(|record| timelines.close(record));
    assert_eq!(timelines.running(), 0);
}

#[tokio::test]
async fn steps_and_names_are_bounded() {
    let timelines = Timelines::new(1);
    let record = timelines.open(id("a"), "completions");
    record.read(&"é".repeat(1000), false, 1, None);
    (0..MOST_STEPS).for_each(|_| record.step(Step::PrefillSent, None));
    let told = timelines.view("a").unwrap();
    assert_eq!((told.steps.len(), told.steps_left_out), (MOST_STEPS, 2));
    assert_eq!(told.request.facts.model.unwrap().len(), LONGEST_MODEL);
}

#[tokio::test]
async fn without_room_nothing_is_kept() {
    let timelines = Timelines::new(0);
    let record = timelines.open(id("a"), "completions");
    record.step(Step::Admitted, None);
    assert!(record.track.lock().told().next().is_none());
    assert_eq!((ids(&timelines, None).len(), timelines.running()), (0, 1));
    timelines.close(&record);
}

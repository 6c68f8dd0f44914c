use super::*;

type Kept = Arc<Mutex<Vec<Vec<SpanRecord>>>>;

fn traces(ratio: f64, follow_parent: bool) -> (Traces, Kept) {
    let kept: Kept = Arc::default();
    let sink = Arc::clone(&kept);
    let room = move |spans| {
        sink.lock().push(spans);
        sink.lock().len() < 3
    };
    (Traces::new(Sampling { ratio, follow_parent }, Arc::default(), room), kept)
}

fn headers(flags: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let value = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
    headers.insert(TRACEPARENT, value.parse().unwrap());
    headers.insert(TRACESTATE, "vendor=1".parse().unwrap());
    headers
}

#[tokio::test(start_paused = true)]
async fn the_spans_of_a_request_go_out_together_when_the_last_has_ended() {
    let (traces, kept) = traces(0.0, true);
    let trace = traces.begin(&headers("01"));
    let root = trace.root("request");
    let mut leg = trace.span("prefill", SpanKind::Client);
    tokio::time::advance(std::time::Duration::from_secs(2)).await;
    leg.say("kvbaton.peer", || "p");
    let part = leg.child("stream");
    drop((part, leg, trace));
    assert!(kept.lock().is_empty());
    drop(root);
    let spans = kept.lock().pop().unwrap();
    let names: Vec<&str> = spans.iter().map(|span| span.name).collect();
    assert_eq!(names, ["stream", "prefill", "request"]);
    let [stream, prefill, request] = &spans[..] else { panic!("{spans:?}") };
    assert_eq!(request.parent, Some(0x00f0_67aa_0ba9_02b7));
    assert!(request.is_remote_parent && !prefill.is_remote_parent);
    assert_eq!(prefill.parent, Some(request.span_id));
    assert_eq!(stream.parent, Some(prefill.span_id));
    assert_eq!(prefill.ended.duration_since(prefill.began).unwrap().as_secs(), 2);
    assert_eq!(prefill.attributes, [("kvbaton.peer", SpanValue::from("p"))]);
    assert!(spans.iter().all(|span| span.trace_state.as_deref() == Some("vendor=1")));
}

#[tokio::test]
async fn what_finds_no_room_is_counted() {
    let (traces, kept) = traces(1.0, true);
    for _ in 0..4 {
        drop(traces.begin(&HeaderMap::new()).root("request"));
    }
    assert_eq!(kept.lock().len(), 4);
    assert_eq!(traces.counts().unwrap().dropped.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn each_leg_gets_a_context_of_its_own() {
    let (traces, _) = traces(0.0, true);
    let trace = traces.begin(&headers("01"));
    let (one, other) = (trace.span("prefill", SpanKind::Client), trace.span("decode", SpanKind::Client));
    let sent = |span: &Span| {
        let mut headers = headers("01");
        trace.pass(span, &mut headers);
        assert_eq!(headers[TRACESTATE], "vendor=1");
        Parent::of(&headers).unwrap()
    };
    let (one, other) = (sent(&one), sent(&other));
    assert_eq!((one.trace_id, other.trace_id), (trace.id().unwrap(), trace.id().unwrap()));
    assert!(one.sampled && other.sampled && one.span_id != other.span_id);
}

#[tokio::test]
async fn what_is_not_sampled_says_so_to_the_engines_and_records_nothing() {
    let (traces, kept) = traces(1.0, true);
    let trace = traces.begin(&headers("00"));
    let span = trace.span("prefill", SpanKind::Client);
    assert!(!span.is_recorded() && trace.sampled().is_none());
    let mut passed = headers("00");
    trace.pass(&span, &mut passed);
    let parent = Parent::of(&passed).unwrap();
    assert_eq!(Some(parent.trace_id), trace.id());
    assert!(!parent.sampled && parent.span_id != 0x00f0_67aa_0ba9_02b7);
    drop((span, trace));
    assert!(kept.lock().is_empty());
}

#[tokio::test]
async fn a_context_that_cannot_be_used_is_replaced_with_its_state() {
    let (traces, _) = traces(1.0, true);
    let broken = headers("zz");
    let trace = traces.begin(&broken);
    let mut passed = broken;
    trace.pass(&trace.span("decode", SpanKind::Client), &mut passed);
    assert!(Parent::of(&passed).unwrap().sampled);
    assert!(!passed.contains_key(TRACESTATE));
}

#[tokio::test]
async fn the_ratio_decides_where_no_parent_may() {
    let (always, _) = traces(1.0, false);
    assert!(always.begin(&headers("00")).sampled().is_some());
    let (never, _) = traces(0.0, false);
    assert!(never.begin(&headers("01")).sampled().is_none());
    assert!(is_within(u128::from(u64::MAX), 1.0) && !is_within(0, 0.0));
    let half = (0..2000).filter(|_| is_within(new_id(), 0.5)).count();
    assert!((800..1200).contains(&half), "{half} of 2000");
}

#[tokio::test]
async fn without_traces_the_clients_context_passes_as_it_is() {
    let trace = Traces::default().begin(&headers("01"));
    assert_eq!(trace.id(), Some(0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736));
    let mut passed = headers("01");
    trace.pass(&trace.span("decode", SpanKind::Client), &mut passed);
    assert_eq!(passed, headers("01"));
    let none = Traces::default().begin(&HeaderMap::new());
    let mut passed = HeaderMap::new();
    none.pass(&Span::default(), &mut passed);
    assert!(none.id().is_none() && passed.is_empty());
}

use kvbaton_proxy::DisaggregationMode;

use super::*;
use crate::synthetic::Synthetic;

const FLEET: &str = "
[[engines]]
role = \"prefill\"
count = 4
[[engines]]
role = \"decode\"
count = 4
";

fn fleet(more: &str) -> Fleet {
    Fleet::read(&format!("{FLEET}{more}")).unwrap()
}

fn trace(text: &str) -> Trace {
    text.parse::<Synthetic>().unwrap().trace(1)
}

fn runs(fleet: &Fleet, trace: &Trace, policies: &[&str], modes: &[DisaggregationMode]) -> Vec<Report> {
    let policies: Vec<String> = policies.iter().map(|policy| (*policy).to_owned()).collect();
    let plans = Plan::all(&fleet.routing, &fleet.disaggregation, &policies, modes).unwrap();
    plans.iter().map(|plan| run(plan, fleet, trace, 1, Goal::default()).unwrap()).collect()
}

#[test]
fn one_request_takes_what_its_parts_take() {
    let text = "{\"timestamp\": 0, \"input_length\": 1000, \"output_length\": 11}";
    let report = &runs(&fleet(""), &Trace::read(text, 512).unwrap(), &[], &[])[0];
    // Four ways over the network, prompt, handshake, transfer and one step.
    let transfer = 0.001 + 1000.0 * 131_072.0 / 20e9;
    let first = 4.0 * 0.0005 + 0.005 + 0.1 + 0.3 + transfer + 0.0151;
    assert!((report.ttft.max - first).abs() < 1e-6, "{} {first}", report.ttft.max);
    assert!((report.itl.max - 0.0151).abs() < 1e-6);
    assert!((report.end_to_end.max - first - 10.0 * 0.0151).abs() < 1e-6);
    assert_eq!((report.completed, report.moved_bytes, report.good), (1, 131_072_000, 1));
    let told: Vec<_> = report.decisions.iter().map(|told| (told.decision, told.reason, told.count)).collect();
    assert_eq!(told, [("disaggregated", "pair", 1)]);
}

#[test]
fn every_policy_answers_all_and_repeats() {
    let (fleet, trace) = (fleet(""), trace("requests=300,rate=20,input=600,output=40,turns=3,pause=1"));
    let policies = [
        "joint",
        "round_robin",
        "random",
        "power_of_two",
        "least_loaded",
        "prefix_affinity",
        "kv_events",
        "session",
        "consistent_hash",
    ];
    let first = runs(&fleet, &trace, &policies, &[]);
    assert!(first.iter().all(|report| report.completed == 300));
    assert_eq!(first, runs(&fleet, &trace, &policies, &[]));
    let hit_rate = |name: &str| first.iter().find(|report| report.plan == name).unwrap().hit_rate;
    for knowing in ["prefix_affinity", "kv_events", "session"] {
        assert!(hit_rate(knowing) > hit_rate("random") + 0.1, "{knowing}");
    }
    assert!(hit_rate("kv_events") >= hit_rate("prefix_affinity") - 0.05);
}

#[test]
fn a_mode_changes_who_computes_prompts() {
    use DisaggregationMode::{Always, Auto, Never};
    let (fleet, trace) = (fleet(""), trace("requests=200,rate=20,input=600,spread=1.5,output=20,shared=0"));
    let reports = runs(&fleet, &trace, &[], &[Always, Auto, Never]);
    let computed = |report: &Report| {
        let of = |role: &str| {
            let engines = report.engines.iter().filter(|engine| engine.role == role);
            engines.map(|engine| engine.computed_tokens).sum::<u64>()
        };
        [of("prefill"), of("decode")]
    };
    let all: u64 = trace.requests.iter().map(|request| u64::from(request.input)).sum();
    assert_eq!(computed(&reports[0]), [all, 0]);
    assert_eq!(computed(&reports[2]), [0, all]);
    assert!(computed(&reports[1]).iter().all(|tokens| *tokens > 0));
    assert!(reports[1].decisions.iter().any(|told| told.reason == "short_uncached"));
    assert_eq!(reports[2].prefill.busy, 0.0);
}

#[test]
fn admission_lets_wait_and_refuses() {
    let limits = "[admission]\nlongest_wait = \"2s\"\n[admission.decode]\nrequests = 4\nwaiting = 8\n";
    let (fleet, trace) = (fleet(limits), trace("requests=200,rate=40,input=600,output=40"));
    let report = &runs(&fleet, &trace, &[], &[])[0];
    assert!(report.refused > 20, "{}", report.refused);
    assert_eq!(report.completed + report.refused, 200);
    assert!(report.ttft.max < 2.0 + 2.0);
}

#[test]
fn what_no_engine_has_room_for_is_counted() {
    let text = "{\"timestamp\": 0, \"input_length\": 600000, \"output_length\": 11}\n\
                {\"timestamp\": 1, \"input_length\": 600, \"output_length\": 11}";
    let report = &runs(&fleet(""), &Trace::read(text, 512).unwrap(), &[], &[])[0];
    assert_eq!((report.too_long, report.completed), (1, 1));
}

#[test]
fn goals_count_those_that_meet_them() {
    let (fleet, trace) = (fleet(""), trace("requests=400,rate=60,input=2000,output=20,shared=0"));
    let plan = &Plan::all(&fleet.routing, &fleet.disaggregation, &[], &[]).unwrap()[0];
    let goal = |ttft| Goal { ttft: Some(Duration::from_secs_f64(ttft)), itl: None };
    let loose = run(plan, &fleet, &trace, 1, goal(100.0)).unwrap();
    assert_eq!((loose.good, loose.good_part), (400, 1.0));
    let half = run(plan, &fleet, &trace, 1, goal(loose.ttft.p50)).unwrap();
    assert!((190..=210).contains(&half.good), "{}", half.good);
    let itl = Goal { ttft: None, itl: Some(Duration::from_millis(1)) };
    assert_eq!(run(plan, &fleet, &trace, 1, itl).unwrap().goodput, 0.0);
}

#[test]
fn labels_that_cost_keep_pairs_together() {
    let text = "
[[engines]]
role = \"prefill\"
count = 2
name = \"pa\"
labels = { zone = \"a\" }
[[engines]]
role = \"prefill\"
count = 2
name = \"pb\"
labels = { zone = \"b\" }
[[engines]]
role = \"decode\"
count = 4
labels = { zone = \"a\" }
[[routing.locality]]
label = \"zone\"
cost = \"10s\"
";
    let fleet = Fleet::read(text).unwrap();
    let report = &runs(&fleet, &trace("requests=100,rate=5,input=600,output=10"), &[], &[])[0];
    let of = |base: &str| {
        let engines = report.engines.iter().filter(|engine| engine.name.starts_with(base));
        engines.map(|engine| engine.requests).sum::<u64>()
    };
    assert_eq!((of("pa"), of("pb")), (100, 0));
}

//! `kvbaton simulate`: what it prints and refuses, and that its figures are those of simulated engines in real time.

use std::time::{Duration, Instant};

use kvbaton_proxy::Policy;
use kvbaton_simulate::{Fleet, Goal, Plan, Synthetic, Trace};
use serde_json::{Value, json};

use crate::support::process::run;
use crate::support::{COMPLETIONS, Cluster, File, http_client, sample};

/// Exit code, output, errors.
fn simulate(args: &[&str]) -> (i32, String, String) {
    let out = run(&[&["simulate"], args].concat(), &[]);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
}

const FLEET: &str = "[[engines]]\nrole = \"prefill\"\n[[engines]]\nrole = \"decode\"\ncount = 2\n";

#[test]
fn recorded_requests_are_run_and_told_by_engine() {
    let fleet = File::new("fleet.toml", FLEET);
    let line = "{\"timestamp\": 0, \"input_length\": 1000, \"output_length\": 5, \"hash_ids\": [1, 2]}\n";
    let trace = File::new("trace.jsonl", &line.repeat(4));
    let args = ["--fleet", fleet.path(), "--trace", trace.path(), "--policy", "joint", "--policy", "random"];
    let (code, out, err) = simulate(&[&args[..], &["--json", "--slo-ttft", "1h"]].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    let told: Value = serde_json::from_str(&out).unwrap();
    assert_eq!([&told[0]["plan"], &told[1]["plan"]], ["joint", "random"]);
    assert_eq!((&told[0]["completed"], &told[0]["good"]), (&json!(4), &json!(4)));
    assert_eq!(told[0]["decisions"], json!([{"decision": "disaggregated", "reason": "pair", "count": 4}]));
    assert_eq!(told[0]["engines"].as_array().unwrap().len(), 3);
    let (code, out, _) = simulate(&args);
    assert_eq!(
        (code, out.lines().next().unwrap().split_whitespace().collect::<Vec<_>>()),
        (0, vec!["joint", "random"])
    );
    assert!(out.contains("first token p99") && !out.contains("good"), "{out}");
}

#[test]
fn what_cannot_be_used_is_told_with_its_place() {
    let fleet = File::new("good.toml", FLEET);
    let wrong = File::new(
        "wrong.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\nsoon,1,1\n",
    );
    let (code, out, err) = simulate(&["--fleet", fleet.path(), "--trace", wrong.path()]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("1 wrong lines:\n  - line 3: \"soon\" is no time"), "{err}");
    for (text, told) in [
        ("[[engines]]\nrole = \"prefill\"\n", "at least one has role = \"decode\""),
        (&format!("{FLEET}[routing]\nload_factor = 0.5\n"), "routing.load_factor"),
        (&format!("{FLEET}[routing]\nprefill = \"best\"\n"), "unknown variant `best`"),
    ] {
        let fleet = File::new("bad.toml", text);
        let (code, _, err) = simulate(&["--fleet", fleet.path(), "--synthetic"]);
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(told), "{err}");
    }
    for (args, told) in [
        (&["--synthetic", "--policy", "best"][..], "--policy"),
        (&["--synthetic", "speed=1"], "speed=1"),
        (&["--trace", "/nowhere"], "/nowhere"),
        (&["--synthetic", "--speed", "0"], "from 0.001 to 1000"),
    ] {
        let (code, _, err) = simulate(&[&["--fleet", fleet.path()], args].concat());
        assert!(code == 2 && err.contains(told), "{code} {err}");
    }
}

/// What clients saw: medians of the first token and between tokens, and the part that was cached.
#[derive(Debug)]
struct Figures {
    ttft: f64,
    itl: f64,
    hit_rate: f64,
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// As many bytes as tokens, equal where blocks are.
fn prompt(blocks: &[u64], tokens: u32) -> String {
    let text: String = blocks.iter().map(|block| format!("{block:064}")).collect();
    text[..tokens as usize].to_owned()
}

/// Sends one request and reads its stream: until the first token, and between tokens.
async fn ask(http: reqwest::Client, url: String, body: Value) -> (f64, Vec<f64>) {
    let sent = Instant::now();
    let mut answer = http.post(url).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut times = Vec::new();
    while let Some(chunk) = answer.chunk().await.unwrap() {
        if String::from_utf8_lossy(&chunk).contains("\"text\"") {
            times.push(sent.elapsed().as_secs_f64());
        }
    }
    (times[0], times.windows(2).map(|pair| pair[1] - pair[0]).collect())
}

async fn in_real_time(trace: &Trace) -> Figures {
    let cluster = Cluster::builder()
        .prefill(2)
        .decode(2)
        .engine(|engine| {
            engine.prefill_time_per_token = Duration::from_micros(500);
            engine.decode_time_per_token = Duration::from_millis(20);
        })
        .config(|config| {
            (config.routing.prefill, config.routing.decode) = (Policy::PrefixAffinity, Policy::LeastLoaded);
        })
        .start()
        .await;
    let began = tokio::time::Instant::now();
    let (mut asked, http, url) = (tokio::task::JoinSet::new(), http_client(), cluster.url(COMPLETIONS));
    for request in &trace.requests {
        tokio::time::sleep_until(began + request.at).await;
        let body = json!({
            "model": "sim", "prompt": prompt(&request.blocks, request.input), "max_tokens": request.output,
            "ignore_eos": true, "stream": true,
        });
        asked.spawn(ask(http.clone(), url.clone(), body));
    }
    let (mut ttft, mut itl) = (Vec::new(), Vec::new());
    while let Some(one) = asked.join_next().await {
        let (first, gaps) = one.unwrap();
        ttft.push(first);
        itl.extend(gaps);
    }
    let mut counted = [0.0; 2];
    for engine in &cluster.prefill {
        let page = http.get(format!("{}/metrics", engine.url())).send().await.unwrap().text().await.unwrap();
        counted[0] += sample(&page, "vllm:prefix_cache_hits_total", &[]);
        counted[1] += sample(&page, "vllm:prefix_cache_queries_total", &[]);
    }
    cluster.finish().await;
    Figures { ttft: median(ttft), itl: median(itl), hit_rate: counted[0] / counted[1] }
}

fn simulated(trace: &Trace) -> Figures {
    let speed = "prefill_tokens_per_second = 2000.0\nprefill_start = \"0s\"\ndecode_step = \"20ms\"\n\
                 decode_sequence = \"0s\"\nlongest_step = \"50ms\"\nkv_tokens = 8192\nkv_bytes_per_token = 128\n\
                 handshake = \"10ms\"\n";
    let text = format!(
        "bytes_per_token = 1.0\nmetrics_interval = \"0s\"\n[[engines]]\nrole = \"prefill\"\ncount = 2\n{speed}\
         [[engines]]\nrole = \"decode\"\ncount = 2\n{speed}"
    );
    let fleet = Fleet::read(&text).unwrap();
    let policies = ["prefix_affinity+least_loaded".to_owned()];
    let plans = Plan::all(&fleet.routing, &fleet.disaggregation, &policies, &[]).unwrap();
    let report = kvbaton_simulate::run(&plans[0], &fleet, trace, 1, Goal::default()).unwrap();
    Figures { ttft: report.ttft.p50, itl: report.itl.p50, hit_rate: report.hit_rate }
}

/// Engines in real time are never faster than they are told to be, and on a busy machine slower;
/// `scripts/validate-simulate` compares them more closely, on one that is not.
#[tokio::test]
async fn the_same_requests_take_as_long_in_real_time() {
    let made: Synthetic =
        "requests=24,rate=4,input=300,spread=0.3,output=10,shared=256,beginnings=3,turns=2,pause=1"
            .parse()
            .unwrap();
    let trace = made.trace(5);
    let told = simulated(&trace);
    assert!(told.ttft > 0.1 && (told.itl - 0.02).abs() < 0.001 && told.hit_rate > 0.3, "{told:?}");
    let mut seen = in_real_time(&trace).await;
    let near = |seen: &Figures| {
        let within = |seen: f64, told: f64| seen > 0.8 * told && seen < 1.5 * told + 0.1;
        within(seen.ttft, told.ttft)
            && within(seen.itl, told.itl)
            && (seen.hit_rate - told.hit_rate).abs() < 0.15
    };
    if !near(&seen) {
        seen = in_real_time(&trace).await;
    }
    assert!(near(&seen), "real time {seen:?}, simulated {told:?}");
}

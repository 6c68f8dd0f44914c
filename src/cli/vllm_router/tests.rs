use std::collections::BTreeSet;
use std::time::Duration;

use clap::Parser as _;
use kvbaton_proxy::{Authorization, OnMissing, Policy};
use proptest::prelude::*;

use super::*;
use crate::cli::Cli;
use crate::config::{Config, Embedded};

/// The flags of vllm-router 0.1.17, as its own help lists them.
const RECORDED: &str = include_str!("../../../tests/fixtures/vllm-router/flags-0.1.17.txt");

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// The settings of a command line, the flags that need none, and those without a counterpart.
fn settings(line: &str) -> (Config, Vec<String>, Vec<String>) {
    let mut draft = translated(&words(line)).unwrap();
    let text = draft.text();
    let config = config::read(&text).unwrap_or_else(|faults| panic!("{faults}\n{text}"));
    let flags = |notes: Vec<(String, String)>| notes.into_iter().map(|(flag, _)| flag).collect();
    (config, flags(draft.needless), flags(draft.missing))
}

#[test]
fn no_flag_is_forgotten_and_none_invented() {
    let recorded: BTreeSet<&str> = RECORDED.lines().collect();
    let known: BTreeSet<&str> = FLAGS.iter().map(|flag| flag.name).collect();
    assert_eq!(known, recorded);
    assert_eq!(FLAGS.len(), recorded.len());
}

#[test]
fn every_flag_is_explained_in_the_guide() {
    let guide = include_str!("../../../docs/migration.md");
    for flag in FLAGS {
        assert!(guide.contains(&format!("`--{}`", flag.name)), "--{} is not in docs/migration.md", flag.name);
    }
}

#[test]
fn a_usual_command_line_becomes_settings() {
    let (config, needless, missing) = settings(
        "vllm-router --vllm-pd-disaggregation --prefill http://p1:8100 --prefill http://p2:8100 none \
         --decode http://d1:8200 --decode=http://d2:8200 --host 0.0.0.0 --port 8090 --policy round_robin \
         --request-timeout-secs 600 --retry-max-retries 3 --cb-failure-threshold 7 --cb-success-threshold 4 \
         --cb-timeout-duration-secs 90 --health-failure-threshold 5 --health-check-interval-secs 10 \
         --health-check-timeout-secs 3 --health-check-endpoint /healthz --queue-size 50 --queue-timeout-secs 20 \
         --max-concurrent-requests 200 --rate-limit-tokens-per-second 40 --log-level warning \
         --max-payload-size 2147483648 --cors-allowed-origins https://a.example https://b.example \
         --prometheus-host 10.0.0.1 --prometheus-port 29001 --api-key sesame --intra-node-data-parallel-size 2",
    );
    let urls = |peers: &[kvbaton_proxy::PeerSpec]| -> Vec<String> {
        peers.iter().map(|peer| peer.url.clone()).collect()
    };
    assert_eq!(urls(&config.prefill), ["http://p1:8100", "http://p2:8100"]);
    assert_eq!(urls(&config.decode), ["http://d1:8200", "http://d2:8200"]);
    for peer in config.prefill.iter().chain(&config.decode) {
        assert_eq!((peer.dp_size, peer.dp_split), (Some(2), true));
        assert_eq!((peer.authorization, peer.token.as_deref()), (Authorization::Replace, Some("sesame")));
    }
    assert_eq!(config.listen, "0.0.0.0:8090".parse().unwrap());
    assert_eq!(config.admin.listen, Some("10.0.0.1:29001".parse().unwrap()));
    let whole = Duration::from_secs(600);
    assert_eq!(
        (config.timeouts.prefill, config.timeouts.decode_head, config.timeouts.total),
        (whole, whole, whole)
    );
    assert_eq!(config.retry.attempts, 2, "vllm-router counts the first try");
    assert_eq!((config.breaker.failures, config.breaker.good_trials), (7, 4));
    assert_eq!(config.breaker.pause, Duration::from_secs(90));
    assert_eq!((config.probe.patience, config.probe.path.as_str()), (5, "/healthz"));
    assert_eq!(
        (config.probe.interval, config.probe.timeout),
        (Duration::from_secs(10), Duration::from_secs(3))
    );
    assert_eq!((config.admission.waiting, config.admission.longest_wait), (50, Duration::from_secs(20)));
    assert_eq!((config.admission.decode.rate, config.admission.decode.burst), (40.0, 200));
    assert_eq!((config.limits.body_bytes, config.limits.held_bytes), (1 << 31, 1 << 31));
    assert_eq!(config.cors.origins, ["https://a.example", "https://b.example"]);
    assert_eq!(config.log.level, "warn");
    assert_eq!((config.routing.prefill, config.routing.decode), (Policy::RoundRobin, Policy::RoundRobin));
    assert_eq!(needless, Vec::<String>::new());
    assert_eq!(missing, Vec::<String>::new());
}

#[test]
fn the_addresses_are_vllm_routers_where_nothing_is_said() {
    let (config, ..) = settings("");
    assert_eq!(config.listen, "127.0.0.1:30000".parse().unwrap());
    assert_eq!(config.admin.listen, Some("127.0.0.1:29000".parse().unwrap()));
    assert_eq!(config.fleet.embedded, Embedded::Never, "no engines, none simulated");
    assert_eq!(config.timeouts, Config::default().timeouts);
}

#[test]
fn workers_of_both_stages_serve_alone() {
    let (config, _, missing) = settings("--worker-urls http://a:1 http://b:1 --host ::1");
    assert_eq!(config.decode.len(), 2);
    assert_eq!(config.hand_off.on_no_prefill, OnMissing::DecodeOnly);
    assert_eq!(config.listen, "[::1]:30000".parse().unwrap());
    assert_eq!(missing, ["--worker-urls"], "it is not all that it was");
    let (config, needless, _) = settings(
        "--vllm-pd-disaggregation --prefill http://p:1 --decode http://d:1 --worker-urls http://a:1",
    );
    assert_eq!((config.decode.len(), needless.len()), (1, 1));
}

#[test]
fn what_is_switched_off_there_is_off_here() {
    let (config, ..) = settings(
        "--disable-retries --disable-circuit-breaker --queue-size 0 --cors-allowed-origins --request-timeout-secs \
         99999999",
    );
    assert_eq!(config.retry.attempts, 0);
    assert_eq!(config.breaker.failures, 0);
    assert!(config.breaker.failure_rate > 1.0);
    assert_eq!(config.admission.longest_wait, Duration::ZERO);
    assert_eq!(config.cors.origins, ["*"]);
    assert_eq!(config.timeouts.total, Duration::from_secs(7 * 24 * 3600));
}

#[test]
fn policies_have_counterparts() {
    let of = |line: &str| {
        let (config, _, missing) = settings(line);
        ([config.routing.prefill, config.routing.decode], missing)
    };
    let none = Vec::<String>::new();
    assert_eq!(of("--policy cache_aware"), ([Policy::PrefixAffinity; 2], none.clone()));
    for line in
        ["--prefill-policy random --policy power_of_two", "--policy power_of_two --prefill-policy random"]
    {
        assert_eq!(of(line), ([Policy::Random, Policy::PowerOfTwo], none.clone()), "{line}");
    }
    assert_eq!(of("--policy random --policy round_robin"), ([Policy::RoundRobin; 2], none));
    // The rest has to be said in the settings.
    let missing = vec!["--decode-policy consistent_hash".to_owned()];
    assert_eq!(of("--decode-policy consistent_hash"), ([Policy::Joint, Policy::Session], missing));
    let missing = vec!["--prefill-policy kv_aware".to_owned()];
    assert_eq!(of("--prefill-policy kv_aware"), ([Policy::KvEvents, Policy::Joint], missing));
}

#[test]
fn what_has_no_counterpart_is_named() {
    let (_, _, missing) = settings(
        "--policy kv_aware --service-discovery --prefill-selector app=p tier=x --kv-connector mooncake \
         --prefill http://p:1 8998 --request-id-headers X-Request-Id x-trace-id --host router.example",
    );
    let expected = [
        "--policy kv_aware",
        "--service-discovery",
        "--prefill-selector app=p tier=x",
        "--kv-connector mooncake",
        "--prefill http://p:1 8998",
        "--request-id-headers x-trace-id",
        "--host router.example",
    ];
    assert_eq!(missing, expected);
}

#[test]
fn beginnings_of_flags_are_understood_and_the_last_value_wins() {
    let (config, ..) = settings("--retry-max-r 2 --retry-max-retries 5 --max-c 9");
    assert_eq!(config.retry.attempts, 4);
    assert_eq!((config.admission.decode.rate, config.admission.decode.burst), (9.0, 9));
}

#[test]
fn what_cannot_be_read_is_refused() {
    let why = |line: &str| translated(&words(line)).unwrap_err().to_string();
    assert_eq!(why("--prot 1"), "vllm-router has no flag --prot; did you mean --port?");
    assert_eq!(why("--policies x"), "vllm-router has no flag --policies; did you mean --policy?");
    assert!(why("--retry 1").starts_with("--retry can be short for each of: retry-max-retries"));
    assert_eq!(why("--port"), "--port takes a value");
    assert_eq!(why("--prefill --decode http://d:1"), "--prefill takes at least one value");
    assert_eq!(why("--mini-lb=yes"), "--mini-lb takes no value");
    assert_eq!(why("--port http"), "--port http: not a number that fits");
    assert_eq!(why("--policy best"), "--policy best: vllm-router has no such policy");
    assert_eq!(why("http://d:1"), "\"http://d:1\" belongs to no flag");
    assert!(why("--prefill http://a:1 http://b:1").starts_with("--prefill http://b:1: after the URL"));
}

#[test]
fn a_key_stands_in_no_comment_and_no_value_ends_one() {
    let mut draft =
        translated(&["--api-key".into(), "se#\"same".into(), "--log-dir".into(), "a\nlisten = 1".into()])
            .unwrap();
    let text = draft.text();
    assert!(config::read(&text).is_ok(), "{text}");
    assert!(text.contains("#   --log-dir a listen = 1:"), "{text}");
}

#[test]
fn all_that_follows_is_taken_by_the_command_line() {
    let line =
        "kvbaton --from-vllm-router-args vllm-router --prefill http://p:1 --config x --listen -- check";
    let cli = Cli::try_parse_from(words(line)).unwrap();
    let given = cli.from_vllm_router_args.unwrap();
    assert_eq!(given, words("vllm-router --prefill http://p:1 --config x --listen -- check"));
    assert!(Cli::try_parse_from(words("kvbaton --listen 1.1.1.1:1 --from-vllm-router-args")).is_err());
}

/// Values that vllm-router itself would take.
fn value(flag: &Flag) -> BoxedStrategy<String> {
    match flag.name {
        "policy" | "prefill-policy" | "decode-policy" => {
            prop::sample::select(vec!["random", "cache_aware", "kv_aware", "sticky_least_loaded"])
                .prop_map(str::to_owned)
                .boxed()
        }
        "log-level" => Just("critical".to_owned()).boxed(),
        "kv-connector" => Just("moriio".to_owned()).boxed(),
        "host" | "prometheus-host" => Just("10.1.2.3".to_owned()).boxed(),
        "health-check-endpoint" => Just("/ready".to_owned()).boxed(),
        "cors-allowed-origins" => Just("https://chat.example".to_owned()).boxed(),
        "prefill" | "decode" | "worker-urls" => "http://[a-z]{9}:[1-9][0-9]{3}".boxed(),
        "port" | "prometheus-port" => (1024_u16..=65535).prop_map(|port| port.to_string()).boxed(),
        "intra-node-data-parallel-size" => (1_u32..=16).prop_map(|ranks| ranks.to_string()).boxed(),
        _ => (1_u32..=100_000).prop_map(|number| number.to_string()).boxed(),
    }
}

fn one() -> impl Strategy<Value = Vec<String>> {
    prop::sample::select(FLAGS.iter().collect::<Vec<_>>()).prop_flat_map(|flag| {
        let name = format!("--{}", flag.name);
        match flag.takes {
            Takes::Nothing => Just(vec![name]).boxed(),
            _ => value(flag).prop_map(move |value| vec![name.clone(), value]).boxed(),
        }
    })
}

proptest! {
    #[test]
    fn whatever_vllm_router_takes_becomes_settings_that_can_be_used(
        flags in prop::collection::vec(one(), 0..20)
    ) {
        let line: Vec<String> = flags.concat();
        let mut draft = translated(&line).unwrap();
        let text = draft.text();
        prop_assert!(config::read(&text).is_ok(), "{:?}\n{}", config::read(&text).err(), text);
    }
}

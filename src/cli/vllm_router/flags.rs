//! Every flag of vllm-router 0.1.17, and what becomes of it.

use super::Unreadable;
use super::draft::Draft;

/// How many values a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Nothing,
    One,
    Any,
    Some,
}

/// Puts a flag's values into the settings.
type Put = fn(&mut Draft, &'static str, &[String]) -> Result<(), Unreadable>;

/// What becomes of a flag.
#[derive(Debug)]
pub(super) enum Fate {
    /// It has counterparts.
    Set(Put),
    /// It needs none, and why.
    Needless(&'static str),
    /// It has none, and what to do.
    Missing(&'static str),
}

/// A flag of vllm-router.
#[derive(Debug)]
pub(super) struct Flag {
    pub(super) name: &'static str,
    pub(super) takes: Takes,
    pub(super) fate: Fate,
}

const fn set(name: &'static str, takes: Takes, put: Put) -> Flag {
    Flag { name, takes, fate: Fate::Set(put) }
}

const fn needless(name: &'static str, takes: Takes, why: &'static str) -> Flag {
    Flag { name, takes, fate: Fate::Needless(why) }
}

const fn missing(name: &'static str, takes: Takes, what: &'static str) -> Flag {
    Flag { name, takes, fate: Fate::Missing(what) }
}

/// The longest duration of a setting, in seconds.
const WEEK: u64 = 7 * 24 * 3600;

const PROGRAMS: &str = "kvbaton schedules requests, not programs that send several of them";
const KV_COST: &str =
    "it tunes vllm-router's policy kv_aware; kv_events has its own settings, in [kv_events] and [routing]";
const KV_EVENTS: &str =
    "each engine has its own address here: kv_events and kv_events_replay of [[prefill]] and [[decode]]";
const TREE: &str =
    "it tunes vllm-router's policy cache_aware; prefix_affinity has its own settings, in [routing.prefix]";
const WASM: &str = "kvbaton runs no plugins; put what yours does into a proxy in front";
const PODS: &str = "kvbaton does not watch pods: let engines register by themselves (integrations/vllm), which \
                    follows a pool as it is scaled, or name them";
const BACKOFF: &str = "a retry goes to another engine at once; a budget over all requests bounds them \
                       (retry.per_request, retry.per_second, retry.burst)";
const STARTUP: &str = "kvbaton does not wait for engines at its start: each gets requests after its first good probe, \
                       and /readyz says whether a pair is there";

/// In the order of vllm-router's own help.
pub(super) const FLAGS: &[Flag] = &[
    needless("help", Takes::Nothing, "it asks for vllm-router's help; see kvbaton --help"),
    set("host", Takes::One, |draft, _, values| {
        draft.host = last(values);
        Ok(())
    }),
    set("port", Takes::One, |draft, flag, values| {
        draft.port = number(flag, values)?;
        Ok(())
    }),
    set("worker-urls", Takes::Any, |draft, _, values| {
        draft.workers = values.to_vec();
        Ok(())
    }),
    missing("enable-program-scheduling", Takes::Nothing, PROGRAMS),
    missing("program-scheduling-config-json", Takes::One, PROGRAMS),
    set("policy", Takes::One, policy),
    set("prefill-policy", Takes::One, policy),
    set("decode-policy", Takes::One, policy),
    missing("router-temperature", Takes::One, KV_COST),
    missing("kv-penalty-host", Takes::One, KV_COST),
    missing("kv-penalty-external", Takes::One, KV_COST),
    missing("kv-penalty-disk", Takes::One, KV_COST),
    missing("kv-aware-session-affinity-ttl-secs", Takes::One, KV_COST),
    missing("kv-event-source", Takes::One, KV_EVENTS),
    missing("kv-event-replay-source", Takes::One, KV_EVENTS),
    missing("kv-event-block-size", Takes::One, KV_EVENTS),
    missing("kv-event-model", Takes::One, KV_EVENTS),
    missing("pd-kv-events", Takes::One, KV_EVENTS),
    needless(
        "mini-lb",
        Takes::Nothing,
        "it is vllm-router's balancer for debugging; kvbaton has one program",
    ),
    set("vllm-pd-disaggregation", Takes::Nothing, |draft, _, _| {
        draft.is_disaggregated = true;
        Ok(())
    }),
    set("prefill", Takes::Some, prefill),
    set("decode", Takes::One, |draft, _, values| {
        draft.decode.extend_from_slice(values);
        Ok(())
    }),
    needless("worker-startup-timeout-secs", Takes::One, STARTUP),
    needless("worker-startup-check-interval", Takes::One, STARTUP),
    missing("cache-threshold", Takes::One, TREE),
    missing("balance-abs-threshold", Takes::One, TREE),
    missing("balance-rel-threshold", Takes::One, TREE),
    missing("eviction-interval-secs", Takes::One, TREE),
    missing("max-tree-size", Takes::One, TREE),
    set("max-payload-size", Takes::One, max_payload_size),
    missing("wasm-middleware", Takes::One, WASM),
    missing("wasm-middleware-sha256", Takes::One, WASM),
    missing("wasm-middleware-route", Takes::One, WASM),
    set("intra-node-data-parallel-size", Takes::One, |draft, flag, values| {
        draft.ranks = number(flag, values)?;
        Ok(())
    }),
    needless(
        "enable-igw",
        Takes::Nothing,
        "kvbaton always sends a request to engines that list its model in their /v1/models",
    ),
    set("api-key", Takes::One, |draft, _, values| {
        draft.token = Some(last(values));
        Ok(())
    }),
    missing(
        "log-dir",
        Takes::One,
        "kvbaton logs to standard error: journald, Docker and Kubernetes keep that; else 2>> FILE",
    ),
    set("log-level", Takes::One, log_level),
    missing("service-discovery", Takes::Nothing, PODS),
    missing("selector", Takes::Some, PODS),
    missing("service-discovery-port", Takes::One, PODS),
    missing("service-discovery-namespace", Takes::One, PODS),
    missing("prefill-selector", Takes::Some, PODS),
    missing("decode-selector", Takes::Some, PODS),
    missing(
        "vllm-discovery-address",
        Takes::One,
        "kvbaton's registry speaks HTTP: engines register with the package of integrations/vllm",
    ),
    set("kv-connector", Takes::One, kv_connector),
    set("prometheus-port", Takes::One, |draft, flag, values| {
        draft.metrics_port = number(flag, values)?;
        Ok(())
    }),
    set("prometheus-host", Takes::One, |draft, _, values| {
        draft.metrics_host = last(values);
        Ok(())
    }),
    set("request-id-headers", Takes::Any, request_id_headers),
    set("request-timeout-secs", Takes::One, |draft, flag, values| {
        for key in ["prefill", "decode_head", "total"] {
            draft.set("timeouts", key, seconds(flag, values)?, flag);
        }
        Ok(())
    }),
    set("retry-max-retries", Takes::One, |draft, flag, values| {
        // vllm-router counts the first try too.
        draft.set("retry", "attempts", i64::from(number::<u32>(flag, values)?.saturating_sub(1)), flag);
        Ok(())
    }),
    needless("retry-initial-backoff-ms", Takes::One, BACKOFF),
    needless("retry-max-backoff-ms", Takes::One, BACKOFF),
    needless("retry-backoff-multiplier", Takes::One, BACKOFF),
    needless("retry-jitter-factor", Takes::One, BACKOFF),
    set("disable-retries", Takes::Nothing, |draft, flag, _| {
        draft.set("retry", "attempts", 0, flag);
        Ok(())
    }),
    set("cb-failure-threshold", Takes::One, |draft, flag, values| {
        draft.set("breaker", "failures", i64::from(number::<u32>(flag, values)?), flag);
        Ok(())
    }),
    set("cb-success-threshold", Takes::One, |draft, flag, values| {
        draft.set("breaker", "good_trials", i64::from(number::<u32>(flag, values)?), flag);
        Ok(())
    }),
    set("cb-timeout-duration-secs", Takes::One, |draft, flag, values| {
        draft.set("breaker", "pause", seconds(flag, values)?, flag);
        // vllm-router's pauses do not grow.
        draft.set("breaker", "longest_pause", seconds(flag, values)?, flag);
        Ok(())
    }),
    needless(
        "cb-window-duration-secs",
        Takes::One,
        "vllm-router does not use it; kvbaton's breaker.window is that of breaker.failure_rate",
    ),
    set("disable-circuit-breaker", Takes::Nothing, |draft, flag, _| {
        draft.set("breaker", "failures", 0, flag);
        draft.set("breaker", "failure_rate", 2.0, flag);
        Ok(())
    }),
    set("health-failure-threshold", Takes::One, |draft, flag, values| {
        draft.set("probe", "patience", i64::from(number::<u32>(flag, values)?), flag);
        Ok(())
    }),
    needless(
        "health-success-threshold",
        Takes::One,
        "one good probe makes an engine usable; after failures its share grows over breaker.slow_start",
    ),
    set("health-check-timeout-secs", Takes::One, |draft, flag, values| {
        draft.set("probe", "timeout", seconds(flag, values)?, flag);
        Ok(())
    }),
    set("health-check-interval-secs", Takes::One, |draft, flag, values| {
        draft.set("probe", "interval", seconds(flag, values)?, flag);
        Ok(())
    }),
    set("health-check-endpoint", Takes::One, |draft, flag, values| {
        draft.set("probe", "path", last(values), flag);
        Ok(())
    }),
    set("max-concurrent-requests", Takes::One, |draft, flag, values| {
        draft.burst = Some(number(flag, values)?);
        Ok(())
    }),
    set("queue-size", Takes::One, |draft, flag, values| {
        match number::<u32>(flag, values)? {
            // No bound here, no queue there.
            0 => draft.set("admission", "longest_wait", "0s", flag),
            size => draft.set("admission", "waiting", i64::from(size), flag),
        }
        Ok(())
    }),
    set("queue-timeout-secs", Takes::One, |draft, flag, values| {
        draft.set("admission", "longest_wait", seconds(flag, values)?, flag);
        Ok(())
    }),
    set("rate-limit-tokens-per-second", Takes::One, |draft, flag, values| {
        draft.rate = Some(number(flag, values)?);
        Ok(())
    }),
    set("cors-allowed-origins", Takes::Any, |draft, flag, values| {
        // Without any, vllm-router allows all.
        let all = vec!["*".to_owned()];
        let origins = if values.is_empty() { all } else { values.to_vec() };
        draft.set("cors", "origins", origins, flag);
        Ok(())
    }),
];

fn last(values: &[String]) -> String {
    values.last().cloned().unwrap_or_default()
}

fn number<N: std::str::FromStr>(flag: &'static str, values: &[String]) -> Result<N, Unreadable> {
    let value = last(values);
    value.trim().parse().map_err(|_| Unreadable::Value { flag, value, wanted: "not a number that fits" })
}

/// A duration as settings say it.
fn seconds(flag: &'static str, values: &[String]) -> Result<String, Unreadable> {
    Ok(format!("{}s", number::<u64>(flag, values)?.min(WEEK)))
}

fn prefill(draft: &mut Draft, flag: &'static str, values: &[String]) -> Result<(), Unreadable> {
    let [url, port @ ..] = values else { return Ok(()) };
    draft.prefill.push(url.clone());
    match port {
        [] => {}
        [port] if port.eq_ignore_ascii_case("none") => {}
        [port] if port.parse::<u16>().is_ok() => {
            let why = "bootstrap ports are of the Mooncake connector; kvbaton hands off over NIXL";
            draft.missing.push((format!("--prefill {url} {port}"), why.to_owned()));
        }
        [value, ..] => {
            let wanted = "after the URL there may be a port or none; --prefill stands before each URL";
            return Err(Unreadable::Value { flag, value: value.clone(), wanted });
        }
    }
    Ok(())
}

fn policy(draft: &mut Draft, flag: &'static str, values: &[String]) -> Result<(), Unreadable> {
    let value = last(values);
    let ours = match value.as_str() {
        "random" => "random",
        "round_robin" => "round_robin",
        "power_of_two" => "power_of_two",
        "cache_aware" => "prefix_affinity",
        "kv_aware" => "kv_events",
        "consistent_hash" | "sticky_least_loaded" => "session",
        _ => return Err(Unreadable::Value { flag, value, wanted: "vllm-router has no such policy" }),
    };
    if ours == "kv_events" {
        let what = "each engine that publishes KV events needs its address, kv_events = \"tcp://…\", in the settings; \
                    until then the router goes by what it has routed";
        draft.missing.push((format!("--{flag} {value}"), what.to_owned()));
    }
    if ours == "session" {
        let what = "sessions are known by a header here, routing.session_header, not by a field of the body";
        draft.missing.push((format!("--{flag} {value}"), what.to_owned()));
    }
    // A stage's own flag wins over the one for both, wherever it stands.
    match flag {
        "prefill-policy" => draft.set("routing", "prefill", ours, flag),
        "decode-policy" => draft.set("routing", "decode", ours, flag),
        _ => {
            draft.set_unless_set("routing", "prefill", ours, flag);
            draft.set_unless_set("routing", "decode", ours, flag);
        }
    }
    Ok(())
}

fn max_payload_size(draft: &mut Draft, flag: &'static str, values: &[String]) -> Result<(), Unreadable> {
    let bytes: i64 = number(flag, values)?;
    draft.set("limits", "body_bytes", bytes, flag);
    let held = i64::try_from(kvbaton_proxy::Limits::default().held_bytes).unwrap_or(i64::MAX);
    if bytes > held {
        draft.set("limits", "held_bytes", bytes, flag);
    }
    Ok(())
}

fn log_level(draft: &mut Draft, flag: &'static str, values: &[String]) -> Result<(), Unreadable> {
    let value = last(values);
    let level = match value.as_str() {
        "debug" => "debug",
        "info" => "info",
        "warning" => "warn",
        "error" | "critical" => "error",
        _ => return Err(Unreadable::Value { flag, value, wanted: "vllm-router has no such level" }),
    };
    draft.set("log", "level", level, flag);
    Ok(())
}

fn kv_connector(draft: &mut Draft, flag: &'static str, values: &[String]) -> Result<(), Unreadable> {
    let value = last(values);
    match value.as_str() {
        "nixl" => draft.needless.push((format!("--{flag} nixl"), "it is the only one here".to_owned())),
        "mooncake" | "moriio" => {
            let what = "kvbaton hands off over NIXL only: start the engines with NixlConnector";
            draft.missing.push((format!("--{flag} {value}"), what.to_owned()));
        }
        _ => return Err(Unreadable::Value { flag, value, wanted: "vllm-router has no such connector" }),
    }
    Ok(())
}

fn request_id_headers(draft: &mut Draft, flag: &'static str, values: &[String]) -> Result<(), Unreadable> {
    for name in values {
        let given = format!("--{flag} {name}");
        if name.eq_ignore_ascii_case("x-request-id") {
            draft.needless.push((given, "kvbaton takes a request's id from this header".to_owned()));
        } else {
            let what = "kvbaton takes a request's id from x-request-id only; traceparent is understood too";
            draft.missing.push((given, what.to_owned()));
        }
    }
    Ok(())
}

//! Checks of the settings that say when engines get no requests, and how many requests there may be.

use std::time::Duration;

use kvbaton_proxy::NamedLimits;

use super::{Config, LONGEST};

/// Below this, reading metrics pages would be an engine's main work.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

/// Most requests of which something is kept: about a gigabyte.
const MOST_REQUESTS: usize = 1_000_000;

/// Tells every fault of these settings.
pub(super) fn check(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    check_probe(config, wrong);
    check_breaker(config, wrong);
    check_admission(config, wrong);
}

/// Fills the lists in which keys are looked up that settings may have.
pub(super) fn sample(config: &mut Config) {
    let named = vec![NamedLimits { name: "name".into(), ..NamedLimits::default() }];
    config.admission.models = named.clone();
    config.admission.keys = named;
}

fn check_admission(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    let admission = &config.admission;
    if admission.longest_wait > LONGEST {
        wrong("admission.longest_wait", "is longer than a week".into(), "the default is \"10s\"");
    }
    let rates = [("admission.prefill", &admission.prefill), ("admission.decode", &admission.decode)];
    let named = [("admission.models", &admission.models), ("admission.keys", &admission.keys)];
    let rates = rates.into_iter().map(|(key, limits)| (key.to_owned(), limits.rate));
    let of_named = named.into_iter().flat_map(|(key, all)| {
        all.iter().enumerate().map(move |(at, limits)| (format!("{key}[{at}]"), limits.rate))
    });
    for (key, rate) in rates.chain(of_named) {
        if !(0.0..=1e9).contains(&rate) {
            wrong(
                &format!("{key}.rate"),
                "must be a number of at least 0".into(),
                "requests a second; 0 for any",
            );
        }
    }
    for (key, all) in named {
        let mut names = std::collections::BTreeSet::new();
        for (at, limits) in all.iter().enumerate() {
            if limits.name.is_empty() || !names.insert(limits.name.as_str()) {
                wrong(
                    &format!("{key}[{at}]"),
                    "needs a name of its own".into(),
                    "the model's, or the API key's",
                );
            }
        }
    }
    let keys: Vec<&str> = config.keys.iter().map(|key| key.name.as_str()).collect();
    for limits in admission.keys.iter().filter(|_| config.keys_file.is_none()) {
        if !limits.name.is_empty() && !keys.contains(&limits.name.as_str()) {
            wrong(
                "admission.keys",
                format!("there is no key {:?}", limits.name),
                "the name of one of [[keys]]",
            );
        }
    }
}

fn check_probe(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    if !(0.0..=0.9).contains(&config.probe.jitter) {
        wrong("probe.jitter", "must be a number from 0 to 0.9".into(), "the default is 0.1");
    }
    let interval = config.probe.metrics_interval;
    if !interval.is_zero() && !(SHORTEST_INTERVAL..=LONGEST).contains(&interval) {
        wrong(
            "probe.metrics_interval",
            "must be from 100ms to a week, or 0s".into(),
            "the default is \"5s\"; \"0s\" does not read the engines' metrics pages",
        );
    }
    if config.timeline.requests > MOST_REQUESTS {
        wrong("timeline.requests", "must be at most 1000000".into(), "the default is 2000; 0 keeps none");
    }
    if !config.probe.path.starts_with('/') || config.probe.path.bytes().any(|b| !b.is_ascii_graphic()) {
        wrong("probe.path", "is no path".into(), "the default is \"/health\"");
    }
}

fn check_breaker(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    let breaker = &config.breaker;
    for (key, value) in [
        ("breaker.window", breaker.window),
        ("breaker.pause", breaker.pause),
        ("breaker.longest_pause", breaker.longest_pause),
    ] {
        if value.is_zero() || value > LONGEST {
            wrong(key, "must be more than nothing and at most a week".into(), "such as \"30s\"");
        }
    }
    if breaker.slow_start > LONGEST {
        wrong("breaker.slow_start", "is longer than a week".into(), "the default is \"10s\"");
    }
    if breaker.trials == 0 || breaker.good_trials == 0 {
        wrong(
            "breaker.trials",
            "and breaker.good_trials must not be zero".into(),
            "the defaults are 1 and 2",
        );
    }
    if breaker.failure_rate.is_nan() || breaker.failure_rate <= 0.0 {
        wrong("breaker.failure_rate", "must be above 0".into(), "the default is 0.5; above 1 for never");
    }
    if !(0.0..=1.0).contains(&breaker.floor) {
        wrong("breaker.floor", "must be a number from 0 to 1".into(), "the default is 0.5");
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Flags, load};

    fn wrong(set: &[(&str, &str)]) -> Vec<String> {
        let set = set.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let found = load(&Flags { set, ..Flags::default() }, []);
        found.err().map(|faults| faults.0.into_iter().map(|fault| fault.key).collect()).unwrap_or_default()
    }

    fn wrong_in(file: &str) -> Vec<String> {
        let config: Config = toml::from_str(file).unwrap();
        let found = config.validate().err();
        found.map(|faults| faults.0.into_iter().map(|fault| fault.key).collect()).unwrap_or_default()
    }

    #[test]
    fn sound_limits_are_taken() {
        let set = [
            ("admission.decode.per_engine", "8"),
            ("admission.longest_wait", "3s"),
            ("breaker.slow_start", "0s"),
            ("probe.path", "/healthz"),
            ("probe.metrics_interval", "0s"),
            ("timeline.requests", "0"),
        ];
        assert_eq!(wrong(&set), Vec::<String>::new());
        let file =
            "[[admission.models]]\nname = \"sim\"\nrequests = 4\nrate = 2.5\nwaiting_tokens = 100000\n";
        assert_eq!(wrong_in(file), Vec::<String>::new());
    }

    #[test]
    fn unsound_ones_are_all_named() {
        let set = [
            ("probe.jitter", "1.5"),
            ("probe.metrics_interval", "10ms"),
            ("timeline.requests", "2000000"),
            ("probe.path", "health"),
            ("breaker.trials", "0"),
            ("breaker.floor", "2.0"),
            ("admission.decode.rate", "-1.0"),
        ];
        assert_eq!(wrong(&set), set.map(|(key, _)| key));
        let file = "[[admission.models]]\nname = \"a\"\n[[admission.models]]\nname = \"a\"\n\
                    [[admission.keys]]\nname = \"nobody\"\n";
        assert_eq!(wrong_in(file), ["admission.models[1]", "admission.keys"]);
    }
}

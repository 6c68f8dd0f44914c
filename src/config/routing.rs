//! Checks of the settings by which the pair for a request is chosen.

use std::time::Duration;

use kvbaton_proxy::{LabelCost, ModelPolicies, ModelSettings, ModelTarget, PdRatio};

use super::Config;

/// Longest cost of anything: beyond this no pair would be taken that has it.
const DEAREST: Duration = Duration::from_secs(3600);

/// Fills the lists in which keys are looked up that settings may have.
pub(super) fn sample(config: &mut Config) {
    config.routing.models = vec![ModelPolicies { model: "model".into(), ..ModelPolicies::default() }];
    config.models = vec![ModelSettings {
        aliases: vec!["alias".into()],
        targets: vec![ModelTarget { model: "model".into(), weight: 1 }],
        pd_ratio: Some(PdRatio { prefill: 1, decode: 1 }),
        ..ModelSettings::default()
    }];
    config.routing.locality = vec![LabelCost { label: "zone".into(), cost: Duration::from_millis(1) }];
}

/// Tells every fault of these settings.
pub(super) fn check(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    let (routing, disaggregation) = (&config.routing, &config.disaggregation);
    if http::HeaderName::try_from(routing.session_header.as_str()).is_err() {
        wrong("routing.session_header", "is no header's name".into(), "the default is \"x-session-id\"");
    }
    if !(1.0..=1000.0).contains(&routing.load_factor) {
        wrong("routing.load_factor", "must be a number from 1 to 1000".into(), "the default is 1.25");
    }
    for (key, value) in [
        ("routing.prompt_tokens_per_second", routing.prompt_tokens_per_second),
        ("routing.bytes_per_second", routing.bytes_per_second),
        ("disaggregation.decode_speed", disaggregation.decode_speed),
    ] {
        if !(1e-3..=1e15).contains(&value) {
            wrong(key, "must be a number above 0".into(), "the defaults are 8000.0, 1e10 and 1.0");
        }
    }
    if !(0.0..=1e3).contains(&disaggregation.interference) {
        let hint = "the default is 1.0; 0 takes prompts and sequences not to disturb each other";
        wrong("disaggregation.interference", "must be a number from 0 to 1000".into(), hint);
    }
    for (key, value) in [
        ("routing.sequence_cost", routing.sequence_cost),
        ("routing.waiting_cost", routing.waiting_cost),
        ("routing.kv_full_cost", routing.kv_full_cost),
    ] {
        if value > DEAREST {
            wrong(key, "is longer than an hour".into(), "\"0s\" lets it not count");
        }
    }
    if routing.reading_half_life.is_zero() || routing.reading_half_life > DEAREST {
        let what = "must be more than nothing and at most an hour".into();
        wrong("routing.reading_half_life", what, "the default is \"10s\"");
    }
    if !routing.prefix.is_usable() {
        let hint = "the defaults are 100000 entries, chunks of 256 bytes and 512 of them";
        wrong("routing.prefix", "has a number that is zero or far too large".into(), hint);
    }
    let mut models = std::collections::BTreeSet::new();
    for (at, policies) in routing.models.iter().enumerate() {
        if policies.model.is_empty() || !models.insert(policies.model.as_str()) {
            let key = format!("routing.models[{at}]");
            wrong(&key, "needs a model of its own".into(), "the model's name as requests name it");
        }
    }
    for (at, what, hint) in ModelSettings::faults(&config.models) {
        wrong(&format!("models[{at}]"), what.into(), hint);
    }
    let mut labels = std::collections::BTreeSet::new();
    for (at, cost) in routing.locality.iter().enumerate() {
        if cost.label.is_empty() || cost.cost > DEAREST || !labels.insert(cost.label.as_str()) {
            let what = "needs a label of its own and a cost of at most an hour".into();
            wrong(&format!("routing.locality[{at}]"), what, "such as label = \"zone\", cost = \"5ms\"");
        }
    }
}

#[cfg(test)]
mod tests {
    use kvbaton_proxy::{DisaggregationMode, Policy, TransferMode};

    use super::super::{Config, Flags, load};

    #[test]
    fn policies_and_costs_are_read_from_every_layer() {
        let file = "[routing]\nprefill = \"prefix_affinity\"\n[[routing.models]]\nmodel = \"m\"\ndecode = \"session\"\n\
                    [[routing.locality]]\nlabel = \"zone\"\ncost = \"5ms\"\n[disaggregation]\nmode = \"auto\"\n";
        let config: Config = toml::from_str(file).unwrap();
        assert!(config.validate().is_ok());
        assert_eq!(config.routing.policies(Some("other")), [Policy::PrefixAffinity, Policy::Joint]);
        assert_eq!(config.routing.policies(Some("m")), [Policy::Joint, Policy::Session]);
        assert_eq!(config.disaggregation.mode, DisaggregationMode::Auto);
        let set = [("routing.decode", "power_of_two"), ("routing.load_factor", "2.0")];
        let set = set.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        let env = [("KVBATON_DISAGGREGATION__MODE".to_owned(), "never".to_owned())];
        let config = load(&Flags { set, ..Flags::default() }, env).unwrap();
        assert_eq!(config.routing.policies(None), [Policy::Joint, Policy::PowerOfTwo]);
        assert_eq!(
            (config.routing.load_factor, config.disaggregation.mode),
            (2.0, DisaggregationMode::Never)
        );
    }

    #[test]
    fn labels_are_any_names_and_lists_hold_models() {
        let file = std::env::temp_dir().join(format!("kvbaton-labels-{}.toml", std::process::id()));
        let text = "[[prefill]]\nurl = \"http://a:1\"\nlabels = { zone = \"a\", rack = \"r1\" }\n\
                    transfer_mode = \"push\"\n[[models]]\nname = \"chat\"\naliases = [\"gpt-4\"]\n\
                    targets = [{ model = \"a\", weight = 9 }, { model = \"b\" }]\npd_ratio = { prefill = 1, decode = 3 }\n";
        std::fs::write(&file, text).unwrap();
        let config = load(&Flags { config: Some(file.clone()), ..Flags::default() }, []);
        std::fs::remove_file(file).unwrap();
        let config = config.unwrap();
        assert_eq!(config.prefill[0].labels["rack"], "r1");
        assert_eq!(config.prefill[0].transfer_mode, Some(TransferMode::Push));
        assert_eq!((config.models[0].targets[0].weight, config.models[0].targets[1].weight), (9, 1));
    }

    #[test]
    fn unsound_ones_are_all_named() {
        let file = "[routing]\nsession_header = \"a b\"\nload_factor = 0.5\nbytes_per_second = 0.0\n\
                    waiting_cost = \"2h\"\nreading_half_life = \"0s\"\nprefix = { entries = 0 }\n\
                    [[routing.models]]\nmodel = \"\"\n[[routing.locality]]\n[disaggregation]\ninterference = -1.0\n";
        let config: Config = toml::from_str(file).unwrap();
        let faults: Vec<String> =
            config.validate().unwrap_err().0.into_iter().map(|fault| fault.key).collect();
        assert_eq!(
            faults,
            [
                "routing.session_header",
                "routing.load_factor",
                "routing.bytes_per_second",
                "disaggregation.interference",
                "routing.waiting_cost",
                "routing.reading_half_life",
                "routing.prefix",
                "routing.models[0]",
                "routing.locality[0]",
            ]
        );
    }
}

use serde_json::Value;

use super::{CompatFactors, SpeculativeFactors};
use crate::golden::{list, vectors};
use crate::protocol::params::{Generation, TransferMode};

fn factors(generation: Generation, json: &Value) -> CompatFactors {
    let text = |key: &str| json[key].as_str().unwrap().to_owned();
    let number = |key: &str| json[key].as_u64().unwrap();
    let speculative: Option<SpeculativeFactors> =
        serde_json::from_value(json.get("speculative_config").cloned().unwrap_or(Value::Null)).unwrap();
    CompatFactors {
        generation,
        connector_version: number("nixl_connector_version"),
        vllm_version: text("vllm_version"),
        model: text("model"),
        dtype: text("dtype"),
        num_kv_heads: number("num_kv_heads"),
        head_size: number("head_size"),
        num_hidden_layers: number("num_hidden_layers"),
        attn_backend_name: text("attn_backend_name"),
        cache_dtype: text("cache_dtype"),
        is_hma_enabled: json.get("is_hma_enabled").is_some_and(|on| on.as_bool().unwrap()),
        speculative_config: speculative,
        transfer_mode: match json.get("transfer_mode").and_then(Value::as_str) {
            Some("push") => TransferMode::Push,
            _ => TransferMode::Pull,
        },
    }
}

fn check(generation: Generation, file: &str, expected_cases: usize) {
    let vectors = vectors(file);
    let cases = list(&vectors["cases"]);
    assert_eq!(cases.len(), expected_cases);
    for case in cases {
        let factors = factors(generation, &case["factors"]);
        assert_eq!(factors.preimage(), case["preimage"].as_str().unwrap(), "{}", case["name"]);
        assert_eq!(factors.digest(), case["digest"].as_str().unwrap(), "{}", case["name"]);
    }
}

#[test]
fn v2_digests_equal_vllm() {
    check(Generation::V2, "compat_hash_v013.json", 9);
}

#[test]
fn v14_digests_equal_vllm() {
    check(Generation::V14, "compat_hash_v032.json", 29);
}

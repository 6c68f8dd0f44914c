use serde_json::Value;

use super::*;
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

/// The digest of a case of the v14 vectors.
fn digest_named(name: &str) -> String {
    let vectors = vectors("compat_hash_v032.json");
    let case = list(&vectors["cases"]).iter().find(|case| case["name"] == name).unwrap();
    case["digest"].as_str().unwrap().to_owned()
}

fn target() -> CompatFactors {
    CompatFactors {
        generation: Generation::V14,
        connector_version: 14,
        vllm_version: "0.32.0".to_owned(),
        model: "facebook/opt-125m".to_owned(),
        dtype: "torch.float16".to_owned(),
        num_kv_heads: 12,
        head_size: 64,
        num_hidden_layers: 12,
        attn_backend_name: "FLASH_ATTN".to_owned(),
        cache_dtype: "auto".to_owned(),
        is_hma_enabled: true,
        speculative_config: None,
        transfer_mode: TransferMode::Pull,
    }
}

fn speculator() -> Speculator {
    Speculator {
        uses_hidden_states: true,
        method: Some("eagle3".to_owned()),
        model: Some("test/eagle3-drafter".to_owned()),
        auxiliary_layer_ids: Some(vec![2, 16, 29]),
        num_speculative_tokens: 1,
        ..Speculator::default()
    }
}

/// The digest of the target with a speculator.
fn speculating(speculator: &Speculator) -> String {
    let target = target();
    CompatFactors { speculative_config: speculator.factors(&target.cache_dtype), ..target }.digest()
}

/// A changed speculator has the digest of the named case; tells whether that is another one.
fn changes(case: &str, change: impl FnOnce(&mut Speculator)) -> bool {
    let mut changed = speculator();
    change(&mut changed);
    assert_eq!(speculating(&changed), digest_named(case));
    speculating(&changed) != speculating(&speculator())
}

#[test]
fn t55_1_equal_speculators_have_equal_digests() {
    assert!(!changes("spec eagle3", |_| ()));
}

#[test]
fn t55_2_the_number_of_draft_tokens_does_not_count() {
    assert!(!changes("spec n=2", |speculator| speculator.num_speculative_tokens = 2));
}

#[test]
fn t55_3_the_method_counts() {
    assert!(changes("spec method=mtp", |speculator| speculator.method = Some("mtp".to_owned())));
}

#[test]
fn t55_4_the_draft_model_counts() {
    let model = "test/different-drafter";
    assert!(
        changes("spec model=test/different-drafter", |speculator| speculator.model = Some(model.to_owned()))
    );
}

#[test]
fn t55_5_the_revision_counts() {
    let revision = "different-revision";
    assert!(changes("spec revision=different-revision", |speculator| {
        speculator.revision = Some(revision.to_owned());
    }));
}

#[test]
fn t55_6_parallel_drafting_counts() {
    assert!(changes("spec par=True", |speculator| speculator.parallel_drafting = true));
}

#[test]
fn t55_7_the_cache_dtype_of_the_draft_counts() {
    assert!(changes("spec kd=fp8", |speculator| speculator.kv_cache_dtype = Some("fp8".to_owned())));
}

#[test]
fn t55_8_the_attention_backend_of_the_draft_does_not_count() {
    assert!(!changes("spec ab=FLASHINFER", |speculator| {
        speculator.attention_backend = Some("FLASHINFER".to_owned());
    }));
}

#[test]
fn t55_9_the_auxiliary_layers_count() {
    assert!(changes("spec aux=(2, 16, 30)", |speculator| {
        speculator.auxiliary_layer_ids = Some(vec![2, 16, 30]);
    }));
    assert!(changes("spec aux=None", |speculator| speculator.auxiliary_layer_ids = None));
}

#[test]
fn t56_a_missing_speculator_changes_the_digest() {
    assert_ne!(target().digest(), speculating(&speculator()));
    assert_eq!(target().digest(), digest_named("opt-125m pull"));
    // A speculator without hidden states counts as none.
    assert!(changes("spec eagle=False", |speculator| speculator.uses_hidden_states = false));
}

#[test]
fn t57_the_draft_cache_takes_the_dtype_of_the_target() {
    let digest = |draft: Option<&str>| {
        let speculator = Speculator { kv_cache_dtype: draft.map(str::to_owned), ..speculator() };
        let target = CompatFactors { cache_dtype: "fp8".to_owned(), ..target() };
        CompatFactors { speculative_config: speculator.factors(&target.cache_dtype), ..target }.digest()
    };
    assert_eq!(digest(Some("fp8")), digest(None));
    assert_eq!(digest(None), digest_named("fp8 target, inherited draft"));
}

#[test]
fn t58_the_attention_backend_of_the_draft_is_no_factor() {
    let with = Speculator { attention_backend: Some("FLASHINFER".to_owned()), ..speculator() };
    assert_eq!(with.factors("auto"), speculator().factors("auto"));
}

#[test]
fn t59_the_transfer_mode_changes_the_digest() {
    let push = CompatFactors { transfer_mode: TransferMode::Push, ..target() };
    assert_ne!(push.digest(), target().digest());
    assert_eq!(push.digest(), digest_named("opt-125m push"));
    assert_eq!(push.digest(), push.clone().digest());
    assert_eq!(target().digest(), digest_named("opt-125m pull"));
}

/// Whether a change of the target's factors changes the digest, which then is that of the case.
fn target_changes(case: &str, change: impl FnOnce(&mut CompatFactors)) -> bool {
    let mut changed = target();
    change(&mut changed);
    assert_eq!(changed.digest(), digest_named(case));
    changed.digest() != target().digest()
}

#[test]
fn t61_1_hash_of_another_vllm_version() {
    assert!(target_changes("vllm 0.6.1", |factors| factors.vllm_version = "0.6.1".to_owned()));
}

#[test]
fn t61_2_hash_of_another_connector_version() {
    assert!(target_changes("connector 37", |factors| factors.connector_version = 37));
}

#[test]
fn t61_3_hash_of_another_model() {
    // The larger model differs in its sizes as well.
    let mut other = target();
    other.model = "facebook/opt-350m".to_owned();
    assert_ne!(other.digest(), target().digest());
    assert_ne!(digest_named("opt-350m"), target().digest());
}

#[test]
fn t61_4_hash_of_another_dtype() {
    assert!(target_changes("bfloat16", |factors| factors.dtype = "torch.bfloat16".to_owned()));
}

#[test]
fn t61_5_hash_of_another_cache_dtype() {
    assert!(target_changes("fp8 cache", |factors| factors.cache_dtype = "fp8".to_owned()));
}

#[test]
fn t61_6_hash_of_another_number_of_heads() {
    assert!(target_changes("kv heads 8", |factors| factors.num_kv_heads = 8));
}

#[test]
fn t61_7_hash_of_another_number_of_layers() {
    assert!(target_changes("layers 24", |factors| factors.num_hidden_layers = 24));
}

#[test]
fn t61_8_hash_of_another_head_size() {
    assert!(target_changes("head 128", |factors| factors.head_size = 128));
}

/// Block sizes are no factor: sides that differ in them only have one digest.
#[test]
fn t61_9_hash_of_another_block_size() {
    assert!(!target().preimage().contains("block_size"));
}

#[test]
fn t61_10_hash_of_the_same_configuration() {
    assert!(!target_changes("opt-125m pull", |_| ()));
}

#[test]
fn backends_of_packed_layers_are_sorted_and_named_once() {
    let name = packed_backend_name(&["TRITON_ATTN", "FLASHMLA", "TRITON_ATTN"]);
    let push = CompatFactors { attn_backend_name: name, transfer_mode: TransferMode::Push, ..target() };
    assert_eq!(push.digest(), digest_named("packed push, sorted joined backends"));
}

//! Engines in processes of their own whose blocks move over NIXL and UCX, and what is left when one
//! of them is killed. Without NIXL these tests say so and pass, unless KVBATON_REQUIRE_NIXL is set.

mod deaths;
mod fleet;
mod memory;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::process::{counted, get, run};
use crate::support::{CHAT, COMPLETIONS, PROMPT, chat, completion};
pub(crate) use fleet::installation;
use fleet::{Fleet, expected};

/// Bytes of one block in one region of a simulated engine.
const BLOCK_BYTES: [(&str, f64); 2] = [("v14", 1024.0), ("v2", 512.0)];

#[test]
fn a_missing_library_is_said_with_the_line_that_installs_it() {
    for place in [&["--nixl-library", "/nowhere"][..], &["--nixl-library", "/"], &[]] {
        let args = [&["engine", "--role", "both", "--transport", "nixl"], place].concat();
        let out = run(&args, &[]);
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{said}");
        for word in ["NIXL not available", "pip install --no-deps nixl-cu12==1.5.1", "--nixl-library"] {
            assert!(said.contains(word), "{word} is not in {said}");
        }
    }
}

#[tokio::test]
async fn the_text_is_the_single_engines_and_nixl_moved_the_bytes() {
    let Some(nixl) = installation() else { return };
    for (generation, block_bytes) in BLOCK_BYTES {
        let mut fleet = Fleet::start(&nixl, &[]).await;
        let args = ["--generation", generation];
        for role in ["prefill", "decode"] {
            fleet.add(role, &args).await;
        }
        fleet.wait_ready().await;
        let requests: Vec<(&str, Value)> = (0..40)
            .map(|i| {
                let prompt = format!("{i} {PROMPT}");
                let (path, mut body) = match i % 4 {
                    0 => (CHAT, chat(&prompt, 16)),
                    _ => (COMPLETIONS, completion(&prompt, 16)),
                };
                body["stream"] = json!(i % 2 == 0);
                (path, body)
            })
            .collect();
        let answers = join_all(requests.iter().map(|(path, body)| fleet.post(path, body))).await;
        for ((path, body), answer) in requests.iter().zip(answers) {
            assert_eq!(answer.generated(), expected(path, body, generation).await, "{generation}");
        }
        let (prefill, decode) = (&fleet.prefill[0], &fleet.decode[0]);
        assert_eq!(counted(&fleet.base, std::slice::from_ref(&decode.url)).await, (40, 40));
        let moved = decode.metric("vllm:nixl_bytes_transferred_sum").await;
        let descriptors = decode.metric("vllm:nixl_num_descriptors_sum").await;
        // Four whole blocks of every region for each prompt, at the least.
        assert!(descriptors >= 40.0 * 4.0 * (2048.0 / block_bytes), "{descriptors}");
        assert_eq!(moved, descriptors * block_bytes);
        assert_eq!(decode.metric("vllm:nixl_num_failed_transfers_total").await, 0.0);
        for engine in [prefill, decode] {
            let published = get(&fleet.base, &format!("/registry/v1/engines/{}/ranks/0/0", engine.id)).await;
            let is_nixls = published.body.windows(10).any(|bytes| bytes == b"nixlSerDes");
            assert!(is_nixls, "{} does not publish an agent of NIXL", engine.url);
        }
        prefill.wait_no_blocks().await;
        let stats = prefill.stats().await;
        assert_eq!((&stats["kv_expired"], &stats["late_notifications"]), (&json!(0), &json!(0)));
        fleet.finish();
    }
}

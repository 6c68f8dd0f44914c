//! A Rust engine that serves as D: takes the parameters that the prefill example prints, reads the
//! blocks and tells the prefill engine so.
#![allow(clippy::print_stdout, reason = "an example talks to its user")]

use std::{error::Error, time::Duration, time::Instant};

use kv_connector::protocol::{Generation, KvTransferParams};
use kv_connector::regions::Region;
use kv_connector::scheduler::{AllocatedBlocks, FinishStatus, Scheduler, SchedulerConfig};
use kv_connector::side_channel::shake_hands;
use kv_connector::transport::{KvMemory, MemoryType, loopback::LoopbackAgent};
use kv_connector::worker::{Worker, WorkerConfig};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let json = std::env::args().nth(1).ok_or("usage: decode <parameters printed by prefill>")?;
    let params: KvTransferParams = serde_json::from_str(&json)?;
    let memory = KvMemory::allocate(&[8 * 1024]);
    let layer = Region {
        name: "model.layers.0".to_owned(),
        base_address: memory.base_addresses()[0],
        block_len: 1024,
        block_stride: 1024,
        num_blocks: 8,
        memory: MemoryType::Dram,
        group: 0,
    };
    let agent = LoopbackAgent::new("d", memory.clone())?;
    let config = WorkerConfig::new(Generation::V14, "d", "hash of the model".to_owned());
    let mut worker = Worker::new(config, agent, vec![layer])?;
    let mut scheduler = Scheduler::new(SchedulerConfig::new(Generation::V14, "d", "127.0.0.1", 0));
    let started = Instant::now();
    let now = move || started.elapsed();
    // All 32 tokens come from elsewhere: blocks 5 and 6 are allocated and the request is parked.
    scheduler.on_new_request("prompt-1", 32, Some(params));
    let matched = scheduler.matched_tokens("prompt-1", 0);
    let blocks = AllocatedBlocks { unhashed: vec![vec![5, 6]], cached: vec![0] };
    scheduler.update_after_alloc("prompt-1", &blocks, matched.tokens)?;
    let results = loop {
        worker.start_load(&scheduler.build_step(now())?, now())?;
        // A real engine carries handshakes out in the background.
        for job in worker.take_handshake_jobs() {
            let replies = shake_hands(&job, now).await;
            worker.complete_handshake(&job.engine_id, replies, now())?;
        }
        let results = worker.poll(now())?;
        if !results.is_empty() {
            break results;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    scheduler.on_received("prompt-1");
    let bytes = memory.read(memory.base_addresses()[0] + 5 * 1024, 2048)?;
    println!("{results:?}; the first byte is {}", bytes[0]);
    // The request runs and ends; its blocks are the engine's own again.
    scheduler.request_finished("prompt-1", FinishStatus::Stopped, &[vec![5, 6]], 33, now());
    Ok(())
}

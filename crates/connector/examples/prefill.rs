//! An engine that serves as P: a prompt is prefilled and kept until a decode engine has read it.
//! Prints the parameters to give to the decode example.
#![allow(clippy::print_stdout, reason = "an example talks to its user")]

use std::{collections::HashMap, error::Error, time::Duration, time::Instant};

use kv_connector::protocol::{Generation, KvTransferParams};
use kv_connector::regions::Region;
use kv_connector::scheduler::{AllocatedBlocks, FinishStatus, Scheduler, SchedulerConfig};
use kv_connector::side_channel::SideChannelServer;
use kv_connector::transport::{KvMemory, MemoryType, loopback::LoopbackAgent};
use kv_connector::worker::{Worker, WorkerConfig};
use tokio::time::sleep;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
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
    let agent = LoopbackAgent::new("p", memory.clone())?;
    let config = WorkerConfig::new(Generation::V14, "p", "hash of the model".to_owned());
    let mut worker = Worker::new(config, agent, vec![layer])?;

    // Peers ask the side channel for the payload; its clock is the one that stamps leases.
    let started = Instant::now();
    let now = move || started.elapsed();
    let server = SideChannelServer::bind("127.0.0.1:0").await?;
    let config = SchedulerConfig::new(Generation::V14, "p", "127.0.0.1", server.local_addr()?.port());
    let mut scheduler = Scheduler::new(config);
    let payloads = HashMap::from([((0, 0), worker.handshake_payload())]);
    let serving = server.serve(Generation::V14, payloads, now);
    // A request of 32 tokens arrives, is given blocks 1 and 2, and its prompt is computed.
    let request = KvTransferParams { do_remote_decode: true, ..KvTransferParams::default() };
    scheduler.on_new_request("prompt-1", 32, Some(request));
    let blocks = AllocatedBlocks { unhashed: vec![vec![1, 2]], cached: vec![0] };
    scheduler.update_after_alloc("prompt-1", &blocks, 0)?;
    worker.start_load(&scheduler.build_step(now())?, now())?;
    memory.write(memory.base_addresses()[0] + 1024, &[42; 2048])?;
    let capped = FinishStatus::LengthCapped;
    let end = scheduler.request_finished("prompt-1", capped, &[vec![1, 2]], 32, now());
    println!("{}", serde_json::to_string(&end.params)?);
    // The engine keeps stepping; the blocks are freed when they are reported as sent.
    tokio::pin!(serving);
    loop {
        tokio::select! { () = &mut serving => {}, () = sleep(Duration::from_millis(5)) => {} }
        worker.start_load(&scheduler.build_step(now())?, now())?;
        if let [sent, ..] = &worker.poll(now())?.finished_sending[..] {
            println!("free the blocks of {sent}");
            return Ok(());
        }
    }
}

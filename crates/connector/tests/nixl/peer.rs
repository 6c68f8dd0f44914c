//! The child's side: an agent of this crate that does what its parent asks.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kv_connector::transport::nixl::{
    LibrarySource, NixlAgent, NixlConfig, NixlLibrary, NixlMemory, NixlVersion, PeerVersions, Progress,
};
use kv_connector::transport::{
    AgentName, Descriptor, KvMemory, ListId, MemoryType, TransferId, TransferOp, TransferState, Transport,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::children::home;
use crate::engine;

/// Between two looks at something; an engine looks once per step, which is longer.
pub(crate) const PAUSE: Duration = Duration::from_micros(50);

type Answer = Result<Value, Box<dyn std::error::Error>>;

/// Not a test by itself: the entry of the children that the other tests start.
#[test]
fn serves_its_parent() {
    let Some(port) = std::env::var_os(crate::children::STEERED) else { return };
    serve(port.to_str().unwrap().parse().unwrap());
}

pub(crate) fn serve(port: u16) {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_nodelay(true).unwrap();
    let mut lines = BufReader::new(stream);
    let mut peer = None;
    let mut engine = None;
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap() > 0 {
        let ask: Value = serde_json::from_str(&line).unwrap();
        line.clear();
        let answer = match ask["do"].as_str().unwrap() {
            "start" => Peer::start(&ask).map(|(started, answer)| {
                peer = Some(started);
                answer
            }),
            "engine" => engine::Engine::start(&ask).map(|(started, answer)| {
                engine = Some(started);
                answer
            }),
            word => match (&mut peer, &mut engine) {
                (Some(peer), _) => peer.carry_out(word, &ask),
                (None, Some(engine)) => engine.carry_out(word, &ask),
                (None, None) => Err("not started".into()),
            },
        };
        let answer = answer.unwrap_or_else(|error| json!({"error": error.to_string()}));
        lines.get_mut().write_all(format!("{answer}\n").as_bytes()).unwrap();
    }
}

pub(crate) fn library() -> Result<NixlLibrary, Box<dyn std::error::Error>> {
    Ok(NixlLibrary::load(&LibrarySource::Folders(vec![home().join("python")]))?)
}

pub(crate) fn config(ask: &Value) -> NixlConfig {
    let progress = match ask["progress"].as_str() {
        Some("polling") => Progress::Polling(Duration::from_micros(200)),
        _ => Progress::Thread,
    };
    NixlConfig { progress, ..NixlConfig::new(ask["name"].as_str().unwrap()) }
}

pub(crate) fn number(ask: &Value, key: &str) -> u64 {
    ask[key].as_u64().unwrap_or_else(|| panic!("{key} is missing"))
}

pub(crate) fn numbers(ask: &Value, key: &str) -> Vec<u64> {
    ask[key].as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).collect()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// The bytes that both kinds of peer fill their memory with.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(seed).wrapping_add(i >> 8) & 0xff) as u8).collect()
}

pub(crate) struct Peer {
    agent: NixlAgent,
    peers: PeerVersions,
    memory: KvMemory,
    base: u64,
    len: u64,
    lists: HashMap<(String, u64, u64, u64), ListId>,
    posted: Option<(TransferId, Instant)>,
}

impl Peer {
    fn start(ask: &Value) -> Result<(Self, Value), Box<dyn std::error::Error>> {
        let len = number(ask, "len");
        let memory = KvMemory::allocate_addressable(&[len as usize])?;
        let base = memory.base_addresses()[0];
        let config = config(ask);
        let peers = config.peers.clone();
        let reachable = if len == 0 { NixlMemory::none() } else { NixlMemory::of(&memory)? };
        let mut agent = NixlAgent::new(config, &library()?, reachable)?;
        if len > 0 {
            agent.register_memory(MemoryType::Dram, &[Descriptor { address: base, len, device: 0 }])?;
        }
        let answer = json!({"name": agent.name(), "base": base, "blob": hex(&agent.agent_metadata())});
        Ok((Self { agent, peers, memory, base, len, lists: HashMap::new(), posted: None }, answer))
    }

    fn carry_out(&mut self, word: &str, ask: &Value) -> Answer {
        match word {
            "fill" => {
                self.memory.write(self.base, &pattern(number(ask, "seed"), self.len as usize))?;
                Ok(json!({}))
            }
            "digest" => {
                let bytes = self.memory.read(self.base + number(ask, "offset"), number(ask, "len"))?;
                Ok(json!({"sha256": hex(&Sha256::digest(bytes))}))
            }
            "add" => {
                let blob = unhex(&ask["blob"]);
                if let Some(version) = ask["version"].as_str() {
                    self.peers.announce(&blob, NixlVersion::parse(version).ok_or("no version")?)?;
                }
                Ok(json!({"agent": self.agent.add_remote_agent(&blob)?.0}))
            }
            "remove" => {
                let agent = AgentName(ask["agent"].as_str().unwrap().to_owned());
                self.agent.remove_remote_agent(&agent)?;
                self.lists.retain(|(of, ..), _| *of != agent.0);
                Ok(json!({}))
            }
            "knows" => {
                let agent = AgentName(ask["agent"].as_str().unwrap().to_owned());
                Ok(json!({"knows": self.agent.knows_remote_agent(&agent)}))
            }
            "post" => self.post(ask),
            "wait" => self.wait(ask),
            "rounds" => self.rounds(ask),
            "notify" => {
                let agent = AgentName(ask["agent"].as_str().unwrap().to_owned());
                self.agent.send_notification(&agent, &unhex(&ask["message"]))?;
                Ok(json!({}))
            }
            "notify_heard" => {
                let agent = AgentName(ask["agent"].as_str().unwrap().to_owned());
                self.agent.notify_heard(&agent, &unhex(&ask["message"]))?;
                Ok(json!({}))
            }
            "take" => {
                let (started, mut taken) = (Instant::now(), Vec::new());
                while taken.len() < number(ask, "count") as usize
                    && started.elapsed() < Duration::from_secs(number(ask, "seconds"))
                {
                    taken.extend(self.agent.take_notifications());
                    std::thread::sleep(PAUSE);
                }
                let taken: Vec<Value> = taken.iter().map(|(agent, m)| json!([agent.0, hex(m)])).collect();
                Ok(json!({"notifications": taken}))
            }
            "resident" => Ok(json!({"bytes": resident()?})),
            _ => Err(format!("unknown word {word}").into()),
        }
    }

    fn list(&mut self, agent: &str, base: u64, ask: &Value) -> Result<ListId, Box<dyn std::error::Error>> {
        let (block, count) = (number(ask, "block"), number(ask, "count"));
        let key = (agent.to_owned(), base, block, count);
        if let Some(list) = self.lists.get(&key) {
            return Ok(*list);
        }
        let blocks: Vec<Descriptor> =
            (0..count).map(|i| Descriptor { address: base + i * block, len: block, device: 0 }).collect();
        let list = match agent {
            "" => self.agent.prepare_local(MemoryType::Dram, &blocks)?,
            agent => self.agent.prepare_remote(&AgentName(agent.to_owned()), MemoryType::Dram, &blocks)?,
        };
        self.lists.insert(key, list);
        Ok(list)
    }

    fn lists(&mut self, ask: &Value) -> Result<(ListId, ListId), Box<dyn std::error::Error>> {
        let agent = ask["agent"].as_str().unwrap().to_owned();
        Ok((self.list("", self.base, ask)?, self.list(&agent, number(ask, "base"), ask)?))
    }

    fn post(&mut self, ask: &Value) -> Answer {
        let (local, remote) = self.lists(ask)?;
        let (local_ids, remote_ids) = (numbers(ask, "local"), numbers(ask, "remote"));
        let message = unhex(&ask["notification"]);
        let op = if ask["op"] == "READ" { TransferOp::Read } else { TransferOp::Write };
        let notification = (!message.is_empty()).then_some(&message[..]);
        let (local, remote) = ((local, &local_ids[..]), (remote, &remote_ids[..]));
        let transfer = self.agent.make_transfer(op, local, remote, notification)?;
        let started = Instant::now();
        self.posted = Some((transfer, started));
        self.agent.post(transfer)?;
        Ok(json!({}))
    }

    fn wait(&mut self, ask: &Value) -> Answer {
        let (transfer, started) = self.posted.ok_or("nothing posted")?;
        let limit = Duration::from_secs(number(ask, "seconds"));
        let mut state = self.agent.poll(transfer)?;
        while state == TransferState::InProgress && started.elapsed() < limit {
            std::thread::sleep(PAUSE);
            state = self.agent.poll(transfer)?;
        }
        let micros = started.elapsed().as_secs_f64() * 1e6;
        let telemetry = self.agent.telemetry(transfer);
        if state != TransferState::InProgress {
            self.agent.release_transfer(transfer)?;
            self.posted = None;
        }
        Ok(json!({
            "state": match state {
                TransferState::Done => "done",
                TransferState::Failed => "failed",
                TransferState::InProgress => "moving",
            },
            "micros": micros,
            "bytes": telemetry.map(|measured| measured.bytes),
            "descriptors": telemetry.map(|measured| measured.descriptors),
        }))
    }

    /// Times whole reads of `count` blocks, from making the transfer to its end.
    fn rounds(&mut self, ask: &Value) -> Answer {
        let (local, remote) = self.lists(ask)?;
        let ids: Vec<u64> = (0..number(ask, "count")).collect();
        let remote_ids = numbers(ask, "remote");
        let remote_ids = if remote_ids.is_empty() { ids.clone() } else { remote_ids };
        let (mut micros, mut inside) = (Vec::new(), Vec::new());
        for _ in 0..number(ask, "rounds") {
            let started = Instant::now();
            let (local, remote) = ((local, &ids[..]), (remote, &remote_ids[..]));
            let transfer = self.agent.make_transfer(TransferOp::Read, local, remote, Some(b"r:1"))?;
            self.agent.post(transfer)?;
            let state = loop {
                match self.agent.poll(transfer)? {
                    TransferState::InProgress => std::thread::sleep(PAUSE),
                    state => break state,
                }
            };
            micros.push(started.elapsed().as_secs_f64() * 1e6);
            let measured = self.agent.telemetry(transfer).ok_or("no telemetry")?;
            inside.push(measured.transfer.as_secs_f64() * 1e6);
            self.agent.release_transfer(transfer)?;
            if state != TransferState::Done {
                return Err("a read failed".into());
            }
        }
        Ok(json!({"micros": micros, "inside": inside}))
    }
}

/// Resident memory of this process.
pub(crate) fn resident() -> Result<u64, Box<dyn std::error::Error>> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split(' ').nth(1).ok_or("no resident size")?.parse()?;
    Ok(pages * 4096)
}

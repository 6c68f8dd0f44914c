//! A DNS server over UDP and TCP whose zone a test changes; it ends when dropped.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hickory_proto::op::{Message, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, CNAME, SOA, SRV};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

/// A record of a name.
#[derive(Clone, Debug)]
pub(crate) enum Rr {
    Address(&'static str),
    Alias(&'static str),
    Service { priority: u16, port: u16, target: &'static str },
}

/// What is done with questions for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    Answer,
    /// Says that it has failed.
    Fail,
    /// Says so for AAAA records only.
    FailSixes,
    /// Over UDP it says only that the answer is too long.
    Truncate,
    Silent,
}

#[derive(Debug, Default)]
struct Zone {
    names: HashMap<String, Vec<Rr>>,
    moods: HashMap<String, Mood>,
    ttl: u32,
    /// (name, type, over TCP)
    asked: Vec<(String, RecordType, bool)>,
}

pub(crate) struct DnsServer {
    pub(crate) addr: SocketAddr,
    zone: Arc<Mutex<Zone>>,
    _serving: JoinSet<()>,
}

impl DnsServer {
    pub(crate) async fn start() -> Self {
        let (udp, tcp) = loop {
            let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
            if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()).await {
                break (udp, tcp);
            }
        };
        let addr = udp.local_addr().unwrap();
        let zone = Arc::new(Mutex::new(Zone { ttl: 3600, ..Zone::default() }));
        let mut serving = JoinSet::new();
        serving.spawn(over_udp(udp, Arc::clone(&zone)));
        serving.spawn(over_tcp(tcp, Arc::clone(&zone)));
        Self { addr, zone, _serving: serving }
    }

    /// Gives a name these records; a name without any does not exist.
    pub(crate) fn set(&self, name: &str, records: &[Rr]) {
        self.zone.lock().names.insert(name.to_owned(), records.to_vec());
    }

    pub(crate) fn mood(&self, name: &str, mood: Mood) {
        self.zone.lock().moods.insert(name.to_owned(), mood);
    }

    pub(crate) fn ttl(&self, seconds: u32) {
        self.zone.lock().ttl = seconds;
    }

    /// How many questions there were for a name and type, over TCP or UDP.
    pub(crate) fn asked(&self, name: &str, kind: RecordType, over_tcp: bool) -> usize {
        let zone = self.zone.lock();
        zone.asked
            .iter()
            .filter(|(of, as_kind, tcp)| of == name && *as_kind == kind && *tcp == over_tcp)
            .count()
    }
}

async fn over_udp(socket: UdpSocket, zone: Arc<Mutex<Zone>>) {
    let mut question = vec![0; 65_536];
    loop {
        let (length, from) = socket.recv_from(&mut question).await.unwrap();
        if let Some(answer) = answer(&zone, &question[..length], false) {
            socket.send_to(&answer, from).await.unwrap();
        }
    }
}

async fn over_tcp(listener: TcpListener, zone: Arc<Mutex<Zone>>) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        connections.spawn(one_connection(stream, Arc::clone(&zone)));
    }
}

/// Until the other side closes.
async fn one_connection(mut stream: TcpStream, zone: Arc<Mutex<Zone>>) {
    while let Ok(length) = stream.read_u16().await {
        let mut question = vec![0; length.into()];
        stream.read_exact(&mut question).await.unwrap();
        if let Some(answer) = answer(&zone, &question, true) {
            stream.write_u16(answer.len().try_into().unwrap()).await.unwrap();
            stream.write_all(&answer).await.unwrap();
        }
    }
}

fn answer(zone: &Mutex<Zone>, question: &[u8], over_tcp: bool) -> Option<Vec<u8>> {
    let question = Message::from_vec(question).unwrap();
    let query = question.queries[0].clone();
    let name = query.name().to_ascii().trim_end_matches('.').to_ascii_lowercase();
    let kind = query.query_type();
    let mut zone = zone.lock();
    zone.asked.push((name.clone(), kind, over_tcp));
    let mut answer = Message::response(question.metadata.id, OpCode::Query);
    answer.metadata.authoritative = true;
    answer.metadata.recursion_desired = question.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.add_query(query.clone());
    match zone.moods.get(&name).copied().unwrap_or(Mood::Answer) {
        Mood::Silent => return None,
        Mood::Fail => answer.metadata.response_code = ResponseCode::ServFail,
        Mood::FailSixes if kind == RecordType::AAAA => {
            answer.metadata.response_code = ResponseCode::ServFail;
        }
        Mood::Truncate if !over_tcp => answer.metadata.truncation = true,
        Mood::Answer | Mood::FailSixes | Mood::Truncate => fill(&mut answer, &zone, &name, kind),
    }
    Some(answer.to_vec().unwrap())
}

fn fill(answer: &mut Message, zone: &Zone, name: &str, kind: RecordType) {
    let records = zone.names.get(name).map_or(&[][..], Vec::as_slice);
    let absolute = |name: &str| Name::from_ascii(format!("{name}.")).unwrap();
    for record in records {
        let data = match record {
            Rr::Address(address) => match address.parse().unwrap() {
                IpAddr::V4(ip) => RData::A(A(ip)),
                IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
            },
            Rr::Alias(target) => RData::CNAME(CNAME(absolute(target))),
            Rr::Service { priority, port, target } => {
                RData::SRV(SRV::new(*priority, 1, *port, absolute(target)))
            }
        };
        let is_alias = matches!(record, Rr::Alias(_));
        if is_alias || data.record_type() == kind {
            answer.add_answer(Record::from_rdata(absolute(name), zone.ttl, data));
        }
        if let Rr::Alias(target) = record {
            fill(answer, zone, target, kind);
        }
    }
    if answer.answers.is_empty() {
        if records.is_empty() {
            answer.metadata.response_code = ResponseCode::NXDomain;
        }
        let soa = SOA::new(absolute("ns.test"), absolute("admin.test"), 1, 1, 1, 1, zone.ttl);
        answer.add_authority(Record::from_rdata(absolute("test"), zone.ttl, RData::SOA(soa)));
    }
}

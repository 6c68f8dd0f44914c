//! The serving side of a loopback agent: accepts peers and lets them at registered memory.

use std::collections::{HashMap, VecDeque};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use crate::transport::{AgentName, Descriptor, KvMemory, RegistrationId, TransferOp};

use super::wire::{self, Frame, STATUS_OK, STATUS_REFUSED};

/// Notifications kept until they are taken; a peer that sends more is cut off.
const MAX_INBOX: usize = 1 << 16;

/// How long a peer may take to introduce itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// What an agent lets its peers at.
#[derive(Debug)]
pub(super) struct Shared {
    secret: [u8; 16],
    memory: KvMemory,
    registered: RwLock<HashMap<RegistrationId, Vec<Descriptor>>>,
    inbox: Mutex<VecDeque<(AgentName, Vec<u8>)>>,
    closed: AtomicBool,
}

struct Connection {
    socket: TcpStream,
    thread: JoinHandle<()>,
}

/// The listener of one agent.
#[derive(Debug)]
pub(super) struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    acceptor: Option<JoinHandle<()>>,
}

impl Shared {
    pub(super) fn new(secret: [u8; 16], memory: KvMemory) -> Arc<Self> {
        Arc::new(Self {
            secret,
            memory,
            registered: RwLock::default(),
            inbox: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }
}

impl Server {
    pub(super) fn start(name: &str, secret: [u8; 16], memory: KvMemory) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Shared::new(secret, memory);
        let accepting = Arc::clone(&shared);
        let acceptor = thread::Builder::new()
            .name(format!("loopback {name}"))
            .spawn(move || accept_peers(&listener, &accepting))?;
        Ok(Self { shared, address, acceptor: Some(acceptor) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        // The acceptor sits in accept; a connection lets it see the flag.
        let woken = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take()
            && woken.is_ok()
            && acceptor.join().is_err()
        {
            tracing::error!("a loopback listener ended abnormally");
        }
    }
}

impl Shared {
    pub(super) fn memory(&self) -> &KvMemory {
        &self.memory
    }

    pub(super) fn register(&self, registration: RegistrationId, ranges: Vec<Descriptor>) {
        self.registered.write().insert(registration, ranges);
    }

    pub(super) fn deregister(&self, registration: RegistrationId) -> bool {
        self.registered.write().remove(&registration).is_some()
    }

    pub(super) fn take_notifications(&self) -> Vec<(AgentName, Vec<u8>)> {
        self.inbox.lock().drain(..).collect()
    }

    pub(super) fn is_registered(&self, range: &Descriptor) -> bool {
        let Some(end) = range.address.checked_add(range.len) else { return false };
        let registered = self.registered.read();
        registered
            .values()
            .flatten()
            .any(|outer| outer.address <= range.address && end - outer.address <= outer.len)
    }

    pub(super) fn deliver(&self, peer: &AgentName, message: Vec<u8>) -> io::Result<()> {
        let mut inbox = self.inbox.lock();
        if inbox.len() >= MAX_INBOX {
            return Err(wire::refused("too many notifications"));
        }
        inbox.push_back((peer.clone(), message));
        Ok(())
    }
}

fn accept_peers(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut connections: Vec<Connection> = Vec::new();
    while let Ok((socket, _)) = listener.accept() {
        if shared.closed.load(Ordering::SeqCst) {
            break;
        }
        connections.retain(|connection| !connection.thread.is_finished());
        let Ok(served) = socket.try_clone() else { continue };
        let serving = Arc::clone(shared);
        let spawned = thread::Builder::new().name("loopback peer".to_owned()).spawn(move || {
            // A peer that goes away or breaks the rules ends only its own connection.
            if let Err(error) = serve_peer(&served, &serving) {
                tracing::debug!(%error, "loopback connection ended");
            }
            let _already_closed = served.shutdown(Shutdown::Both);
        });
        if let Ok(thread) = spawned {
            connections.push(Connection { socket, thread });
        }
    }
    for connection in connections {
        let _already_closed = connection.socket.shutdown(Shutdown::Both);
        if connection.thread.join().is_err() {
            tracing::error!("a loopback connection ended abnormally");
        }
    }
}

fn serve_peer(socket: &TcpStream, shared: &Shared) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(HELLO_TIMEOUT))?;
    let mut input = BufReader::new(socket);
    let mut output = BufWriter::new(socket);
    let peer = AgentName(wire::read_hello(&mut input, &shared.secret)?);
    socket.set_read_timeout(None)?;
    while let Some(frame) = wire::read_frame(&mut input)? {
        match frame {
            Frame::Notify(message) => {
                shared.deliver(&peer, message)?;
                output.write_all(&[STATUS_OK])?;
                output.flush()?;
            }
            Frame::Transfer { op, descriptors, notification } => {
                if let Some(range) = descriptors.iter().find(|range| !shared.is_registered(range)) {
                    tracing::warn!(address = range.address, len = range.len, "range is not registered");
                    output.write_all(&[STATUS_REFUSED])?;
                    output.flush()?;
                    // The bytes of a refused write would be taken for requests.
                    return Ok(());
                }
                match op {
                    TransferOp::Read => send_ranges(&mut output, &shared.memory, &descriptors)?,
                    TransferOp::Write => {
                        receive_ranges(&mut input, &shared.memory, &descriptors)?;
                        output.write_all(&[STATUS_OK])?;
                    }
                }
                output.flush()?;
                if let Some(message) = notification {
                    shared.deliver(&peer, message)?;
                }
            }
        }
    }
    Ok(())
}

fn send_ranges(output: &mut impl Write, memory: &KvMemory, ranges: &[Descriptor]) -> io::Result<()> {
    output.write_all(&[STATUS_OK])?;
    let mut bytes = Vec::new();
    for range in ranges {
        bytes.clear();
        memory.read_into(range.address, range.len, &mut bytes).map_err(io::Error::other)?;
        output.write_all(&bytes)?;
    }
    Ok(())
}

fn receive_ranges(input: &mut impl Read, memory: &KvMemory, ranges: &[Descriptor]) -> io::Result<()> {
    for range in ranges {
        let len = usize::try_from(range.len).map_err(io::Error::other)?;
        let mut bytes = vec![0; len];
        input.read_exact(&mut bytes)?;
        memory.write(range.address, &bytes).map_err(io::Error::other)?;
    }
    Ok(())
}

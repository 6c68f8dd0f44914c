//! The asking side of a loopback agent: one thread and one connection per peer.
//!
//! Work is queued, so no call waits for a peer; a peer that is gone fails its work at once.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::transport::{Descriptor, KvMemory, Telemetry, TransferOp, TransferState, TransportError};

use super::wire::{self, AgentBlob};

/// Transfers and notifications that may wait for one peer.
const MAX_QUEUED: usize = 4096;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const IO_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Progress {
    state: TransferState,
    posted_at: Option<Instant>,
    post: Duration,
    transfer: Duration,
    fails: bool,
}

/// One transfer, shared by the agent that polls it and the link that carries it out.
#[derive(Debug)]
pub(super) struct TransferCell {
    pub(super) op: TransferOp,
    pub(super) local: Vec<Descriptor>,
    pub(super) remote: Vec<Descriptor>,
    pub(super) notification: Option<Vec<u8>>,
    progress: Mutex<Progress>,
    cancelled: AtomicBool,
}

impl TransferCell {
    pub(super) fn new(
        op: TransferOp,
        local: Vec<Descriptor>,
        remote: Vec<Descriptor>,
        notification: Option<Vec<u8>>,
    ) -> Self {
        let progress = Progress {
            state: TransferState::InProgress,
            posted_at: None,
            post: Duration::ZERO,
            transfer: Duration::ZERO,
            fails: false,
        };
        let (progress, cancelled) = (Mutex::new(progress), AtomicBool::new(false));
        Self { op, local, remote, notification, progress, cancelled }
    }

    pub(super) fn set_posted(&self, started: Instant, fails: bool) {
        let mut progress = self.progress.lock();
        progress.posted_at = Some(started);
        progress.post = started.elapsed();
        progress.fails = fails;
    }

    pub(super) fn is_posted(&self) -> bool {
        self.progress.lock().posted_at.is_some()
    }

    pub(super) fn state(&self) -> TransferState {
        self.progress.lock().state
    }

    pub(super) fn telemetry(&self) -> Option<Telemetry> {
        let progress = self.progress.lock();
        (progress.state == TransferState::Done).then(|| Telemetry {
            transfer: progress.transfer,
            post: progress.post,
            bytes: self.local.iter().map(|range| range.len).sum(),
            descriptors: self.local.len() as u64,
        })
    }

    /// After this the local memory is no longer written.
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
    }

    pub(super) fn end(&self, state: TransferState) {
        let mut progress = self.progress.lock();
        progress.state = state;
        progress.transfer = progress.posted_at.map_or(Duration::ZERO, |posted| posted.elapsed());
    }

    pub(super) fn is_void(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst) || self.progress.lock().fails
    }
}

enum Work {
    Transfer(Arc<TransferCell>),
    Notify(Vec<u8>),
}

/// The way to one peer.
#[derive(Debug)]
pub(super) struct Link {
    peer: String,
    queue: SyncSender<Work>,
    closed: Arc<AtomicBool>,
    socket: Arc<Mutex<Option<TcpStream>>>,
    thread: JoinHandle<()>,
}

impl Link {
    pub(super) fn start(own_name: &str, blob: AgentBlob, memory: KvMemory) -> io::Result<Self> {
        let (queue, work) = sync_channel(MAX_QUEUED);
        let closed = Arc::new(AtomicBool::new(false));
        let socket = Arc::new(Mutex::new(None));
        let peer = blob.name.clone();
        let carrier = Carrier {
            own_name: own_name.to_owned(),
            blob,
            memory,
            closed: Arc::clone(&closed),
            socket: Arc::clone(&socket),
            connection: None,
        };
        let thread =
            thread::Builder::new().name(format!("loopback to {peer}")).spawn(move || carrier.carry(&work))?;
        Ok(Self { peer, queue, closed, socket, thread })
    }

    pub(super) fn submit(&self, cell: Arc<TransferCell>) -> Result<(), TransportError> {
        self.enqueue(Work::Transfer(cell))
    }

    pub(super) fn notify(&self, message: Vec<u8>) -> Result<(), TransportError> {
        self.enqueue(Work::Notify(message))
    }

    /// Fails what is queued and lets the thread end; its handle is returned for joining.
    pub(super) fn close(self) -> Option<JoinHandle<()>> {
        self.closed.store(true, Ordering::SeqCst);
        if let Some(socket) = self.socket.lock().take() {
            let _already_closed = socket.shutdown(Shutdown::Both);
        }
        Some(self.thread)
    }

    fn enqueue(&self, work: Work) -> Result<(), TransportError> {
        self.queue.try_send(work).map_err(|_| TransportError::Busy(self.peer.clone()))
    }
}

struct Connection {
    input: BufReader<TcpStream>,
    output: BufWriter<TcpStream>,
}

struct Carrier {
    own_name: String,
    blob: AgentBlob,
    memory: KvMemory,
    closed: Arc<AtomicBool>,
    socket: Arc<Mutex<Option<TcpStream>>>,
    connection: Option<Connection>,
}

impl Carrier {
    fn carry(mut self, queue: &Receiver<Work>) {
        while let Ok(work) = queue.recv() {
            let outcome = match &work {
                Work::Transfer(cell) if cell.is_void() => Err(wire::refused("the transfer is void")),
                Work::Transfer(cell) => self.transfer(cell),
                Work::Notify(message) => self.notify(message),
            };
            if let Err(error) = &outcome {
                tracing::warn!(peer = self.blob.name, %error, "loopback request failed");
                self.disconnect();
            }
            if let Work::Transfer(cell) = work {
                cell.end(if outcome.is_ok() { TransferState::Done } else { TransferState::Failed });
            }
        }
        self.disconnect();
    }

    fn transfer(&mut self, cell: &TransferCell) -> io::Result<()> {
        let memory = self.memory.clone();
        let connection = self.connection()?;
        let notification = cell.notification.as_deref();
        wire::write_transfer(&mut connection.output, cell.op, &cell.remote, notification)?;
        if cell.op == TransferOp::Write {
            for range in &cell.local {
                let bytes = memory.read(range.address, range.len).map_err(io::Error::other)?;
                connection.output.write_all(&bytes)?;
            }
        }
        connection.output.flush()?;
        wire::read_status(&mut connection.input)?;
        if cell.op == TransferOp::Read {
            let mut bytes = Vec::new();
            for range in &cell.local {
                let len = usize::try_from(range.len).map_err(io::Error::other)?;
                bytes.resize(len, 0);
                connection.input.read_exact(&mut bytes)?;
                if cell.cancelled.load(Ordering::SeqCst) {
                    return Err(wire::refused("the transfer was released"));
                }
                memory.write(range.address, &bytes).map_err(io::Error::other)?;
            }
        }
        Ok(())
    }

    fn notify(&mut self, message: &[u8]) -> io::Result<()> {
        let connection = self.connection()?;
        wire::write_notify(&mut connection.output, message)?;
        connection.output.flush()?;
        wire::read_status(&mut connection.input)
    }

    fn connection(&mut self) -> io::Result<&mut Connection> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.connect()?,
        };
        Ok(self.connection.insert(connection))
    }

    fn connect(&self) -> io::Result<Connection> {
        let socket = TcpStream::connect_timeout(&self.blob.address, CONNECT_TIMEOUT)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(IO_TIMEOUT))?;
        socket.set_write_timeout(Some(IO_TIMEOUT))?;
        *self.socket.lock() = Some(socket.try_clone()?);
        // Checked after the socket is visible: whoever closes the link either finds it or set this.
        if self.closed.load(Ordering::SeqCst) {
            return Err(wire::refused("the link is closed"));
        }
        let mut connection =
            Connection { input: BufReader::new(socket.try_clone()?), output: BufWriter::new(socket) };
        wire::write_hello(&mut connection.output, &self.blob.secret, &self.own_name)?;
        Ok(connection)
    }

    fn disconnect(&mut self) {
        self.connection = None;
        *self.socket.lock() = None;
    }
}

//! A client on a bare socket, for what an HTTP client hides: header lines, chunk timing, hanging up.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::bounded;

/// The bytes of a POST request with a declared length.
pub(crate) fn request(path: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
    let mut text = format!("POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    text.into_bytes()
}

/// How a chunked body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With the last chunk, as it must.
    Clean,
    /// The connection ended before.
    Cut,
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// One connection; dropping it hangs up.
pub(crate) struct Wire {
    stream: Box<dyn Stream>,
    unread: Vec<u8>,
    declared: usize,
}

impl Wire {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        Self::over(TcpStream::connect(addr).await.unwrap())
    }

    /// Connects and sends; dropping it resets the connection.
    pub(crate) async fn open_abrupt(addr: SocketAddr, bytes: &[u8]) -> Self {
        let stream = TcpStream::connect(addr).await.unwrap();
        stream.set_zero_linger().unwrap();
        let mut wire = Self::over(stream);
        wire.send(bytes).await;
        wire
    }

    /// What is spoken over this connection.
    pub(crate) fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        Self { stream: Box::new(stream), unread: Vec::new(), declared: 0 }
    }

    /// Connects and sends.
    pub(crate) async fn open(addr: SocketAddr, bytes: &[u8]) -> Self {
        let mut wire = Self::connect(addr).await;
        wire.send(bytes).await;
        wire
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Says that nothing more will be sent; answers can still be read.
    pub(crate) async fn close_sending(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    async fn more(&mut self) -> bool {
        let read = self.stream.read_buf(&mut self.unread);
        bounded("the router sends", read).await.is_ok_and(|count| count > 0)
    }

    /// Sends, unless the router has hung up.
    pub(crate) async fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).await.is_ok()
    }

    /// Everything until the router closes the connection.
    pub(crate) async fn everything(&mut self) -> String {
        while self.more().await {}
        String::from_utf8_lossy(&std::mem::take(&mut self.unread)).into_owned()
    }

    /// The first head, or nothing if the router hangs up.
    pub(crate) async fn first_head(&mut self) -> String {
        let head = self.until(b"\r\n\r\n").await.unwrap_or_default();
        String::from_utf8_lossy(&head).into_owned()
    }

    /// Everything up to and including the mark.
    async fn until(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.unread.windows(mark.len()).position(|window| window == mark) {
                let rest = self.unread.split_off(at + mark.len());
                return Some(std::mem::replace(&mut self.unread, rest));
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// The status and the head as lower-case text.
    pub(crate) async fn head(&mut self) -> (u16, String) {
        let head = self.until(b"\r\n\r\n").await.expect("an answer's head");
        let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        self.declared = length.map_or(0, |length| length.parse().unwrap());
        (status, head)
    }

    /// Reads past a body whose length the last head declared.
    pub(crate) async fn skip_declared_body(&mut self) {
        self.declared_body().await;
    }

    /// A body whose length the last head declared.
    pub(crate) async fn declared_body(&mut self) -> Vec<u8> {
        while self.unread.len() < self.declared {
            assert!(self.more().await, "the body is cut");
        }
        let rest = self.unread.split_off(self.declared);
        std::mem::replace(&mut self.unread, rest)
    }

    /// The next chunk of a chunked body.
    pub(crate) async fn chunk(&mut self) -> Result<Vec<u8>, End> {
        let size = self.until(b"\r\n").await.ok_or(End::Cut)?;
        let size = usize::from_str_radix(std::str::from_utf8(&size).unwrap().trim(), 16).unwrap();
        while self.unread.len() < size + 2 {
            if !self.more().await {
                return Err(End::Cut);
            }
        }
        let rest = self.unread.split_off(size + 2);
        let mut data = std::mem::replace(&mut self.unread, rest);
        data.truncate(size);
        if size == 0 { Err(End::Clean) } else { Ok(data) }
    }

    /// Chunks until the body so far contains the mark.
    pub(crate) async fn body_until(&mut self, mark: &str) -> String {
        let mut body = Vec::new();
        loop {
            body.extend(self.chunk().await.expect("another chunk"));
            let text = String::from_utf8_lossy(&body);
            if text.contains(mark) {
                return text.into_owned();
            }
        }
    }

    /// All further chunks and how they ended.
    pub(crate) async fn rest(&mut self) -> (String, End) {
        let mut body = Vec::new();
        loop {
            match self.chunk().await {
                Ok(data) => body.extend(data),
                Err(end) => return (String::from_utf8(body).unwrap(), end),
            }
        }
    }
}

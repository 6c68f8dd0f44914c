//! Connections to engines, plain or TLS: how they are made and what they are made of. Speaks no HTTP.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::Uri;
use http::uri::Scheme;
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::{InvalidDnsNameError, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower::{Service, ServiceExt as _};

use crate::dial::Dials;

/// How TLS is spoken to engines; clones share it, and it can be exchanged while connections live.
#[derive(Clone)]
pub struct EngineTls(Arc<ArcSwap<ClientConfig>>);

impl EngineTls {
    /// Takes a configuration whose protocols must be HTTP/1.1 only.
    #[must_use]
    pub fn new(config: Arc<ClientConfig>) -> Self {
        Self(Arc::new(ArcSwap::new(config)))
    }

    /// Exchanges the configuration; connections that are open stay as they are.
    pub fn replace(&self, config: Arc<ClientConfig>) {
        self.0.store(config);
    }
}

impl Default for EngineTls {
    /// Trusts the public authorities and shows no certificate.
    fn default() -> Self {
        let roots = public_authorities();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        // It fails only for versions that the provider does not have; without any, no handshake succeeds.
        let builder = builder.with_protocol_versions(rustls::ALL_VERSIONS);
        let mut config = match builder {
            Ok(builder) => builder.with_root_certificates(roots).with_no_client_auth(),
            Err(_) => ClientConfig::builder().with_root_certificates(roots).with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Self::new(Arc::new(config))
    }
}

/// The authorities that browsers trust.
#[must_use]
pub fn public_authorities() -> RootCertStore {
    RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() }
}

impl std::fmt::Debug for EngineTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EngineTls(..)")
    }
}

impl PartialEq for EngineTls {
    /// Settings with other settings of TLS are made of other files, which are compared instead.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// Why no connection to an engine could be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("no TCP connection")]
    Tcp(#[source] <HttpConnector as Service<Uri>>::Error),
    #[error("the host cannot be in a certificate")]
    Name(#[from] InvalidDnsNameError),
    #[error("no TLS session")]
    Tls(#[source] io::Error),
    #[error("the TLS handshake took too long")]
    Slow,
    #[error("another attempt already waits for the same address")]
    Crowded,
    #[cfg(test)]
    #[error("the modelled engine takes no connection")]
    Modelled,
}

/// Makes connections, and shakes hands where the scheme says so.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    tcp: HttpConnector,
    /// Engines in memory, in the place of the network.
    #[cfg(test)]
    model: Option<crate::model::World>,
    tls: EngineTls,
    dials: Dials,
    handshake: Duration,
}

impl Dialer {
    pub(crate) fn new(tcp: HttpConnector, tls: EngineTls, dials: Dials, handshake: Duration) -> Self {
        Self {
            tcp,
            #[cfg(test)]
            model: None,
            tls,
            dials,
            handshake,
        }
    }

    pub(crate) fn dials(&self) -> &Dials {
        &self.dials
    }

    #[cfg(test)]
    pub(crate) fn over(mut self, model: crate::model::World) -> Self {
        self.model = Some(model);
        self
    }

    /// Connects to where an address leads. Dropping the future gives the attempt up.
    ///
    /// # Errors
    /// Why there is no connection.
    pub(crate) async fn dial(&self, uri: Uri) -> Result<Stream, ConnectError> {
        let secure = uri.scheme() == Some(&Scheme::HTTPS);
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        #[cfg(test)]
        if let Some(model) = self.model.clone() {
            return model.dial(&uri).await.map(Stream::Modelled).ok_or(ConnectError::Modelled);
        }
        let attempt = self.dials.begin(&uri);
        let mut connector = self.tcp.clone();
        let connecting = async { connector.ready().await?.call(uri).await };
        let tcp = match &attempt {
            None => connecting.await,
            Some(attempt) => tokio::select! {
                biased;
                connected = connecting => {
                    attempt.connected();
                    connected
                }
                () = attempt.is_one_too_many() => return Err(ConnectError::Crowded),
            },
        };
        let tcp = tcp.map_err(ConnectError::Tcp)?.into_inner();
        drop(attempt);
        if !secure {
            return Ok(Stream::Plain(tcp));
        }
        let connector = TlsConnector::from(self.tls.0.load_full());
        let shaking = connector.connect(ServerName::try_from(host)?, tcp);
        let shaken = tokio::time::timeout(self.handshake, shaking).await.map_err(|_| ConnectError::Slow)?;
        Ok(Stream::Tls(Box::new(shaken.map_err(ConnectError::Tls)?)))
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    #[cfg(test)]
    Modelled(tokio::io::DuplexStream),
}

impl Stream {
    /// Its other end and this one, if it has such.
    pub(crate) fn ends(&self) -> Option<(SocketAddr, SocketAddr)> {
        let tcp = match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
            #[cfg(test)]
            Self::Modelled(_) => return None,
        };
        tcp.peer_addr().ok().zip(tcp.local_addr().ok())
    }

    /// Whether written bytes may stay in it until they are flushed.
    pub(crate) const fn buffers(&self) -> bool {
        matches!(self, Self::Tls(_))
    }
}

/// The same call on whichever stream it is.
macro_rules! each {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Stream::Plain($inner) => $call,
            Stream::Tls($inner) => $call,
            #[cfg(test)]
            Stream::Modelled($inner) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(&mut *self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(&mut *self, stream => Pin::new(stream).poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(&mut *self, stream => Pin::new(stream).poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(&mut *self, stream => Pin::new(stream).poll_shutdown(context))
    }

    fn is_write_vectored(&self) -> bool {
        each!(self, stream => stream.is_write_vectored())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(&mut *self, stream => Pin::new(stream).poll_write_vectored(context, pieces))
    }
}

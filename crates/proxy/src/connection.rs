//! Connections to engines, plain or TLS, that know how many answers they have carried, so that the
//! end of a kept one can be told from the failure of a new one.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::Uri;
use http::uri::Scheme;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{InvalidDnsNameError, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower::Service;

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

/// The answers that one connection has carried; found in its answers' and errors' extensions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses(Arc<AtomicU32>);

impl Uses {
    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

/// Connects as the inner connector does, and shakes hands where the scheme says so.
#[derive(Clone, Debug)]
pub(crate) struct Counting {
    tcp: HttpConnector,
    /// Engines in memory, in the place of the network.
    #[cfg(test)]
    model: Option<crate::model::World>,
    tls: EngineTls,
    dials: Dials,
    handshake: Duration,
}

impl Counting {
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
}

impl Service<Uri> for Counting {
    type Response = Counted;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Counted, ConnectError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        self.tcp.poll_ready(context).map_err(ConnectError::Tcp)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let secure = uri.scheme() == Some(&Scheme::HTTPS);
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        #[cfg(test)]
        if let Some(model) = self.model.clone() {
            return Box::pin(async move {
                let stream = model.dial(&uri).await.ok_or(ConnectError::Modelled)?;
                Ok(Counted { stream: Stream::Modelled(TokioIo::new(stream)), uses: Uses::default() })
            });
        }
        let (tls, handshake) = (self.tls.clone(), self.handshake);
        let attempt = self.dials.begin(&uri);
        let connecting = self.tcp.call(uri);
        Box::pin(async move {
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
            let tcp = tcp.map_err(ConnectError::Tcp)?;
            drop(attempt);
            let stream = if secure {
                let connector = TlsConnector::from(tls.0.load_full());
                let shaking = connector.connect(ServerName::try_from(host)?, tcp.into_inner());
                let shaken =
                    tokio::time::timeout(handshake, shaking).await.map_err(|_| ConnectError::Slow)?;
                Stream::Tls(Box::new(TokioIo::new(shaken.map_err(ConnectError::Tls)?)))
            } else {
                Stream::Plain(tcp)
            };
            Ok(Counted { stream, uses: Uses::default() })
        })
    }
}

#[derive(Debug)]
enum Stream {
    Plain(TokioIo<TcpStream>),
    Tls(Box<TokioIo<TlsStream<TcpStream>>>),
    #[cfg(test)]
    Modelled(TokioIo<tokio::io::DuplexStream>),
}

/// A connection with its count.
#[derive(Debug)]
pub(crate) struct Counted {
    stream: Stream,
    uses: Uses,
}

impl Connection for Counted {
    fn connected(&self) -> Connected {
        let connected = match &self.stream {
            Stream::Plain(stream) => stream.connected(),
            Stream::Tls(stream) => stream.inner().get_ref().0.connected(),
            #[cfg(test)]
            Stream::Modelled(_) => Connected::new(),
        };
        connected.extra(self.uses.clone())
    }
}

impl Read for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
            #[cfg(test)]
            Stream::Modelled(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl Write for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
            #[cfg(test)]
            Stream::Modelled(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(context),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(context),
            #[cfg(test)]
            Stream::Modelled(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
            #[cfg(test)]
            Stream::Modelled(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
            #[cfg(test)]
            Stream::Modelled(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            #[cfg(test)]
            Stream::Modelled(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
        }
    }
}

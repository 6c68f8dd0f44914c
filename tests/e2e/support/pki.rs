//! Certificates made for one test, a TLS client on a bare socket, and TLS in front of an engine.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{Wire, bounded};

/// Files of one test; they go with it.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("kvbaton-pki-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An authority, with its certificate in a file.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    directory: Directory,
    pub(crate) certificate: PathBuf,
}

/// A certificate and its key in files.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let directory = Directory::new();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = directory.0.join("ca.pem");
        std::fs::write(&certificate, params.self_signed(&key).unwrap().pem()).unwrap();
        Self { issuer: Issuer::new(params, key), directory, certificate }
    }

    /// Makes a certificate for this host and these names, in files of this name.
    pub(crate) fn identity(&self, file: &str, names: &[&str]) -> Identity {
        let dns = names.iter().filter(|name| !name.contains("://")).map(|name| (*name).to_owned());
        let mut params = CertificateParams::new(dns.collect::<Vec<_>>()).unwrap();
        for uri in names.iter().filter(|name| name.contains("://")) {
            params.subject_alt_names.push(SanType::URI((*uri).try_into().unwrap()));
        }
        params.subject_alt_names.push(SanType::IpAddress([127, 0, 0, 1].into()));
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let identity = Identity {
            cert: self.directory.0.join(format!("{file}.pem")),
            key: self.directory.0.join(format!("{file}.key")),
        };
        std::fs::write(&identity.cert, cert.pem()).unwrap();
        std::fs::write(&identity.key, key.serialize_pem()).unwrap();
        identity
    }

    /// A file of this test.
    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.directory.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&self.certificate).unwrap()).unwrap();
        roots
    }
}

impl Identity {
    pub(crate) fn der(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(&self.cert).unwrap()
    }

    fn private(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_file(&self.key).unwrap()
    }

    pub(crate) fn cert(&self) -> Option<PathBuf> {
        Some(self.cert.clone())
    }

    pub(crate) fn key(&self) -> Option<PathBuf> {
        Some(self.key.clone())
    }

    /// Puts another certificate into the same files.
    pub(crate) fn become_like(&self, other: &Identity) {
        let copy = |from: &Path, to: &Path| std::fs::copy(from, to).unwrap();
        copy(&other.cert, &self.cert);
        copy(&other.key, &self.key);
    }
}

/// What the client saw of a TLS session.
pub(crate) struct Shown {
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) protocol: Option<Vec<u8>>,
}

/// One TLS connection.
pub(crate) struct TlsWire {
    stream: TlsStream<TcpStream>,
}

impl TlsWire {
    /// Shakes hands, trusting one authority and showing a certificate if there is one. The other side
    /// may refuse the certificate only after this has returned.
    pub(crate) async fn connect(
        addr: SocketAddr,
        trusted: &Authority,
        shown: Option<&Identity>,
    ) -> std::io::Result<Self> {
        Self::connect_in(addr, trusted, shown, &[b"h2", b"http/1.1"]).await
    }

    /// As [`TlsWire::connect`] in one of these protocols.
    pub(crate) async fn connect_in(
        addr: SocketAddr,
        trusted: &Authority,
        shown: Option<&Identity>,
        protocols: &[&[u8]],
    ) -> std::io::Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(rustls::ALL_VERSIONS)
            .unwrap()
            .with_root_certificates(trusted.roots());
        let mut config = match shown {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                builder.with_client_auth_cert(vec![identity.der()], identity.private()).unwrap()
            }
        };
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        let tcp = TcpStream::connect(addr).await?;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, tcp);
        Ok(Self { stream: bounded("a TLS handshake ends", connecting).await? })
    }

    pub(crate) fn shown(&self) -> Shown {
        let (_, session) = self.stream.get_ref();
        Shown {
            certificate: session.peer_certificates().unwrap()[0].clone(),
            protocol: session.alpn_protocol().map(<[u8]>::to_vec),
        }
    }

    /// The same connection for whoever looks at the bytes.
    pub(crate) fn wire(self) -> Wire {
        Wire::over(self.stream)
    }

    /// Sends a request and reads to the end of the connection: status and everything that came.
    pub(crate) async fn ask(self, head: &str, body: &str) -> std::io::Result<(u16, String)> {
        self.exchange(head, body, false).await
    }

    /// As [`TlsWire::ask`] of a server that ends connections without a word of TLS.
    #[cfg(feature = "etcd")]
    pub(crate) async fn ask_abrupt(self, head: &str, body: &str) -> std::io::Result<(u16, String)> {
        self.exchange(head, body, true).await
    }

    async fn exchange(mut self, head: &str, body: &str, abrupt: bool) -> std::io::Result<(u16, String)> {
        let length = body.len();
        let request = format!(
            "{head} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        match bounded("an answer over TLS ends", self.stream.read_to_end(&mut answer)).await {
            Err(error) if abrupt && error.kind() == std::io::ErrorKind::UnexpectedEof => {}
            ended => drop(ended?),
        }
        let answer = String::from_utf8(answer).unwrap();
        let status = answer.split(' ').nth(1).ok_or(std::io::ErrorKind::UnexpectedEof)?;
        Ok((status.parse().unwrap(), answer))
    }
}

/// TLS in front of engines: what it decrypts goes on to them. Ends when dropped.
pub(crate) struct Front {
    acceptor: TlsAcceptor,
    running: Mutex<JoinSet<()>>,
}

impl Front {
    /// Shows a certificate, and asks for one of this authority if it is given.
    pub(crate) fn new(identity: &Identity, clients: Option<&Authority>) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(rustls::ALL_VERSIONS)
            .unwrap();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let roots = Arc::new(authority.roots());
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
                builder.with_client_cert_verifier(verifier.unwrap())
            }
        };
        let config = builder.with_single_cert(vec![identity.der()], identity.private()).unwrap();
        Self { acceptor: TlsAcceptor::from(Arc::new(config)), running: Mutex::default() }
    }

    /// Puts itself before an engine; the URL at which it is.
    pub(crate) fn before(&self, engine: SocketAddr) -> String {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let (listener, acceptor) = (TcpListener::from_std(listener).unwrap(), self.acceptor.clone());
        self.running.lock().spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((tcp, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                connections.spawn(async move {
                    let Ok(mut client) = acceptor.accept(tcp).await else { return };
                    let Ok(mut engine) = TcpStream::connect(engine).await else { return };
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut engine).await;
                });
            }
        });
        url
    }
}

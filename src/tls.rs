//! TLS of the listeners and towards engines: reads the files, makes the configurations, and exchanges
//! them when the files have changed. Speaks HTTP/1.1 only, like everything behind it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use kvbaton_routes::CertificateNames;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::config::{ClientAuth, EngineTls, Tls};

/// Why a file cannot serve TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsFault {
    /// It cannot be read, or is not PEM.
    #[error("cannot be read as PEM: {0}")]
    Pem(#[from] pem::Error),
    /// It holds no certificate.
    #[error("holds no certificate")]
    Empty,
    /// The library refuses it, or it does not fit to the others.
    #[error("cannot be used: {0}")]
    Refused(#[from] rustls::Error),
    /// The authorities cannot judge client certificates.
    #[error("cannot judge certificates: {0}")]
    Authorities(#[from] VerifierBuilderError),
}

/// Which file, and why.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", .file.display())]
pub struct TlsError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub fault: TlsFault,
}

fn at<F: Into<TlsFault>>(file: &Path) -> impl Fn(F) -> TlsError {
    move |fault| TlsError { file: file.to_owned(), fault: fault.into() }
}

/// One listener's TLS.
pub(crate) struct ServerTls {
    files: Tls,
    config: ArcSwap<ServerConfig>,
}

impl ServerTls {
    /// Reads the files; `None` when the listener is plain.
    ///
    /// # Errors
    /// Which file cannot be used.
    pub(crate) fn load(files: &Tls) -> Result<Option<Arc<Self>>, TlsError> {
        let Some(config) = server_config(files)? else { return Ok(None) };
        Ok(Some(Arc::new(Self { files: files.clone(), config: ArcSwap::from(config) })))
    }

    /// Reads the files again; nothing changes yet.
    ///
    /// # Errors
    /// Which file cannot be used.
    pub(crate) fn read_again(&self) -> Result<Fresh<'_>, TlsError> {
        Ok(Fresh { server: self, config: server_config(&self.files)? })
    }

    /// Shakes hands with a client.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.config.load_full()).accept(stream).await
    }
}

/// A configuration that is read and not yet in use.
pub(crate) struct Fresh<'a> {
    server: &'a ServerTls,
    config: Option<Arc<ServerConfig>>,
}

impl Fresh<'_> {
    /// Uses it for connections from now on.
    pub(crate) fn apply(self) {
        if let Some(config) = self.config {
            self.server.config.store(config);
        }
    }
}

fn server_config(files: &Tls) -> Result<Option<Arc<ServerConfig>>, TlsError> {
    let (Some(cert), Some(key)) = (&files.cert, &files.key) else { return Ok(None) };
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_protocol_versions(rustls::ALL_VERSIONS).map_err(at(cert))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(client_ca) => builder.with_client_cert_verifier(verifier(files, client_ca, provider)?),
    };
    let (chain, key_file) = (certificates(cert)?, key);
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(at(key_file))?;
    let mut config = builder.with_single_cert(chain, key).map_err(at(key_file))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Arc::new(config)))
}

fn verifier(
    files: &Tls,
    client_ca: &Path,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, TlsError> {
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(authorities(client_ca)?), provider);
    let builder = match files.client_auth {
        ClientAuth::Required => builder,
        ClientAuth::Optional => builder.allow_unauthenticated(),
    };
    builder.build().map_err(at(client_ca))
}

/// Reads what is needed to reach engines over TLS; `None` when nothing is set.
///
/// # Errors
/// Which file cannot be used.
pub(crate) fn engine_config(files: &EngineTls) -> Result<Option<Arc<ClientConfig>>, TlsError> {
    if *files == EngineTls::default() {
        return Ok(None);
    }
    let of_files = files.ca.as_deref().or(files.cert.as_deref()).unwrap_or_else(|| Path::new(""));
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_protocol_versions(rustls::ALL_VERSIONS).map_err(at(of_files))?;
    let roots = match &files.ca {
        Some(ca) => authorities(ca)?,
        None => kvbaton_proxy::public_authorities(),
    };
    let builder = builder.with_root_certificates(roots);
    let mut config = match (&files.cert, &files.key) {
        (Some(cert), Some(key_file)) => {
            let key = PrivateKeyDer::from_pem_file(key_file).map_err(at(key_file))?;
            builder.with_client_auth_cert(certificates(cert)?, key).map_err(at(key_file))?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Arc::new(config)))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(file).map_err(at(file))?.collect();
    let chain = chain.map_err(at(file))?;
    if chain.is_empty() { Err(at(file)(TlsFault::Empty)) } else { Ok(chain) }
}

fn authorities(file: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(at(file))?;
    }
    Ok(roots)
}

/// The DNS and URI names of the certificate that a client has shown; it has been verified.
pub(crate) fn names(stream: &TlsStream<TcpStream>) -> Option<CertificateNames> {
    let (_, session) = stream.get_ref();
    let shown = session.peer_certificates()?.first()?;
    let certificate = webpki::EndEntityCert::try_from(shown).ok()?;
    let names = certificate.valid_dns_names().chain(certificate.valid_uri_names()).map(str::to_owned);
    Some(CertificateNames(names.collect()))
}

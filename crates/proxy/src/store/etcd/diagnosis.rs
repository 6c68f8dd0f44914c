//! Why TLS with etcd fails. The client only ever says that nobody answered; here one handshake is made by
//! hand, with the same files, and what it says is told. Decides nothing: the client goes on trying.

use std::io;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::connection::public_authorities;
use crate::store::settings::StoreSettings;

/// How HTTP/2 begins. With TLS 1.3 a server judges the client's certificate after the handshake: only an
/// answer shows that it took it.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// What is wrong with TLS.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum TlsFault {
    /// Nobody trusted has signed etcd's certificate, or it is another host's.
    #[error("the certificate of {endpoint} is not trusted: {reason}")]
    Untrusted { endpoint: String, reason: rustls::Error },
    /// etcd ended the handshake.
    #[error("{endpoint} does not take this router's certificate, or wants one: {reason}")]
    NotLetIn { endpoint: String, reason: rustls::Error },
    /// Whatever is there, it does not speak TLS as it should.
    #[error("{endpoint} does not speak TLS: {reason}")]
    NoTls { endpoint: String, reason: rustls::Error },
    /// A file of the settings is not what it should be.
    #[error("the certificates or the key of the store's settings cannot be used")]
    Files,
}

/// The first fault among the endpoints; `None` where TLS is not what fails.
pub(super) async fn examine(settings: &StoreSettings) -> Option<TlsFault> {
    let endpoints: Vec<&String> =
        settings.endpoints.iter().filter(|endpoint| endpoint.starts_with("https://")).collect();
    if endpoints.is_empty() {
        return None;
    }
    let Some(config) = config(settings).await else { return Some(TlsFault::Files) };
    let connector = TlsConnector::from(Arc::new(config));
    for endpoint in endpoints {
        let handshake = handshake(&connector, endpoint);
        let Ok(Err(error)) = tokio::time::timeout(settings.connect_timeout, handshake).await else {
            continue;
        };
        // Of everything else the client has told already.
        let Some(reason) = error.get_ref().and_then(|held| held.downcast_ref::<rustls::Error>()) else {
            continue;
        };
        let (endpoint, reason) = (endpoint.clone(), reason.clone());
        return Some(match reason {
            rustls::Error::InvalidCertificate(_) => TlsFault::Untrusted { endpoint, reason },
            rustls::Error::AlertReceived(_) => TlsFault::NotLetIn { endpoint, reason },
            _ => TlsFault::NoTls { endpoint, reason },
        });
    }
    None
}

async fn handshake(connector: &TlsConnector, endpoint: &str) -> io::Result<()> {
    let unusable = |_| io::ErrorKind::InvalidInput;
    let url = url::Url::parse(endpoint).map_err(unusable)?;
    let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) else { return Ok(()) };
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let tcp = TcpStream::connect((host.as_str(), port)).await?;
    let name = ServerName::try_from(host).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut stream = connector.connect(name, tcp).await?;
    stream.write_all(PREFACE).await?;
    stream.read_u8().await.map(|_| ())
}

async fn config(settings: &StoreSettings) -> Option<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder.with_protocol_versions(rustls::ALL_VERSIONS).ok()?;
    let roots = match &settings.ca {
        None => public_authorities(),
        Some(ca) => {
            let mut roots = RootCertStore::empty();
            for certificate in chain(&tokio::fs::read(ca).await.ok()?)? {
                roots.add(certificate).ok()?;
            }
            roots
        }
    };
    let builder = builder.with_root_certificates(roots);
    let mut config = match (&settings.cert, &settings.key) {
        (Some(cert), Some(key)) => {
            let key = PrivateKeyDer::from_pem_slice(&tokio::fs::read(key).await.ok()?).ok()?;
            builder.with_client_auth_cert(chain(&tokio::fs::read(cert).await.ok()?)?, key).ok()?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Some(config)
}

fn chain(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    chain.ok().filter(|chain| !chain.is_empty())
}

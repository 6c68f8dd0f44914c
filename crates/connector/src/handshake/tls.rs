//! What a client of the registry trusts and shows when the registry speaks TLS. Reads no files.

use std::fmt;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::RegistryError;

/// TLS towards a registry with an `https://` URL. The default trusts the public authorities and shows
/// no certificate.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct RegistryTls {
    /// The only authorities that are trusted, in PEM; the public ones when absent.
    pub ca: Option<Vec<u8>>,
    /// What is shown to a registry that asks for a certificate.
    pub identity: Option<ClientIdentity>,
}

/// A certificate and its key.
#[derive(Clone, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The certificate chain, in PEM.
    pub cert: Vec<u8>,
    /// Its private key, in PEM.
    pub key: Vec<u8>,
}

impl fmt::Debug for RegistryTls {
    /// Never shows the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ca, identity) = (self.ca.is_some(), self.identity.is_some());
        f.debug_struct("RegistryTls").field("ca", &ca).field("identity", &identity).finish()
    }
}

impl fmt::Debug for ClientIdentity {
    /// Never shows the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientIdentity(..)")
    }
}

impl RegistryTls {
    /// # Errors
    /// Which of the three cannot be used.
    pub(super) fn config(&self) -> Result<ClientConfig, RegistryError> {
        let unusable = |what| RegistryError::Certificates { what };
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder =
            builder.with_protocol_versions(rustls::ALL_VERSIONS).map_err(|_| unusable("TLS version"))?;
        let builder = builder.with_root_certificates(match &self.ca {
            None => RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() },
            Some(pem) => {
                let mut roots = RootCertStore::empty();
                for certificate in chain(pem).ok_or(unusable("authority"))? {
                    roots.add(certificate).map_err(|_| unusable("authority"))?;
                }
                roots
            }
        });
        let Some(ClientIdentity { cert, key }) = &self.identity else {
            return Ok(builder.with_no_client_auth());
        };
        let chain = chain(cert).ok_or(unusable("certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| unusable("key"))?;
        builder.with_client_auth_cert(chain, key).map_err(|_| unusable("key"))
    }
}

/// The certificates; `None` when there are none, or one is broken.
fn chain(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    chain.ok().filter(|chain| !chain.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_used_is_named() {
        let nonsense = || b"nonsense".to_vec();
        let fault = |tls: RegistryTls| tls.config().map(drop).unwrap_err();
        let ca = RegistryTls { ca: Some(nonsense()), identity: None };
        assert_eq!(fault(ca), RegistryError::Certificates { what: "authority" });
        let identity = ClientIdentity { cert: nonsense(), key: nonsense() };
        let identity = RegistryTls { ca: None, identity: Some(identity) };
        assert!(!format!("{identity:?}").contains("nonsense"));
        assert_eq!(fault(identity), RegistryError::Certificates { what: "certificate" });
        assert!(RegistryTls::default().config().is_ok());
    }
}

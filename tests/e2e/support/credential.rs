//! A credential whose token is its name.

use kvbaton::config::{Credential, CredentialRole};
use kvbaton_routes::SecretDigest;

pub(crate) fn credential(name: &str, role: CredentialRole, models: &[&str]) -> Credential {
    Credential {
        name: name.to_owned(),
        role,
        sha256: vec![SecretDigest::of(name).unwrap().to_hex()],
        token_file: None,
        certificates: Vec::new(),
        models: models.iter().map(|model| (*model).to_owned()).collect(),
    }
}

//! The credentials that exist, and finding the one that a request presents.

use std::sync::Arc;

use kvbaton_proxy::ModelScope;
use subtle::Choice;

use super::secret::SecretDigest;

/// What a credential is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Duty {
    /// The operators' endpoints, and the engines'.
    Operator,
    /// The engines' endpoints.
    Engine,
    /// The inference endpoints.
    Client,
}

/// One operator, one group of engines or one client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// Its name, which stays when its secrets change.
    pub name: Arc<str>,
    /// What it is good for.
    pub duty: Duty,
    /// Any of these is presented as a token.
    pub secrets: Vec<SecretDigest>,
    /// Or a verified client certificate with any of these DNS or URI names.
    pub certificates: Vec<String>,
    /// The models that its holder may use or serve.
    pub models: ModelScope,
}

/// The DNS and URI names in a connection's verified client certificate; the server puts them into
/// each request's extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateNames(pub Arc<[String]>);

/// All credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    credentials: Vec<Credential>,
    /// Whether clients need a key even when there is none.
    clients_need_keys: bool,
}

impl Rules {
    /// Rules with these credentials; duties that none of them has are open to clients on this host,
    /// or, for inference, to everybody.
    #[must_use]
    pub fn new(credentials: Vec<Credential>) -> Self {
        Self { credentials, clients_need_keys: false }
    }

    /// Keeps inference closed although no key may be left, as in a file that has become empty.
    #[must_use]
    pub fn with_keys_required(mut self) -> Self {
        self.clients_need_keys = true;
        self
    }

    /// Whether anybody has one of these duties by a credential.
    pub(super) fn has(&self, duties: &[Duty]) -> bool {
        let closed = self.clients_need_keys && duties.contains(&Duty::Client);
        closed || self.of(duties).next().is_some()
    }

    fn of<'a, 'd>(&'a self, duties: &'d [Duty]) -> impl Iterator<Item = &'a Credential> + use<'a, 'd> {
        self.credentials.iter().filter(move |credential| duties.contains(&credential.duty))
    }

    /// The credential that holds a secret. Looks at all of them, whichever it is.
    pub(super) fn by_secret(&self, duties: &[Duty], secret: &[u8]) -> Option<&Credential> {
        let presented = SecretDigest::of_presented(secret);
        let mut found = None;
        for credential in self.of(duties) {
            let any = credential
                .secrets
                .iter()
                .fold(Choice::from(0), |any, secret| any | secret.matches(&presented));
            if bool::from(any) {
                found = Some(credential);
            }
        }
        found
    }

    /// The credential that a certificate stands for.
    pub(super) fn by_certificate(&self, duties: &[Duty], names: &CertificateNames) -> Option<&Credential> {
        self.of(duties).find(|credential| credential.certificates.iter().any(|name| names.0.contains(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credential(name: &str, duty: Duty, secrets: &[&str], certificates: &[&str]) -> Credential {
        Credential {
            name: name.into(),
            duty,
            secrets: secrets.iter().map(|secret| SecretDigest::of(secret).unwrap()).collect(),
            certificates: certificates.iter().map(|name| (*name).to_owned()).collect(),
            models: ModelScope::All,
        }
    }

    #[test]
    fn any_secret_of_a_credential_is_good_for_its_duty_only() {
        let rules = Rules::new(vec![
            credential("ops", Duty::Operator, &["new", "old"], &[]),
            credential("p", Duty::Engine, &["engine"], &["p.example.org", "spiffe://x/p"]),
        ]);
        let name = |duties: &[Duty], secret: &str| {
            rules.by_secret(duties, secret.as_bytes()).map(|found| found.name.to_string())
        };
        assert_eq!(name(&[Duty::Operator], "old").as_deref(), Some("ops"));
        assert_eq!(name(&[Duty::Operator], "new").as_deref(), Some("ops"));
        assert_eq!(name(&[Duty::Operator], "engine"), None);
        assert_eq!(name(&[Duty::Operator, Duty::Engine], "engine").as_deref(), Some("p"));
        assert_eq!(name(&[Duty::Client], "old"), None);
        let shown = |name: &str| CertificateNames(Arc::from([name.to_owned()]));
        assert!(rules.by_certificate(&[Duty::Engine], &shown("spiffe://x/p")).is_some());
        assert!(rules.by_certificate(&[Duty::Operator], &shown("spiffe://x/p")).is_none());
        assert!(rules.by_certificate(&[Duty::Engine], &shown("q.example.org")).is_none());
    }

    #[test]
    fn an_emptied_list_of_keys_opens_nothing() {
        assert!(!Rules::default().has(&[Duty::Client]));
        assert!(Rules::default().with_keys_required().has(&[Duty::Client]));
        assert!(!Rules::default().with_keys_required().has(&[Duty::Operator]));
    }
}

//! The connection to etcd: made with the settings' names and certificates, every exchange with a
//! deadline. Knows nothing of what is kept there.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Error as EtcdError, GetOptions, GetResponse,
    Identity, KeyValue, TlsOptions, Txn, TxnOp, TxnOpResponse, TxnResponse, WatchOptions, WatchStream,
};

use super::diagnosis::{self, TlsFault};
use crate::store::settings::StoreSettings;

/// Keys that are listed at once.
const PAGE: i64 = 256;

/// Longest answer that is read.
const LONGEST_ANSWER: usize = 64 << 20;

/// Why etcd did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkFault {
    /// It said so, or could not be reached.
    #[error(transparent)]
    Etcd(EtcdError),
    /// It refuses the user or the password.
    #[error("etcd does not take the store's user or password")]
    Denied,
    /// It wants a user, and the settings name none.
    #[error("etcd asks for a user and a password")]
    WantsUser,
    /// Its user may not do what a router has to.
    #[error("etcd's user may not read and write below the prefix")]
    Forbidden,
    /// TLS is what fails.
    #[error("TLS with etcd fails: {0}")]
    Tls(#[from] TlsFault),
    /// It did not answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// A certificate or key of the settings cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It does not tell the changes any more.
    #[error("the watch ended: {0}")]
    WatchEnded(String),
    /// The changes that were asked for are no longer kept there.
    #[error("the changes before revision {0} are compacted")]
    Compacted(i64),
    /// An answer lacks what it must hold.
    #[error("an answer without a header")]
    NoHeader,
}

impl From<EtcdError> for LinkFault {
    fn from(error: EtcdError) -> Self {
        let EtcdError::GRpcStatus(status) = &error else { return Self::Etcd(error) };
        // The codes alone do not tell these from other faults; the texts are part of etcd's interface.
        match status.message() {
            text if text.contains("authentication failed") => Self::Denied,
            text if text.contains("user name is empty") => Self::WantsUser,
            text if text.contains("permission denied") => Self::Forbidden,
            _ => Self::Etcd(error),
        }
    }
}

impl LinkFault {
    /// Whether all that is known is that nobody answered.
    fn is_silence(&self) -> bool {
        matches!(self, Self::Timeout(_) | Self::Etcd(_))
    }
}

/// A connection that is made when it is needed, and anew after it was given up.
pub(super) struct Link {
    settings: StoreSettings,
    client: ArcSwapOption<Client>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn new(settings: StoreSettings) -> Self {
        Self { settings, client: ArcSwapOption::empty() }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.settings.timeout
    }

    /// The next exchange makes a new connection, with the certificates as they are then.
    pub(super) fn give_up(&self) {
        self.client.store(None);
    }

    /// What is behind a fault, where that can be found out.
    pub(super) async fn explain(&self, fault: LinkFault) -> LinkFault {
        if !fault.is_silence() {
            return fault;
        }
        diagnosis::examine(&self.settings).await.map_or(fault, LinkFault::from)
    }

    async fn client(&self) -> Result<Client, LinkFault> {
        if let Some(client) = self.client.load_full() {
            return Ok((*client).clone());
        }
        let options = self.options().await?;
        let connecting = Client::connect(&self.settings.endpoints, Some(options));
        let client = within(self.settings.connect_timeout, connecting).await?;
        self.client.store(Some(Arc::new(client.clone())));
        Ok(client)
    }

    async fn options(&self) -> Result<ConnectOptions, LinkFault> {
        let settings = &self.settings;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(settings.connect_timeout)
            .with_keep_alive(settings.timeout * 2, settings.timeout)
            .with_keep_alive_while_idle(true)
            // A member that lost its cluster must not pass for the store.
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if let (Some(user), Some(password)) = (&settings.user, &settings.password) {
            options = options.with_user(user, password);
        }
        if settings.endpoints.iter().any(|endpoint| endpoint.starts_with("https://")) {
            let mut tls = TlsOptions::new();
            if let Some(ca) = &settings.ca {
                tls = tls.ca_certificate(Certificate::from_pem(read(ca).await?));
            }
            if let (Some(cert), Some(key)) = (&settings.cert, &settings.key) {
                tls = tls.identity(Identity::from_pem(read(cert).await?, read(key).await?));
            }
            options = options.with_tls(tls);
        }
        Ok(options)
    }

    /// One transaction.
    pub(super) async fn transact(&self, txn: Txn) -> Result<TxnResponse, LinkFault> {
        let mut client = self.client().await?.kv_client().max_decoding_message_size(LONGEST_ANSWER);
        within(self.timeout(), client.txn(txn)).await
    }

    async fn get(&self, key: &str, options: GetOptions) -> Result<GetResponse, LinkFault> {
        let mut client = self.client().await?.kv_client().max_decoding_message_size(LONGEST_ANSWER);
        within(self.timeout(), client.get(key, Some(options))).await
    }

    /// etcd's newest revision, agreed upon by its members; the key is only one that may be read.
    pub(super) async fn newest_revision(&self, key: &str) -> Result<i64, LinkFault> {
        let answer = self.get(key, GetOptions::new().with_count_only()).await?;
        Ok(answer.header().ok_or(LinkFault::NoHeader)?.revision())
    }

    /// The revision of a key; `None` when it is not there.
    pub(super) async fn revision_of(&self, key: &str) -> Result<Option<i64>, LinkFault> {
        let answer = self.get(key, GetOptions::new().with_keys_only()).await?;
        Ok(answer.kvs().first().map(KeyValue::mod_revision))
    }

    /// The value of a key, which is given this one if it has none, and etcd's newest revision.
    pub(super) async fn value_or(&self, key: &str, value: &str) -> Result<(Vec<u8>, i64), LinkFault> {
        let is_absent = Compare::version(key, CompareOp::Equal, 0);
        let (put, get) = (TxnOp::put(key, value, None), TxnOp::get(key, None));
        let answer = self.transact(Txn::new().when([is_absent]).and_then([put]).or_else([get])).await?;
        let revision = answer.header().ok_or(LinkFault::NoHeader)?.revision();
        let found = answer.op_responses().pop().and_then(|response| match response {
            TxnOpResponse::Get(mut found) => found.take_kvs().pop(),
            _ => None,
        });
        let found = found.map_or_else(|| value.as_bytes().to_vec(), |found| found.into_key_value().1);
        Ok((found, revision))
    }

    /// Everything below a prefix, as it was at one revision.
    pub(super) async fn list(&self, prefix: &str) -> Result<(Vec<KeyValue>, i64), LinkFault> {
        let mut all: Vec<KeyValue> = Vec::new();
        let (mut revision, mut start) = (0, prefix.to_owned());
        loop {
            let options =
                GetOptions::new().with_range(end_of(prefix)).with_limit(PAGE).with_revision(revision);
            let mut answer = self.get(&start, options).await?;
            if revision == 0 {
                revision = answer.header().ok_or(LinkFault::NoHeader)?.revision();
            }
            let more = answer.more();
            all.extend(answer.take_kvs());
            match all.last() {
                Some(last) if more => start = format!("{}\0", String::from_utf8_lossy(last.key())),
                _ => return Ok((all, revision)),
            }
        }
    }

    /// The changes below a prefix from a revision on.
    pub(super) async fn watch(&self, prefix: &str, from: i64) -> Result<WatchStream, LinkFault> {
        let mut client = self.client().await?.watch_client().max_decoding_message_size(LONGEST_ANSWER);
        let options = WatchOptions::new().with_range(end_of(prefix)).with_start_revision(from);
        within(self.timeout(), client.watch(prefix, Some(options))).await
    }

    /// A new lease.
    pub(super) async fn grant(&self, seconds: i64) -> Result<i64, LinkFault> {
        let mut client = self.client().await?.lease_client();
        Ok(within(self.timeout(), client.grant(seconds, None)).await?.id())
    }

    /// Ends a lease; what is attached to it goes.
    pub(super) async fn revoke(&self, lease: i64) -> Result<(), LinkFault> {
        let mut client = self.client().await?.lease_client();
        within(self.timeout(), client.revoke(lease)).await.map(|_| ())
    }

    /// Renews a lease; an error when it has run out, too.
    pub(super) async fn renew(&self, lease: i64) -> Result<(), LinkFault> {
        let mut client = self.client().await?.lease_client();
        within(self.timeout(), client.keep_alive(lease)).await.map(|_| ())
    }
}

/// An exchange with a deadline.
async fn within<T>(
    limit: Duration,
    exchange: impl Future<Output = Result<T, EtcdError>>,
) -> Result<T, LinkFault> {
    match tokio::time::timeout(limit, exchange).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(LinkFault::Timeout(limit)),
    }
}

async fn read(path: &Path) -> Result<Vec<u8>, LinkFault> {
    tokio::fs::read(path).await.map_err(|source| LinkFault::File { path: path.to_owned(), source })
}

/// The first key after all those that begin with `prefix`, which ends with a slash.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

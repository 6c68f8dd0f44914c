//! Addresses from DNS: A and AAAA records of a name, or SRV records and those of their targets.
//! Asks again when the records' time is over, within the settings' bounds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ServerOrderingStrategy,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, RecordType};
use tokio::sync::mpsc;

use super::failure::SourceFailure;
use super::kept::Found;
use super::settings::{DnsKind, DnsSource};
use super::{DiscoverySettings, Report};

/// Most targets of one priority that are looked up.
const MAX_TARGETS: usize = 4096;

/// Targets that are looked up at the same time.
const AT_ONCE: usize = 32;

/// A name and how it is asked for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Question {
    pub(super) source: DnsSource,
    nameservers: Vec<SocketAddr>,
    timeout: Duration,
    soonest: Duration,
}

impl Question {
    pub(super) fn new(source: &DnsSource, settings: &DiscoverySettings) -> Self {
        Self {
            source: source.clone(),
            nameservers: settings.nameservers.clone(),
            timeout: settings.dns_timeout,
            soonest: settings.min_refresh,
        }
    }

    /// Asks for as long as it is polled.
    pub(super) async fn run(self, tell: mpsc::Sender<Report>) {
        let mut failures = 0_u32;
        loop {
            let (report, ttl) = self.look().await;
            failures = if report.failure.is_some() { failures.saturating_add(1) } else { 0 };
            let longest = self.source.refresh.max(self.soonest);
            let pause = match failures {
                0 => ttl.unwrap_or(longest),
                failures => self.soonest.saturating_mul(1 << failures.min(16)),
            };
            if tell.send(report).await.is_err() {
                return;
            }
            tokio::time::sleep(pause.clamp(self.soonest, longest)).await;
        }
    }

    /// Asks once; what was found and for how long it holds.
    pub(super) async fn look(&self) -> (Report, Option<Duration>) {
        let resolver = match self.resolver() {
            Ok(resolver) => resolver,
            Err(error) => {
                let failure = SourceFailure::NoSystemDns { error: Arc::new(error) };
                return (Report::failed(failure), None);
            }
        };
        match self.source.kind {
            DnsKind::A => {
                let answer = addresses(&resolver, &self.source.name).await;
                let port = self.source.port.unwrap_or_default();
                let found = answer.ips.iter().map(|ip| Found::at(SocketAddr::new(*ip, port))).collect();
                answer.into_report(found)
            }
            DnsKind::Srv => srv(&resolver, &self.source.name).await,
        }
    }

    /// Made for each look, so that the system's configuration is that of now; it holds no answers.
    fn resolver(&self) -> Result<TokioResolver, hickory_resolver::net::NetError> {
        let mut builder = if self.nameservers.is_empty() {
            TokioResolver::builder_tokio()?
        } else {
            let server = |address: &SocketAddr| {
                let mut server = NameServerConfig::udp_and_tcp(address.ip());
                let on_port = |mut connection: ConnectionConfig| {
                    connection.port = address.port();
                    connection
                };
                server.connections = vec![on_port(ConnectionConfig::udp()), on_port(ConnectionConfig::tcp())];
                server
            };
            let servers = self.nameservers.iter().map(server).collect();
            let mut builder = TokioResolver::builder_with_config(
                ResolverConfig::from_name_servers(servers),
                TokioRuntimeProvider::default(),
            );
            builder.options_mut().server_ordering_strategy = ServerOrderingStrategy::UserProvidedOrder;
            builder
        };
        let options = builder.options_mut();
        options.timeout = self.timeout;
        // Its own cache would only hide what changes: it asks when the time to live is over anyway.
        options.cache_size = 0;
        options.use_hosts_file = ResolveHosts::Never;
        builder.build()
    }
}

/// What questions of one look came to.
#[derive(Debug, Default)]
struct Answer {
    ips: BTreeSet<IpAddr>,
    ttl: Option<Duration>,
    failure: Option<SourceFailure>,
    /// Questions that were answered, if only with nothing.
    answered: usize,
}

impl Answer {
    fn valid_for(&mut self, ttl: u32) {
        let ttl = Duration::from_secs(ttl.into());
        self.ttl = Some(self.ttl.map_or(ttl, |before| before.min(ttl)));
    }

    fn add(&mut self, other: Self) {
        self.ips.extend(other.ips);
        self.ttl = [self.ttl, other.ttl].into_iter().flatten().min();
        self.failure = self.failure.take().or(other.failure);
        self.answered += other.answered;
    }

    /// A report of what was found; half of one if a question had no answer.
    fn into_report(self, found: Vec<Found>) -> (Report, Option<Duration>) {
        let found = (self.answered > 0).then_some(found);
        (Report { found, failure: self.failure }, self.ttl)
    }
}

/// One question; names without such records are an answer.
async fn records(
    resolver: &TokioResolver,
    name: &str,
    kind: RecordType,
    mut take: impl FnMut(&RData),
) -> Answer {
    let record = match kind {
        RecordType::A => "A",
        RecordType::AAAA => "AAAA",
        _ => "SRV",
    };
    let mut answer = Answer::default();
    match resolver.lookup(name, kind).await {
        Ok(found) => {
            answer.answered = 1;
            // Aliases on the way have a time to live as well.
            for record in found.answers() {
                take(&record.data);
                answer.valid_for(record.ttl);
            }
        }
        Err(error) if error.is_no_records_found() => answer.answered = 1,
        Err(error) => {
            answer.failure =
                Some(SourceFailure::Dns { name: name.to_owned(), record, error: Arc::new(error) });
        }
    }
    answer
}

/// The addresses of a name, of both families.
async fn addresses(resolver: &TokioResolver, name: &str) -> Answer {
    let (mut four, mut six) = (BTreeSet::new(), BTreeSet::new());
    let (mut answer, other) = tokio::join!(
        records(resolver, name, RecordType::A, |data| {
            if let RData::A(ip) = data {
                four.insert(IpAddr::V4(ip.0));
            }
        }),
        records(resolver, name, RecordType::AAAA, |data| {
            if let RData::AAAA(ip) = data {
                six.insert(IpAddr::V6(ip.0));
            }
        })
    );
    answer.add(other);
    answer.ips = four.into_iter().chain(six).collect();
    answer
}

/// The addresses of the targets of the first priority that has any.
async fn srv(resolver: &TokioResolver, name: &str) -> (Report, Option<Duration>) {
    let mut groups: BTreeMap<u16, BTreeSet<(String, u16)>> = BTreeMap::new();
    let mut answer = records(resolver, name, RecordType::SRV, |data| {
        // A target of "." says that there is no such service.
        if let RData::SRV(srv) = data
            && !srv.target.is_root()
            && srv.port != 0
        {
            groups.entry(srv.priority).or_default().insert((srv.target.to_ascii(), srv.port));
        }
    })
    .await;
    let mut found = Vec::new();
    for (_, targets) in groups {
        let looks = targets
            .into_iter()
            .take(MAX_TARGETS)
            .map(|(target, port)| async move { (port, addresses(resolver, &target).await) });
        for (port, of_target) in stream::iter(looks).buffered(AT_ONCE).collect::<Vec<_>>().await {
            found.extend(of_target.ips.iter().map(|ip| Found::at(SocketAddr::new(*ip, port))));
            answer.add(of_target);
        }
        // A group that could not be asked for may well have addresses: the next one must not take its place.
        if !found.is_empty() || answer.failure.is_some() {
            break;
        }
    }
    if answer.failure.is_some() && found.is_empty() {
        answer.answered = 0;
    }
    answer.into_report(found)
}

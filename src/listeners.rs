//! Which listeners there are and which endpoints each one has: one for everything, unless the settings
//! give operators or engines one of their own.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use kvbaton_routes::{Mounts, State, Surface};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use crate::config::{Config, Connections, Tls};
use crate::server::{self, Server};
use crate::tls::ServerTls;
use crate::workers::Workers;
use crate::{SecretsError, StartError};

/// One bound listener.
pub(crate) struct Bound {
    pub(crate) addr: SocketAddr,
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    mounts: Mounts,
}

/// All bound listeners.
pub(crate) struct Listeners {
    pub(crate) public: Bound,
    admin: Option<Bound>,
    registry: Option<Bound>,
    /// For embedded engines, which speak no TLS.
    internal: Option<Bound>,
}

/// Where the endpoints are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addrs {
    pub(crate) public: SocketAddr,
    pub(crate) of_operators: Option<SocketAddr>,
    pub(crate) registry: SocketAddr,
    /// The registry as embedded engines reach it.
    pub(crate) of_engines: SocketAddr,
}

impl Listeners {
    /// Binds what the settings ask for beside the public listener.
    ///
    /// # Errors
    /// An address cannot be bound, or a certificate cannot be used.
    pub(crate) async fn bind(config: &Config, public: TcpListener) -> Result<Self, StartError> {
        let (admin, registry) = (&config.admin, &config.registry);
        let addr =
            public.local_addr().map_err(|source| StartError::Listen { addr: config.listen, source })?;
        let shared = config.shares_listener();
        let public = Bound::new(
            public,
            addr,
            &config.tls,
            Mounts {
                clients: true,
                engines: registry.listen.is_none(),
                operators: config.admin_is_public(addr),
                metrics: admin.listen.is_none(),
            },
        )?;
        let of_operators = Mounts { operators: true, metrics: true, engines: shared, ..Mounts::NONE };
        let of_engines = Mounts { engines: true, ..Mounts::NONE };
        let admin = Bound::bind(admin.listen, &admin.tls, of_operators).await?;
        let registry = Bound::bind(registry.listen.filter(|_| !shared), &registry.tls, of_engines).await?;
        let mut listeners = Self { public, admin, registry, internal: None };
        if config.embeds_fleet() && listeners.of_engines().tls.is_some() {
            let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            listeners.internal = Bound::bind(Some(loopback), &Tls::default(), of_engines).await?;
        }
        Ok(listeners)
    }

    fn all(self) -> impl Iterator<Item = Bound> {
        let Self { public, admin, registry, internal } = self;
        [Some(public), admin, registry, internal].into_iter().flatten()
    }

    fn of_engines(&self) -> &Bound {
        let own = [&self.registry, &self.admin].into_iter().flatten().find(|bound| bound.mounts.engines);
        own.unwrap_or(&self.public)
    }

    /// The certificates in use.
    pub(crate) fn tls(&self) -> Vec<Arc<ServerTls>> {
        let others = [&self.admin, &self.registry].into_iter().flatten();
        std::iter::once(&self.public).chain(others).filter_map(|bound| bound.tls.clone()).collect()
    }

    pub(crate) fn addrs(&self) -> Addrs {
        let public = self.public.addr;
        let on_public = self.public.mounts.operators.then_some(public);
        Addrs {
            public,
            of_operators: self.admin.as_ref().map(|bound| bound.addr).or(on_public),
            registry: self.of_engines().addr,
            of_engines: self.internal.as_ref().unwrap_or_else(|| self.of_engines()).addr,
        }
    }

    /// Serves them all, the public one first; `workers` are for clients only, so that operators are heard
    /// however busy those are.
    pub(crate) fn serve(
        self,
        state: &State,
        (bounds, half_close): (&Connections, bool),
        workers: Option<&Arc<Workers>>,
        tasks: &TaskTracker,
    ) -> Vec<Server> {
        let serve = |bound: Bound| {
            let surface = Surface::new(state.clone(), bound.mounts);
            let workers = workers.filter(|_| bound.mounts.clients).cloned();
            server::serve(bound.listener, surface, bound.tls, (bounds.clone(), half_close), workers, tasks)
        };
        self.all().map(serve).collect()
    }
}

impl Bound {
    fn new(listener: TcpListener, addr: SocketAddr, tls: &Tls, mounts: Mounts) -> Result<Self, StartError> {
        let tls = ServerTls::load(tls).map_err(SecretsError::from)?;
        Ok(Self { addr, listener, tls, mounts })
    }

    async fn bind(addr: Option<SocketAddr>, tls: &Tls, mounts: Mounts) -> Result<Option<Self>, StartError> {
        let Some(addr) = addr else { return Ok(None) };
        let failed = |source| StartError::Listen { addr, source };
        let listener = TcpListener::bind(addr).await.map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        Self::new(listener, addr, tls, mounts).map(Some)
    }
}

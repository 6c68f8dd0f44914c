//! Several routers that share their engines through a real etcd.

mod agreement;
mod outage;
mod routers;

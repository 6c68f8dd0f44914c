//! Several routers that share their engines through a real etcd.

mod agreement;
mod outage;
mod ownership;
mod routers;
mod secured;

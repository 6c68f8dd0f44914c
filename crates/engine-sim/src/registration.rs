//! Makes the engine's handshake payload known to the registry, again and again.
//!
//! The registry may start later than the engine or forget everything; a failure is only logged.

use std::sync::Arc;
use std::time::Duration;

use kv_connector::handshake::RegistryClient;
use tokio_util::sync::CancellationToken;

/// Publishes until told to stop.
pub(crate) async fn keep_published(
    registry: Arc<RegistryClient>,
    engine_id: String,
    payload: Vec<u8>,
    refresh: Duration,
    stop: CancellationToken,
) {
    let mut healthy = true;
    loop {
        let published = tokio::select! {
            () = stop.cancelled() => return,
            published = registry.publish(&engine_id, 0, 0, payload.clone()) => published,
        };
        match published {
            Ok(()) => healthy = true,
            Err(error) if std::mem::replace(&mut healthy, false) => {
                tracing::info!(engine_id, %error, "handshake payload not published, trying again");
            }
            Err(_) => {}
        }
        // Until the registry has it, no pull can succeed, so failures are retried sooner.
        let pause = if healthy { refresh } else { refresh.min(Duration::from_millis(100)) };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

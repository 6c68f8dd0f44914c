//! Bounds on what engines and watchers can make the registry hold.

use std::time::Duration;

/// Bounds of one registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistryLimits {
    /// Largest payload of one rank, in bytes.
    pub payload_bytes: usize,
    /// All payloads together, in bytes.
    pub total_bytes: usize,
    /// Most engines.
    pub engines: usize,
    /// Most ranks of one engine; far above any real pipeline times tensor size.
    pub ranks: usize,
    /// Longest engine id, model, version or compatibility hash, in bytes.
    pub name_bytes: usize,
    /// Longest base URL, in bytes.
    pub url_bytes: usize,
    /// Past changes that a watcher can still resume after.
    pub past_changes: usize,
    /// Most watchers at a time.
    pub watchers: usize,
    /// Most look-ups that wait at a time; one more is answered at once.
    pub waiters: usize,
    /// Longest wait of a look-up: an engine gives up on a handshake after 5 s.
    pub longest_wait: Duration,
    /// Shortest time after which a silent engine leaves.
    pub least_ttl: Duration,
    /// Longest such time.
    pub most_ttl: Duration,
}

impl Default for RegistryLimits {
    fn default() -> Self {
        Self {
            payload_bytes: 4 << 20,
            total_bytes: 1 << 30,
            engines: 4096,
            ranks: 4096,
            name_bytes: 512,
            url_bytes: 2048,
            past_changes: 1024,
            watchers: 256,
            waiters: 1024,
            longest_wait: Duration::from_secs(4),
            least_ttl: Duration::from_millis(100),
            most_ttl: Duration::from_secs(86400),
        }
    }
}

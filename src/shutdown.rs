//! Signals: one asks for the settings to be read again; of the others the first asks the program to
//! leave in order, the second ends it at once.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// To leave; with the signal's name.
    Leave(&'static str),
    /// To read the settings again.
    Reload,
}

/// The process's signals.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Starts listening for SIGTERM, SIGINT and SIGHUP.
    ///
    /// # Errors
    /// The handlers cannot be installed.
    pub fn listen() -> io::Result<Self> {
        let listen = |kind| signal(kind);
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal that asks to leave and returns its name.
    pub async fn leave(&mut self) -> &'static str {
        loop {
            if let Asked::Leave(name) = self.next().await {
                return name;
            }
        }
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.terminate.recv() => Asked::Leave("SIGTERM"),
            _ = self.interrupt.recv() => Asked::Leave("SIGINT"),
            _ = self.hangup.recv() => Asked::Reload,
        }
    }
}

//! What can go wrong between a subcommand and a router, as data, and the program's exit codes.

use std::path::PathBuf;

use http::StatusCode;

use super::client::ClientFault;

/// The exit codes beside 0, and what they say; documentation is made of this.
pub(super) const CODES: [(u8, &str); 6] = [
    (0, "done; of a verdict: it is good"),
    (
        BAD,
        "failed; of `check`: something does not work; of `peers drain`: something was left; of \
         `--from-vllm-router-args`: a flag has no counterpart",
    ),
    (USAGE, "wrong usage or settings"),
    (UNREACHABLE, "the router cannot be reached, or did not answer in time"),
    (DENIED, "the router wants another credential, or none of it was given"),
    (REFUSED, "the router refused, such as for a peer or a request that it does not know"),
];

pub(super) const BAD: u8 = 1;
pub(super) const USAGE: u8 = 2;
pub(super) const UNREACHABLE: u8 = 3;
pub(super) const DENIED: u8 = 4;
pub(super) const REFUSED: u8 = 5;

/// Why a subcommand could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum CliError {
    #[error("{option}: {why}")]
    Usage { option: &'static str, why: &'static str },
    #[error("{}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("{}: holds nothing that can be used as {what}", path.display())]
    Unusable { path: PathBuf, what: &'static str },
    #[error("{}: {what}", path.display())]
    Wrong { path: PathBuf, what: String },
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("{router} cannot be reached")]
    Unreachable { router: String, source: ClientFault },
    #[error("{router} answered {status}: {message} (a token goes into --token-file or OPERATOR_TOKEN)")]
    Denied { router: String, status: StatusCode, message: String },
    #[error("{router} answered {status}: {message}")]
    Refused { router: String, status: StatusCode, message: String },
    #[error("{router} is no kvbaton of this version")]
    Strange { router: String, source: serde_json::Error },
    #[error("{addr} is taken; if a router runs there, ask it: kvbaton check --router http://{addr}")]
    Taken { addr: std::net::SocketAddr },
}

impl CliError {
    pub(super) const fn exit_code(&self) -> u8 {
        match self {
            Self::Usage { .. }
            | Self::File { .. }
            | Self::Unusable { .. }
            | Self::Wrong { .. }
            | Self::Tls(_) => USAGE,
            Self::Unreachable { .. } => UNREACHABLE,
            Self::Denied { .. } => DENIED,
            Self::Refused { .. } | Self::Strange { .. } => REFUSED,
            Self::Taken { .. } => BAD,
        }
    }
}

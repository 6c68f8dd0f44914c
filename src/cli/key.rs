//! `kvbaton key`: makes API keys and tokens, and the digests that the settings keep of them.

use std::io::Read as _;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use kvbaton_routes::SecretDigest;

use super::say;
use crate::secrets::random_secret;

#[derive(Debug, Args)]
pub(super) struct KeyArgs {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Debug, Subcommand)]
enum KeyCommand {
    /// Print a new key, and the entry for the settings, which holds only its digest.
    New {
        /// Name of the key in the settings.
        #[arg(long, default_value = "new")]
        name: String,
        /// A model that the key may use; repeatable [default: all].
        #[arg(long, value_name = "MODEL")]
        model: Vec<String>,
    },
    /// Print the digest of the key or token on standard input.
    Hash,
}

pub(super) fn run(args: &KeyArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        KeyCommand::New { name, model } => say(&entry(name, model)?)?,
        KeyCommand::Hash => {
            let mut secret = String::new();
            std::io::stdin().read_to_string(&mut secret)?;
            say(&format!("sha256:{}\n", SecretDigest::of(secret.trim())?.to_hex()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The key for its holder, then what the settings get.
fn entry(name: &str, models: &[String]) -> anyhow::Result<String> {
    let key = format!("sk-{}", random_secret());
    let mut table = toml::Table::new();
    table.insert("name".into(), name.into());
    table.insert("sha256".into(), vec![format!("sha256:{}", SecretDigest::of(&key)?.to_hex())].into());
    if !models.is_empty() {
        table.insert("models".into(), models.to_vec().into());
    }
    Ok(format!("{key}\n\n[[keys]]\n{}", toml::to_string(&table)?))
}

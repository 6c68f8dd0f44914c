//! `kvbaton peers`: the fleet of a running router, and what operators do to it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use http::Method;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::client::{ANSWER, Connection, Operators, Question, read};
use super::fault::{BAD, CliError};
use super::table::{Output, duration, or_dash, percent, say_json, table};
use super::{key_value, runtime, say};

#[derive(Debug, Args)]
pub(super) struct PeersArgs {
    #[command(subcommand)]
    command: PeersCommand,
    #[command(flatten)]
    router: Connection,
    /// How the answer is told.
    #[arg(long, global = true, value_name = "FORM", default_value = "table")]
    output: Output,
}

#[derive(Debug, Subcommand)]
enum PeersCommand {
    /// List all peers.
    Ls,
    /// Add a peer; it takes requests after its first good probe.
    Add(AddArgs),
    /// Keep new requests from a peer and wait until what it has has ended.
    Drain {
        /// The peer's id, as `peers ls` shows it.
        id: String,
        /// How long to wait at most, in seconds; the peer stays drained.
        #[arg(long, value_name = "S", default_value_t = 300.0)]
        timeout: f64,
    },
    /// Keep a peer from hand-offs.
    Quarantine {
        /// The peer's id.
        id: String,
    },
    /// Let a peer have requests and hand-offs again.
    Resume {
        /// The peer's id.
        id: String,
    },
    /// Take a peer out of the fleet; what runs with it ends by itself.
    Rm {
        /// The peer's id.
        id: String,
    },
}

#[derive(Debug, Args)]
struct AddArgs {
    /// What it does in the fleet.
    role: RoleArg,
    /// Its base URL, http://host:port.
    url: String,
    /// Its id [default: made of role and number].
    #[arg(long)]
    name: Option<String>,
    /// Any other member of an entry in the settings, such as side_channel=10.0.0.5:5600; repeatable.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// A file with the token that the engine asks for.
    #[arg(long, value_name = "FILE")]
    engine_token_file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleArg {
    Prefill,
    Decode,
}

/// A peer as far as subcommands show it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Peer {
    pub(super) id: String,
    pub(super) role: String,
    pub(super) url: String,
    pub(super) state: String,
    pub(super) version: Option<String>,
    pub(super) in_flight: u64,
    pub(super) accepts: bool,
    pub(super) leaving: bool,
    pub(super) drained: bool,
    pub(super) quarantined: bool,
    pub(super) errors: u64,
    pub(super) last_error: Option<LastError>,
    pub(super) load: Option<Load>,
}

/// The last thing that went wrong with a peer.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct LastError {
    pub(super) kind: String,
}

/// What an engine's metrics page says.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Load {
    pub(super) running: u64,
    pub(super) waiting: u64,
    pub(super) kv_usage: Option<f64>,
}

impl Peer {
    /// Whether it gets new requests, or what keeps them from it.
    fn standing(&self) -> &'static str {
        match self {
            Self { leaving: true, .. } => "leaving",
            Self { drained: true, .. } => "drained",
            Self { quarantined: true, .. } => "quarantined",
            Self { accepts: true, .. } => "yes",
            _ => "no",
        }
    }

    fn row(&self) -> [String; 10] {
        let load = self.load.as_ref();
        [
            self.id.clone(),
            self.role.clone(),
            self.state.clone(),
            self.standing().to_owned(),
            or_dash(self.version.as_ref()),
            self.in_flight.to_string(),
            or_dash(load.map(|load| format!("{}+{}", load.running, load.waiting))),
            percent(load.and_then(|load| load.kv_usage)),
            self.errors.to_string(),
            self.url.clone(),
        ]
    }
}

const HEADS: [&str; 10] =
    ["ID", "ROLE", "STATE", "REQUESTS", "VERSION", "IN FLIGHT", "RUN+WAIT", "KV", "ERRORS", "URL"];

pub(super) fn run(args: PeersArgs) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(act(args))
}

async fn act(args: PeersArgs) -> anyhow::Result<ExitCode> {
    let operators = args.router.open()?;
    let done = match args.command {
        PeersCommand::Ls => list(&operators).await?,
        PeersCommand::Add(add) => add_peer(&operators, add).await?,
        PeersCommand::Drain { id, timeout } => drain(&operators, &id, timeout).await?,
        PeersCommand::Quarantine { id } => {
            let question = Question::new(Method::POST, &["admin", "peers", &id, "quarantine"]);
            Done::good(operators.ask(question).await?, format!("{id} is kept from hand-offs\n"))
        }
        PeersCommand::Resume { id } => {
            let question = Question::new(Method::POST, &["admin", "peers", &id, "resume"]);
            Done::good(operators.ask(question).await?, format!("{id} may have requests and hand-offs\n"))
        }
        PeersCommand::Rm { id } => {
            let question = Question::new(Method::DELETE, &["admin", "peers", &id]);
            Done::good(operators.ask(question).await?, format!("{id} is removed\n"))
        }
    };
    match args.output {
        Output::Table => say(&done.text)?,
        Output::Json => say_json(&done.answer)?,
    }
    Ok(if done.good { ExitCode::SUCCESS } else { ExitCode::from(BAD) })
}

/// What the router answered, and the same for people.
struct Done {
    answer: Value,
    text: String,
    good: bool,
}

impl Done {
    fn good(answer: Value, text: String) -> Self {
        Self { answer, text, good: true }
    }
}

async fn list(operators: &Operators) -> Result<Done, CliError> {
    let answer = operators.ask(Question::new(Method::GET, &["admin", "peers"])).await?;
    let peers: Vec<Peer> = operators.read_as(&answer["peers"])?;
    let rows: Vec<[String; 10]> = peers.iter().map(Peer::row).collect();
    Ok(Done::good(answer, table(HEADS, &rows)))
}

async fn add_peer(operators: &Operators, add: AddArgs) -> Result<Done, CliError> {
    let mut spec = Map::new();
    let role = match add.role {
        RoleArg::Prefill => "prefill",
        RoleArg::Decode => "decode",
    };
    spec.insert("role".into(), json!(role));
    spec.insert("url".into(), json!(add.url));
    spec.extend(add.name.map(|name| ("name".to_owned(), json!(name))));
    for (key, text) in add.set {
        if key == "token" {
            let why = "a token does not belong on a command line: --engine-token-file";
            return Err(CliError::Usage { option: "--set", why });
        }
        let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
        if spec.insert(key, value).is_some() {
            return Err(CliError::Usage { option: "--set", why: "a member is set twice" });
        }
    }
    if let Some(path) = add.engine_token_file {
        let token = String::from_utf8(read(&path)?).ok();
        let token = token.as_deref().map(str::trim).filter(|token| !token.is_empty());
        let token = token.ok_or(CliError::Unusable { path: path.clone(), what: "a token" })?;
        spec.insert("token".into(), json!(token));
        spec.entry("authorization").or_insert(json!("replace"));
    }
    let question = Question::new(Method::POST, &["admin", "peers"]);
    let answer = operators.ask(Question { body: Some(Value::Object(spec)), ..question }).await?;
    let peer: Peer = operators.read_as(&answer)?;
    let text = format!("{} is added; it takes requests after its first good probe\n", peer.id);
    Ok(Done::good(answer, text))
}

#[derive(Deserialize)]
struct Drained {
    ended: String,
    in_flight: u64,
    handoffs: u64,
    seconds: f64,
}

async fn drain(operators: &Operators, id: &str, timeout: f64) -> Result<Done, CliError> {
    let question = Question::new(Method::POST, &["admin", "peers", id, "drain"]);
    // A limit that makes no sense is refused by the router, in its words.
    let within = Duration::try_from_secs_f64(timeout).unwrap_or_default() + ANSWER;
    let question = Question { query: Some(("timeout", timeout.to_string())), within, ..question };
    let answer = operators.ask(question).await?;
    let drained: Drained = operators.read_as(&answer)?;
    let (good, how) = match drained.ended.as_str() {
        "drained" => (true, "is drained"),
        "timeout" => (false, "is not drained yet and gets no new requests"),
        "resumed" => (false, "was let have requests again"),
        _ => (false, "was not drained: the router leaves"),
    };
    let text = format!(
        "{id} {how}: {} exchanges and {} hand-offs left after {}\n",
        drained.in_flight,
        drained.handoffs,
        duration(drained.seconds)
    );
    Ok(Done { answer, text, good })
}

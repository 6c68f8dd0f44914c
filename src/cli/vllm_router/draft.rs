//! Settings in the making, and their text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use toml::Value;

/// What a command line comes to.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) metrics_host: String,
    pub(super) metrics_port: u16,
    pub(super) prefill: Vec<String>,
    pub(super) decode: Vec<String>,
    /// Engines that do both stages.
    pub(super) workers: Vec<String>,
    pub(super) is_disaggregated: bool,
    /// Ranks behind each URL.
    pub(super) ranks: u32,
    /// What engines want to see.
    pub(super) token: Option<String>,
    /// How many requests may come at once.
    pub(super) burst: Option<u32>,
    /// Requests a second.
    pub(super) rate: Option<u32>,
    /// Settings by their table and key, each with the flag that it comes from.
    set: BTreeMap<&'static str, Vec<(&'static str, Value, String)>>,
    /// Flags that need no setting, and why.
    pub(super) needless: Vec<(String, String)>,
    /// Flags without a counterpart, and what to do.
    pub(super) missing: Vec<(String, String)>,
}

impl Default for Draft {
    /// As vllm-router is without any flag.
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 30000,
            metrics_host: "127.0.0.1".to_owned(),
            metrics_port: 29000,
            prefill: Vec::new(),
            decode: Vec::new(),
            workers: Vec::new(),
            is_disaggregated: false,
            ranks: 1,
            token: None,
            burst: None,
            rate: None,
            set: BTreeMap::new(),
            needless: Vec::new(),
            missing: Vec::new(),
        }
    }
}

/// Longest line of a comment.
const WIDTH: usize = 100;

/// Capacity of vllm-router's bucket without a flag.
const BURST: u32 = 32768;

impl Draft {
    /// Sets a setting; the last one wins, as with vllm-router's flags.
    pub(super) fn set(
        &mut self,
        table: &'static str,
        key: &'static str,
        value: impl Into<Value>,
        flag: &'static str,
    ) {
        let settings = self.set.entry(table).or_default();
        settings.retain(|(known, ..)| *known != key);
        settings.push((key, value.into(), format!("--{flag}")));
    }

    /// Sets a setting for which no other flag has spoken.
    pub(super) fn set_unless_set(
        &mut self,
        table: &'static str,
        key: &'static str,
        value: impl Into<Value>,
        flag: &'static str,
    ) {
        let origin = format!("--{flag}");
        let known =
            self.set.get(table).and_then(|settings| settings.iter().find(|(known, ..)| *known == key));
        if known.is_none_or(|(.., from)| *from == origin) {
            self.set(table, key, value, flag);
        }
    }

    /// Draws conclusions from flags that belong together.
    pub(super) fn finish(&mut self) {
        let workers = std::mem::take(&mut self.workers);
        if self.is_disaggregated {
            if !workers.is_empty() {
                let why = "vllm-router does not use them with --vllm-pd-disaggregation either";
                self.needless.push(("--worker-urls".to_owned(), why.to_owned()));
            }
        } else {
            if !self.prefill.is_empty() || !self.decode.is_empty() {
                let why =
                    "taken as they stand; without --vllm-pd-disaggregation vllm-router does not use them";
                self.needless.push(("--prefill, --decode".to_owned(), why.to_owned()));
            }
            if !workers.is_empty() {
                self.decode.extend(workers);
                if self.prefill.is_empty() {
                    self.set("hand_off", "on_no_prefill", "decode_only", "worker-urls");
                    let what = "kvbaton is for engines that split the stages: such engines answer, but /readyz stays \
                                503 and each request is warned of, as long as there is no prefill engine";
                    self.missing.push(("--worker-urls".to_owned(), what.to_owned()));
                }
            }
        }
        if self.burst.is_some() || self.rate.is_some() {
            let burst = self.burst.unwrap_or(BURST);
            let flag =
                if self.rate.is_some() { "rate-limit-tokens-per-second" } else { "max-concurrent-requests" };
            self.set("admission.decode", "rate", f64::from(self.rate.unwrap_or(burst)), flag);
            self.set("admission.decode", "burst", i64::from(burst), "max-concurrent-requests");
        }
        if self.prefill.is_empty() && self.decode.is_empty() {
            self.set("fleet", "embedded", "never", "prefill");
        }
    }

    fn listener(&mut self) -> (SocketAddr, SocketAddr) {
        let mut of = |host: &str, port: u16, flag: &str| {
            let ip = match host.trim_start_matches('[').trim_end_matches(']') {
                "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
                host => host.parse().ok(),
            };
            if ip.is_none() {
                let why = "listeners have IP addresses here, not names: put in the address of that name";
                self.missing.push((format!("--{flag} {host}"), why.to_owned()));
            }
            SocketAddr::new(ip.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), port)
        };
        let (host, metrics_host) = (self.host.clone(), self.metrics_host.clone());
        (of(&host, self.port, "host"), of(&metrics_host, self.metrics_port, "prometheus-host"))
    }

    /// The settings as a file, with what is to be known of them as comments.
    pub(super) fn text(&mut self) -> String {
        let (listen, metrics) = self.listener();
        let mut text = String::from(
            "# Made of a command line of vllm-router. What it left at vllm-router's defaults is left at\n\
             # kvbaton's, but for the addresses. docs/migration.md says what else is different.\n",
        );
        notes(&mut text, "Missing: kvbaton does nothing of this.", &self.missing);
        notes(&mut text, "Needless: no setting is needed for this.", &self.needless);
        let _ = write!(text, "\nlisten = \"{listen}\"  # --host, --port\n");
        for (table, settings) in &self.set {
            let _ = write!(text, "\n[{table}]\n");
            for (key, value, flag) in settings {
                let _ = writeln!(text, "{key} = {value}  # {flag}");
            }
        }
        let _ = write!(
            text,
            "\n[admin]\n# /metrics, and with it /admin and /dashboard, which are for programs on this host only\n\
             # as long as there is no token. --prometheus-host, --prometheus-port\nlisten = \"{metrics}\"\n"
        );
        for (list, urls) in [("prefill", &self.prefill), ("decode", &self.decode)] {
            for url in urls {
                let _ = write!(text, "\n[[{list}]]\nurl = {}\n", Value::from(url.as_str()));
                if self.ranks > 1 {
                    let _ = writeln!(text, "dp_size = {}  # --intra-node-data-parallel-size", self.ranks);
                    text.push_str("dp_split = true\n");
                }
                if let Some(token) = &self.token {
                    let _ =
                        write!(text, "authorization = \"replace\"\ntoken = {}", Value::from(token.as_str()));
                    text.push_str("  # --api-key\n");
                }
            }
        }
        text
    }
}

fn notes(text: &mut String, head: &str, notes: &[(String, String)]) {
    if notes.is_empty() {
        return;
    }
    let _ = write!(text, "#\n# {head}\n");
    for (flag, why) in notes {
        let mut line = format!("#   {flag}:");
        for word in why.split_whitespace() {
            if line.len() + 1 + word.len() > WIDTH {
                text.push_str(&line);
                line = "\n#    ".to_owned();
            }
            line.push(' ');
            line.push_str(word);
        }
        text.push_str(&line);
        text.push('\n');
    }
}

//! `kvbaton top`: the fleet of a running router as it changes, in a terminal; or once, as text.

mod fleet;
mod view;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use crossterm::event::{Event, EventStream, KeyCode, KeyEventKind, KeyModifiers};
use futures_util::StreamExt as _;
use ratatui::DefaultTerminal;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::client::{Connection, Events, Operators};
use super::fault::CliError;
use super::table::{Output, say_json};
use super::{runtime, say};
use fleet::Fleet;

/// How often times that run are drawn anew.
const TICK: Duration = Duration::from_millis(500);

/// Pause before a lost connection is tried again.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(super) struct TopArgs {
    #[command(flatten)]
    router: Connection,
    /// Print the fleet as it is and end, as happens wherever standard output is no terminal.
    #[arg(long)]
    once: bool,
    /// How it is told; json goes with --once.
    #[arg(long, value_name = "FORM", default_value = "table")]
    output: Output,
}

pub(super) fn run(args: TopArgs) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let operators = args.router.open()?;
        let mut events = operators.events().await?;
        let first = events.next().await?;
        let once = args.once || !std::io::stdout().is_terminal();
        match args.output {
            Output::Json if once => say_json(&first)?,
            Output::Json => {
                return Err(CliError::Usage { option: "--output json", why: "goes with --once" }.into());
            }
            Output::Table => {
                let mut fleet = Fleet::default();
                fleet.apply(&operators, &first)?;
                if once {
                    say(&view::text(&fleet))?;
                } else {
                    live(operators, events, fleet).await?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// What the reader tells.
enum News {
    Frame(Value),
    Lost(CliError),
}

async fn live(operators: Operators, events: Events, fleet: Fleet) -> anyhow::Result<()> {
    let operators = std::sync::Arc::new(operators);
    let (sender, news) = mpsc::channel(16);
    // Dropped with what runs in it.
    let mut tasks = JoinSet::new();
    tasks.spawn(follow(std::sync::Arc::clone(&operators), events, sender));
    let mut terminal = ratatui::try_init()?;
    let watched = watch(&mut terminal, &operators, news, fleet).await;
    ratatui::restore();
    watched
}

/// Reads the stream, and opens it again when it breaks; ends when nobody listens.
async fn follow(operators: std::sync::Arc<Operators>, events: Events, sender: mpsc::Sender<News>) {
    let mut events = Some(events);
    loop {
        let told = match &mut events {
            Some(open) => open.next().await.map(News::Frame),
            None => match operators.events().await {
                Ok(open) => {
                    events = Some(open);
                    continue;
                }
                Err(error) => Err(error),
            },
        };
        let lost = told.is_err();
        if sender.send(told.unwrap_or_else(News::Lost)).await.is_err() {
            return;
        }
        if lost {
            events = None;
            tokio::time::sleep(AGAIN).await;
        }
    }
}

async fn watch(
    terminal: &mut DefaultTerminal,
    operators: &Operators,
    mut news: mpsc::Receiver<News>,
    mut fleet: Fleet,
) -> anyhow::Result<()> {
    let (mut keys, mut tick) = (EventStream::new(), tokio::time::interval(TICK));
    let (mut lost, mut scroll) = (None, 0);
    loop {
        terminal.draw(|frame| view::draw(frame, &fleet, lost.as_deref(), scroll))?;
        tokio::select! {
            key = keys.next() => match key.transpose()? {
                None => return Ok(()),
                Some(event) => match pressed(&event) {
                    Pressed::Leave => return Ok(()),
                    Pressed::Down => scroll = (scroll + 1).min(fleet.peers.len().saturating_sub(1)),
                    Pressed::Up => scroll = scroll.saturating_sub(1),
                    Pressed::Nothing => {}
                },
            },
            told = news.recv() => match told {
                None => return Ok(()),
                Some(News::Frame(frame)) => {
                    lost = None;
                    fleet.apply(operators, &frame)?;
                }
                Some(News::Lost(error)) => lost = Some(error.to_string()),
            },
            _ = tick.tick() => {}
        }
    }
}

enum Pressed {
    Leave,
    Up,
    Down,
    Nothing,
}

fn pressed(event: &Event) -> Pressed {
    let Event::Key(key) = event else { return Pressed::Nothing };
    if key.kind == KeyEventKind::Release {
        return Pressed::Nothing;
    }
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => Pressed::Leave,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Pressed::Leave,
        KeyCode::Down | KeyCode::Char('j') => Pressed::Down,
        KeyCode::Up | KeyCode::Char('k') => Pressed::Up,
        _ => Pressed::Nothing,
    }
}

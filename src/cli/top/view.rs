//! The fleet in rows: as text, and drawn. Both show the same.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Paragraph, Row, Table};

use super::fleet::{Fleet, HandOff, Pair, Peer, Request};
use crate::cli::table::{duration, or_dash, percent, table};

/// How many hand-offs and requests fit beside the peers.
const HAND_OFFS: usize = 8;
const REQUESTS: usize = 10;

const PEERS: [&str; 9] =
    ["PEER", "ROLE", "REQUESTS", "VERSION", "IN FLIGHT", "RUN+WAIT", "KV", "ERRORS", "BREAKER"];
const PAIRS: [&str; 5] = ["PREFILL", "DECODE", "HAND-OFFS/S", "MEAN", "LONGEST"];
const LIVE: [&str; 6] = ["HAND-OFF OF", "STATE", "FROM", "TO", "BLOCKS", "LEASE LEFT"];
const LAST: [&str; 6] = ["REQUEST", "ENDPOINT", "OUTCOME", "PEERS", "FIRST BYTE", "TOOK"];

fn headline(fleet: &Fleet) -> String {
    let Some(router) = &fleet.router else { return "kvbaton".to_owned() };
    let state = match (router.draining, router.ready) {
        (true, _) => "leaving",
        (false, true) => "ready",
        (false, false) => "not ready",
    };
    let by_role = |role: &str| {
        let all: Vec<&Peer> = fleet.peers.values().filter(|peer| peer.role == role).collect();
        let open = all.iter().filter(|peer| peer.condition == "open").count();
        format!("{open} of {} {role} peers", all.len())
    };
    format!(
        "kvbaton {}: {state}, {}, {}, {} requests, {} hand-offs",
        router.version,
        by_role("prefill"),
        by_role("decode"),
        router.running,
        fleet.hand_offs.live
    )
}

fn peer(peer: &Peer) -> [String; 9] {
    let load = peer.load.as_ref();
    let last = peer.last_error.as_ref().map(|last| format!(" ({})", last.kind)).unwrap_or_default();
    [
        peer.id.clone(),
        peer.role.clone(),
        peer.condition.clone(),
        or_dash(peer.version.as_ref()),
        peer.in_flight.to_string(),
        or_dash(load.map(|load| format!("{}+{}", load.running, load.waiting))),
        percent(load.and_then(|load| load.kv_usage)),
        format!("{}{last}", peer.errors),
        peer.breaker.clone(),
    ]
}

fn pair(pair: &Pair) -> [String; 5] {
    let millis = |ms: Option<f64>| or_dash(ms.map(|ms| duration(ms / 1000.0)));
    [
        pair.prefill.clone(),
        pair.decode.clone(),
        format!("{:.1}", pair.rate),
        millis(pair.mean_ms),
        millis(pair.longest_ms),
    ]
}

fn hand_off(hand_off: &HandOff, now_ms: u64) -> [String; 6] {
    [
        hand_off.request_id.clone(),
        hand_off.state.clone(),
        hand_off.prefill.clone(),
        or_dash(hand_off.decode.as_ref()),
        hand_off.blocks.to_string(),
        format!("{:.0} s", hand_off.ends_ms.saturating_sub(now_ms) as f64 / 1000.0),
    ]
}

fn request(request: &Request, now_ms: u64) -> [String; 6] {
    let took = request.ended_ms.unwrap_or(now_ms).saturating_sub(request.began_ms);
    let peers = [request.prefill.as_deref(), request.decode.as_deref()];
    [
        request.request_id.clone(),
        request.endpoint.clone(),
        request.outcome.clone().unwrap_or_else(|| "running".to_owned()),
        peers.into_iter().flatten().collect::<Vec<_>>().join(" to "),
        or_dash(request.first_byte_seconds.map(duration)),
        duration(took as f64 / 1000.0),
    ]
}

fn peers(fleet: &Fleet) -> Vec<[String; 9]> {
    fleet.peers_in_order().into_iter().map(peer).collect()
}

fn pairs(fleet: &Fleet) -> Vec<[String; 5]> {
    fleet.pairs.iter().map(pair).collect()
}

fn hand_offs(fleet: &Fleet) -> Vec<[String; 6]> {
    let now = fleet.now_ms();
    fleet.hand_offs.shown.iter().take(HAND_OFFS).map(|shown| hand_off(shown, now)).collect()
}

fn requests(fleet: &Fleet) -> Vec<[String; 6]> {
    let now = fleet.now_ms();
    fleet.newest().take(REQUESTS).map(|shown| request(shown, now)).collect()
}

/// Everything as text.
pub(super) fn text(fleet: &Fleet) -> String {
    let parts = [
        format!("{}\n", headline(fleet)),
        table(PEERS, &peers(fleet)),
        table(PAIRS, &pairs(fleet)),
        table(LIVE, &hand_offs(fleet)),
        table(LAST, &requests(fleet)),
    ];
    parts.join("\n")
}

/// Everything on a screen; `scroll` peers are above it.
pub(super) fn draw(frame: &mut Frame<'_>, fleet: &Fleet, lost: Option<&str>, scroll: usize) {
    let peers = peers(fleet);
    let height = |rows: usize| Constraint::Max(u16::try_from(rows + 2).unwrap_or(u16::MAX));
    let rows = Layout::vertical([
        Constraint::Length(1),
        Constraint::Max(u16::try_from(peers.len() + 2).unwrap_or(u16::MAX)),
        height(fleet.pairs.len().clamp(1, HAND_OFFS)),
        height(HAND_OFFS.min(fleet.hand_offs.shown.len().max(1))),
        Constraint::Fill(1),
        Constraint::Length(1),
    ]);
    let [top, of_peers, of_pairs, of_hand_offs, of_requests, bottom] = rows.areas(frame.area());
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Line::styled(headline(fleet), bold), top);
    let shown = peers.get(scroll.min(peers.len())..).unwrap_or_default();
    grid(frame, of_peers, PEERS, shown, |row| match row[2].as_str() {
        "open" => Style::new(),
        "unready" | "closed" => Style::new().fg(Color::Red),
        _ => Style::new().fg(Color::Yellow),
    });
    grid(frame, of_pairs, PAIRS, &pairs(fleet), |_| Style::new());
    grid(frame, of_hand_offs, LIVE, &hand_offs(fleet), |_| Style::new());
    grid(frame, of_requests, LAST, &requests(fleet), |_| Style::new());
    let hint = match lost {
        Some(error) => Line::styled(format!("trying again: {error}"), Style::new().fg(Color::Red)),
        None => Line::from("q leaves, up and down scroll the peers"),
    };
    frame.render_widget(Paragraph::new(hint), bottom);
}

fn grid<const N: usize>(
    frame: &mut Frame<'_>,
    area: Rect,
    heads: [&'static str; N],
    rows: &[[String; N]],
    style: impl Fn(&[String; N]) -> Style,
) {
    let mut widths = heads.map(|head| head.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut widths = widths.map(|width| Constraint::Max(u16::try_from(width).unwrap_or(u16::MAX)));
    // Names stay whole where room is short.
    if let Some(first) = widths.first_mut()
        && let Constraint::Max(width) = *first
    {
        *first = Constraint::Length(width);
    }
    let head = Row::new(heads).style(Style::new().add_modifier(Modifier::BOLD));
    let rows = rows.iter().map(|row| Row::new(row.iter().map(String::as_str)).style(style(row)));
    let table = Table::new(rows, widths).header(head).column_spacing(2);
    frame.render_widget(table.block(Block::new().borders(Borders::TOP)), area);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::fleet::tests::example;
    use super::*;

    fn screen(width: u16, height: u16, lost: Option<&str>, scroll: usize) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &example(), lost, scroll)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_screen_shows_what_the_text_shows() {
        let (screen, text) = (screen(120, 30, None, 0), text(&example()));
        for shown in [&screen, &text] {
            for word in [
                "kvbaton 0.1.0: ready, 1 of 1 prefill peers, 1 of 1 decode peers, 1 requests, 1 hand-offs",
                "prefill-1  prefill  open",
                "3+1       25 %  2",
                "2.5          6.1 ms  9.8 ms",
                "dispatched  prefill-1  decode-1  4       30 s",
                "completions  running  prefill-1 to decode-1",
            ] {
                assert!(shown.contains(word), "{word} is not in\n{shown}");
            }
        }
        assert!(screen.contains("q leaves"), "{screen}");
    }

    #[test]
    fn a_small_screen_and_a_lost_router_are_drawn_too() {
        let lost = screen(60, 12, Some("no answer in time"), 1);
        assert!(
            lost.contains("trying again: no answer in time") && !lost.contains("prefill  open"),
            "{lost}"
        );
        assert!(lost.contains("decode-1  "), "{lost}");
        screen(10, 2, None, 9);
    }
}

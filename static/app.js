// The page: puts the parts together, and does what an operator asks for.

import { Column } from "./columns.js";
import { byId, make, millis, percent, rate, seconds, setAttribute, setText } from "./dom.js";
import { Flows } from "./flows.js";
import { Panels } from "./panels.js";
import { Fleet, condition } from "./state.js";
import { Refused, Stream, ask, token } from "./stream.js";

const fleet = new Fleet();
const columns = {
  prefill: new Column("prefill", choose),
  decode: new Column("decode", choose),
};
const flows = new Flows(columns.prefill, columns.decode);
const panels = new Panels(fleet, choose);
let chosen = null;

// ---------------------------------------------------------------- the theme

const THEMES = ["system", "light", "dark"];
const THEME = "kvbaton-theme";

function setTheme(theme) {
  localStorage.setItem(THEME, theme);
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme-button"), `Theme: ${theme}`);
  flows.repaint();
}

byId("theme-button").addEventListener("click", () => {
  const now = THEMES.indexOf(localStorage.getItem(THEME) ?? "system");
  setTheme(THEMES[(now + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => flows.repaint());
setTheme(THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "system");

// ---------------------------------------------------------------- what is told

const news = byId("news");

/** Said to screen readers when they have finished what they say. */
function say(text) {
  news.textContent = text;
}

function trouble(text) {
  byId("trouble").hidden = !text;
  setText(byId("trouble"), text ?? "");
}

const moods = new Map();

/** Says which peers have begun or ceased to be usable; of many at once only how many. */
function sayChanges() {
  const told = [];
  for (const peer of fleet.peers.values()) {
    const [word] = condition(peer);
    const before = moods.get(peer.id);
    if (before !== undefined && before !== word) told.push(`${peer.id} is ${word}`);
    moods.set(peer.id, word);
  }
  if (told.length > 0) say(told.length <= 3 ? told.join(". ") : `${told.length} peers have changed`);
}

// ---------------------------------------------------------------- the stream

let drawing = false;

function take(frame, whole) {
  fleet.take(frame, whole);
  if (whole) moods.clear();
  if (drawing) return;
  drawing = true;
  // Frames that come while the page is not looked at are drawn once.
  requestAnimationFrame(() => {
    drawing = false;
    performance.mark("draw");
    draw();
    performance.measure("kvbaton-draw", "draw");
  });
}

function draw() {
  const changed = fleet.changed;
  fleet.changed = new Set();
  if (changed.has("peers") || changed.has("gone")) {
    drawColumns();
    sayChanges();
    if (chosen !== null) drawDetail();
    flows.show(fleet.pairs);
  }
  if (changed.has("pairs")) flows.show(fleet.pairs);
  if (changed.has("router") || changed.has("pairs") || changed.has("hand_offs")) drawTotals();
  panels.draw(changed);
}

function drawColumns() {
  const wanted = byId("peer-filter").value.trim().toLowerCase();
  for (const [role, column] of Object.entries(columns)) {
    const all = fleet.ofRole(role);
    const fits = (peer) => `${peer.id} ${peer.url} ${condition(peer)[0]}`.toLowerCase().includes(wanted);
    column.show(wanted ? all.filter(fits) : all, all.length);
  }
}

byId("peer-filter").addEventListener("input", () => {
  drawColumns();
  flows.show(fleet.pairs);
});

function drawTotals() {
  const router = fleet.router;
  if (!router) return;
  setText(byId("total-prefill"), String(router.prefill_ready));
  setText(byId("total-decode"), String(router.decode_ready));
  setText(byId("total-running"), String(router.running));
  setText(byId("total-rate"), rate(fleet.rate()));
  setText(byId("total-live"), String(fleet.handOffs.live));
  if (router.draining) trouble("The router is leaving: it finishes what runs and takes nothing new.");
  else if (!router.ready) trouble("No prefill engine can hand off to any decode engine: requests cannot be served.");
  else trouble(null);
}

const stream = new Stream(take, (what, error) => {
  const words = { connecting: "Connecting", live: "Live", lost: "Connection lost, trying again", refused: "Not let in" };
  setAttribute(byId("link"), "data-state", what);
  setText(byId("link-text"), words[what]);
  if (what === "live") {
    setText(byId("token-fault"), "");
    if (byId("token-dialog").open) byId("token-dialog").close();
    trouble(null);
  }
  if (what === "lost") say(`Connection lost: ${error.message}`);
  if (what === "refused") {
    trouble(error.message);
    if (error.status === 401) askForToken(error.code === "token_wrong" ? "The token is wrong." : "");
  }
});

// ---------------------------------------------------------------- the token

function askForToken(fault) {
  setText(byId("token-fault"), fault);
  const dialog = byId("token-dialog");
  if (!dialog.open) {
    byId("token").value = "";
    dialog.showModal();
  }
  byId("token").focus();
  byId("token").select();
}

function useToken() {
  token.set(byId("token").value.trim());
  stream.start();
}

byId("token-button").addEventListener("click", () => askForToken(""));
byId("token-use").addEventListener("click", useToken);
byId("token").addEventListener("keydown", (event) => event.key === "Enter" && useToken());
byId("token-cancel").addEventListener("click", () => byId("token-dialog").close());
byId("token-forget").addEventListener("click", () => {
  token.set("");
  byId("token-dialog").close();
  fleet.clear();
  stream.start();
});

// ---------------------------------------------------------------- one peer

function choose(id, byKeyboard = false) {
  chosen = id;
  for (const column of Object.values(columns)) column.mark(id);
  drawDetail();
  if (byKeyboard) byId("detail").focus();
}

function facts(peer) {
  const load = peer.load;
  const age = load ? ` (${seconds(Math.max(0, fleet.now() - load.at_ms) / 1000)} ago)` : "";
  const yes = (value) => (value ? "yes" : "no");
  const time = (unix) => new Date(unix * 1000).toLocaleTimeString();
  return {
    Condition: condition(peer)[0],
    URL: peer.dp_rank === undefined ? peer.url : `${peer.url} (rank ${peer.dp_rank})`,
    Models: peer.models.join(", ") || "–",
    Version: peer.version ?? "–",
    Generation: peer.generation ?? "–",
    "In flight": String(peer.in_flight),
    "Engine’s load": load ? `${load.running} running, ${load.waiting} waiting${age}` : "not read",
    "KV in use": percent(load?.kv_usage),
    "Cached tokens": percent(load?.cached_token_rate),
    Breaker: `${peer.breaker.replaceAll("_", " ")}, opened ${peer.breaker_opened} times`,
    "Failures in a row": String(peer.failures_in_a_row),
    Share: percent(peer.share),
    Errors: String(peer.errors),
    "Last error": peer.last_error ? `${peer.last_error.kind}, at ${time(peer.last_error.at)}` : "none",
    "Engine’s own state": peer.engine_state ?? "not registered",
    Restarts: String(peer.restarts),
    Drained: yes(peer.drained),
    Quarantined: yes(peer.quarantined),
    "Came by registration": yes(peer.adopted),
    "Hand-offs": pairsOf(peer.id) || "none of late",
  };
}

function pairsOf(id) {
  const mine = fleet.pairs.filter((pair) => pair.prefill === id || pair.decode === id).slice(0, 4);
  const other = (pair) => (pair.prefill === id ? `to ${pair.decode}` : `from ${pair.prefill}`);
  return mine.map((pair) => `${other(pair)}: ${rate(pair.rate)}/s, ${millis(pair.mean_ms)}`).join("; ");
}

function drawDetail() {
  const peer = fleet.peers.get(chosen);
  byId("actions").hidden = !peer;
  byId("detail-hint").hidden = Boolean(peer);
  setText(byId("detail-title"), peer ? peer.id : chosen === null ? "No peer chosen" : `${chosen} is gone`);
  const list = byId("facts");
  if (!peer) {
    list.replaceChildren();
    return;
  }
  const all = Object.entries(facts(peer));
  if (list.children.length !== all.length) {
    list.replaceChildren(...all.map(() => make("div", {}, make("dt"), make("dd"))));
  }
  all.forEach(([name, value], place) => {
    setText(list.children[place].firstElementChild, name);
    setText(list.children[place].lastElementChild, value);
  });
  const button = (action) => document.querySelector(`[data-action="${action}"]`);
  button("drain").disabled = peer.drained;
  button("quarantine").disabled = peer.quarantined;
}

// ---------------------------------------------------------------- what operators do

const ACTIONS = {
  drain: {
    title: (id) => `Drain ${id}?`,
    text: "It gets no new requests. What it has goes on to its end, and its hand-offs may still be read.",
    path: (id) => ["POST", `/admin/peers/${id}/drain?timeout=300`],
    begun: (id) => `${id} is being drained`,
    done: (id, told) =>
      told.ended === "drained" ? `${id} is drained` : `${id}: waiting ended with ${told.ended}, ${told.in_flight} in flight`,
  },
  quarantine: {
    title: (id) => `Quarantine ${id}?`,
    text: "No pair with it is used for hand-offs. A decode engine goes on with what it serves alone.",
    path: (id) => ["POST", `/admin/peers/${id}/quarantine`],
    done: (id) => `${id} is quarantined`,
  },
  resume: {
    title: (id) => `Resume ${id}?`,
    text: "It gets requests and hand-offs again; the quarantines of its pairs end too.",
    path: (id) => ["POST", `/admin/peers/${id}/resume`],
    done: (id) => `${id} gets requests again`,
  },
  remove: {
    title: (id) => `Remove ${id}?`,
    text: "It leaves the fleet and does not come back by its engine’s registration. What it has goes on to its end. Drain it first to see that nothing is left.",
    path: (id) => ["DELETE", `/admin/peers/${id}`],
    done: (id) => `${id} is removed`,
  },
};

let confirmed = null;

function confirmFirst(action, id) {
  const { title, text } = ACTIONS[action];
  setText(byId("confirm-title"), title(id));
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), action[0].toUpperCase() + action.slice(1));
  confirmed = () => act(action, id);
  byId("confirm").showModal();
  // What cannot be undone is not what Enter does.
  byId(action === "remove" ? "confirm-no" : "confirm-yes").focus();
}

async function act(action, id) {
  const { path, begun, done } = ACTIONS[action];
  const [method, url] = path(encodeURIComponent(id));
  if (begun) say(begun(id));
  try {
    const told = await (await ask(url, { method })).json();
    say(done(id, told));
    toast(done(id, told));
  } catch (error) {
    const why = error instanceof Refused ? error.message : "the router cannot be reached";
    toast(`${id} was not changed: ${why}`, true);
    if (error instanceof Refused && error.status === 401) askForToken(error.code === "token_wrong" ? "The token is wrong." : "");
  }
}

function toast(text, bad = false) {
  document.querySelector(".toast")?.remove();
  const shown = make("p", { class: bad ? "toast bad" : "toast", role: bad ? "alert" : null }, text);
  document.body.append(shown);
  setTimeout(() => shown.remove(), 6000);
}

for (const button of document.querySelectorAll("[data-action]")) {
  button.addEventListener("click", () => chosen !== null && confirmFirst(button.dataset.action, chosen));
}
byId("confirm-no").addEventListener("click", () => byId("confirm").close());
byId("confirm-yes").addEventListener("click", () => {
  byId("confirm").close();
  confirmed?.();
});

setInterval(() => {
  panels.tick();
  if (chosen !== null) drawDetail();
}, 250);

// A link to a request: /dashboard#request=ID
function followLink() {
  const id = new URLSearchParams(location.hash.slice(1)).get("request");
  if (id) panels.showRequest(id);
}
addEventListener("hashchange", followLink);
followLink();

stream.start();

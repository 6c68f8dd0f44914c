// The tables below the picture. Only the one that is open is drawn, and only when its part has changed.

import { blankRow, byId, bytes, fillRow, keyedRows, make, millis, percent, rate, seconds, setAttribute, setText, table } from "./dom.js";
import { condition } from "./state.js";
import { Timeline } from "./timeline.js";

const REQUESTS = 60;
const PAGE = 50;
/** The largest matrix that is shown cell by cell. */
const MOST_CELLS = 900;
const MARKS = { compatible: "✓", unknown: "?" };

/** A button that looks like a link, for a cell. */
const link = (onclick) => make("button", { type: "button", class: "as-link", onclick });

class Requests {
  constructor(panel) {
    this.parts = ["requests"];
    this.timeline = new Timeline();
    const input = make("input", { id: "request-id", type: "search", autocomplete: "off", spellcheck: "false" });
    const find = make("button", { type: "button" }, "Show");
    const show = () => input.value.trim() && this.show(input.value.trim());
    find.addEventListener("click", show);
    input.addEventListener("keydown", (event) => event.key === "Enter" && show());
    const headings = ["Request", "State", "Prefill", "Decode", "Queue", "Prefill time", "Hand-off", "First byte", "Total", "Answer"];
    const { element, body } = table("The last requests, the newest first", headings);
    this.body = body;
    this.empty = make("p", { class: "hint" }, "No request yet.");
    const found = make("div", { class: "find-row" }, make("label", { for: "request-id" }, "Request id"), input, find);
    const left = make("div", {}, found, this.empty, element);
    panel.append(make("div", { class: "two" }, left, this.timeline.element));
  }

  async show(id) {
    await this.timeline.show(id);
    this.timeline.element.focus({ preventScroll: true });
    this.timeline.element.scrollIntoView({ block: "nearest" });
  }

  draw(fleet) {
    const newest = fleet.newestRequests(REQUESTS);
    this.empty.hidden = newest.length > 0;
    if (newest.length === 0 && fleet.router && !fleet.router.keeps_requests) {
      setText(this.empty, "This router keeps no requests (timeline.requests is 0).");
    }
    const create = (request) => {
      const row = blankRow(10);
      const button = link(() => this.show(request.request_id));
      setText(button, request.request_id);
      row.firstElementChild.append(button);
      return row;
    };
    keyedRows(this.body, newest, (request) => request.number, create, (row, request) => {
      if (row.request === request) return;
      row.request = request;
      const ended = request.ended_ms !== null;
      setAttribute(row, "data-mood", !ended ? "idle" : request.outcome === "served" ? "good" : "bad");
      fillRow(row, [
        undefined,
        ended ? `${request.status} ${request.outcome.replaceAll("_", " ")}` : "running",
        request.prefill ?? "–",
        request.decode ?? "–",
        seconds(request.queue_seconds),
        seconds(request.prefill_seconds),
        seconds(request.hand_off_seconds),
        seconds(request.first_byte_seconds),
        ended ? millis(request.ended_ms - request.began_ms) : "…",
        bytes(request.answer_bytes),
      ]);
    });
  }
}

class HandOffs {
  constructor(panel, showRequest) {
    this.parts = ["hand_offs"];
    this.showRequest = showRequest;
    this.text = make("p", { class: "hint" });
    const headings = ["Request", "State", "Prefill", "Decode", "Blocks", "Age", "Lease left"];
    const { element, body } = table("Hand-offs whose blocks a prefill engine still holds, the oldest first", headings);
    this.body = body;
    panel.append(this.text, element);
  }

  draw(fleet) {
    const { live, shown } = fleet.handOffs;
    const more = live > shown.length ? `, of which the ${shown.length} oldest are shown` : "";
    setText(this.text, live === 0 ? "No prefill engine holds blocks for anybody." : `${live} hand-offs are held${more}.`);
    const create = (handOff) => {
      const row = blankRow(7);
      const button = link(() => this.showRequest(handOff.request_id));
      setText(button, handOff.request_id);
      row.firstElementChild.append(button);
      row.meter = make("meter", { min: 0, "aria-label": "Part of the lease that is left" });
      row.left = make("span");
      row.lastElementChild.append(row.meter, row.left);
      return row;
    };
    keyedRows(this.body, shown, (handOff) => handOff.key, create, (row, handOff) => {
      row.handOff = handOff;
      fillRow(row, [undefined, handOff.state, handOff.prefill, handOff.decode ?? "–", String(handOff.blocks)]);
    });
    this.tick(fleet);
  }

  /** Leases run down without any news. */
  tick(fleet) {
    const now = fleet.now();
    for (const row of this.body.children) {
      const { granted_ms: granted, ends_ms: ends } = row.handOff;
      const left = Math.max(0, ends - now);
      setText(row.children[5], seconds(Math.max(0, now - granted) / 1000));
      setText(row.left, ` ${(left / 1000).toFixed(1)} s`);
      row.meter.max = Math.max(1, ends - granted);
      row.meter.low = row.meter.max * 0.25;
      row.meter.optimum = row.meter.max;
      row.meter.value = left;
    }
  }
}

class Pairs {
  constructor(panel) {
    this.parts = ["pairs"];
    this.text = make("p", { class: "hint" });
    const headings = ["Prefill", "Decode", "Hand-offs a second", "Mean latency", "Longest"];
    const { element, body } = table("Pairs with hand-offs of late, the busiest first", headings);
    this.body = body;
    panel.append(this.text, element);
  }

  draw(fleet) {
    const over = fleet.router?.rate_seconds ?? 10;
    setText(
      this.text,
      `Over the last ${over} seconds. Latency is from the prefill engine’s answer to the decode engine’s first byte, of streams only.`,
    );
    keyedRows(
      this.body,
      fleet.pairs,
      (pair) => `${pair.prefill} ${pair.decode}`,
      () => blankRow(5),
      (row, pair) => fillRow(row, [pair.prefill, pair.decode, rate(pair.rate), millis(pair.mean_ms), millis(pair.longest_ms)]),
    );
  }
}

const words = (kind) => {
  const parts = [kind.verdict.replaceAll("_", " ")];
  if (kind.reason) parts.push(kind.reason);
  if (kind.quarantine) parts.push(kind.quarantine === "operator" ? "quarantined by an operator" : "quarantined after a restart");
  parts.push(kind.used ? "used" : "not used");
  return parts.join("; ");
};

const cells = (matrix, row) => {
  const kinds = [];
  for (let at = 0; at < row.length; at += 2) kinds.push(...new Array(row[at + 1]).fill(row[at]));
  return kinds;
};

class Matrix {
  constructor(panel) {
    this.parts = ["matrix"];
    this.text = make("p", { class: "hint" });
    this.area = make("div");
    panel.append(this.text, this.area);
  }

  draw(fleet) {
    const matrix = fleet.matrix;
    if (!matrix) return;
    const count = matrix.prefill.length * matrix.decode.length;
    const kinds = matrix.kinds.map((kind) => ({ kind, pairs: 0, examples: [] }));
    matrix.rows.forEach((row, p) => {
      let d = 0;
      for (let at = 0; at < row.length; at += 2) {
        const of = kinds[row[at]];
        of.pairs += row[at + 1];
        if (of.examples.length < 3) of.examples.push(`${matrix.prefill[p]} → ${matrix.decode[d]}`);
        d += row[at + 1];
      }
    });
    const used = kinds.filter((of) => of.kind.used).reduce((sum, of) => sum + of.pairs, 0);
    setText(this.text, `${used} of ${count} pairs are used.`);
    const { element, body } = table("Verdicts and how many pairs have them", ["Verdict", "Pairs", "For example"]);
    for (const of of kinds) {
      const row = blankRow(3);
      setAttribute(row, "data-mood", of.kind.used ? "good" : "bad");
      fillRow(row, [words(of.kind), String(of.pairs), of.examples.join(", ")]);
      body.append(row);
    }
    const parts = [element];
    if (count > 0 && count <= MOST_CELLS) parts.unshift(this.grid(matrix));
    this.area.replaceChildren(...parts);
  }

  grid(matrix) {
    const head = make("tr", {}, make("th", { scope: "col" }, "Prefill ↓ Decode →"));
    head.append(...matrix.decode.map((id) => make("th", { scope: "col" }, id)));
    const body = make("tbody");
    matrix.rows.forEach((runs, p) => {
      const row = make("tr", {}, make("th", { scope: "row" }, matrix.prefill[p]));
      for (const at of cells(matrix, runs)) {
        const kind = matrix.kinds[at];
        const said = words(kind);
        const mark = make("span", { "aria-hidden": "true" }, kind.quarantine ? "⏸" : (MARKS[kind.verdict] ?? "✕"));
        const cell = make("td", { class: kind.used ? "used" : "unused", title: said }, mark, make("span", { class: "unseen" }, said));
        row.append(cell);
      }
      body.append(row);
    });
    const caption = make("caption", { class: "unseen" }, "Which prefill peer can hand off to which decode peer");
    const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Matrix of all pairs" };
    return make("div", region, make("table", { class: "grid" }, caption, make("thead", {}, head), body));
  }
}

class Peers {
  constructor(panel, choose) {
    this.parts = ["peers", "gone"];
    this.page = 0;
    this.choose = choose;
    const headings = [
      "Peer", "Role", "Condition", "In flight", "Running / waiting", "KV in use", "Cached tokens",
      "Errors", "Breaker", "Generation", "Version", "Models",
    ];
    const { element, body } = table("All peers", headings);
    this.body = body;
    this.text = make("span", { role: "status" });
    const turn = (by) => () => {
      this.page += by;
      this.draw(this.fleet);
    };
    this.back = make("button", { type: "button", onclick: turn(-1) }, "Previous page");
    this.on = make("button", { type: "button", onclick: turn(1) }, "Next page");
    panel.append(make("div", { class: "pages" }, this.back, this.text, this.on), element);
  }

  draw(fleet) {
    this.fleet = fleet;
    const all = [...fleet.ofRole("prefill"), ...fleet.ofRole("decode")];
    const pages = Math.max(1, Math.ceil(all.length / PAGE));
    this.page = Math.min(Math.max(0, this.page), pages - 1);
    this.back.disabled = this.page === 0;
    this.on.disabled = this.page === pages - 1;
    setText(this.text, `Page ${this.page + 1} of ${pages}, ${all.length} peers`);
    const create = (peer) => {
      const row = blankRow(12);
      const button = link(() => this.choose(peer.id, true));
      setText(button, peer.id);
      row.firstElementChild.append(button);
      return row;
    };
    keyedRows(this.body, all.slice(this.page * PAGE, (this.page + 1) * PAGE), (peer) => peer.id, create, (row, peer) => {
      if (row.peer === peer) return;
      row.peer = peer;
      const [word, mood] = condition(peer);
      setAttribute(row, "data-mood", mood);
      const load = peer.load;
      fillRow(row, [
        undefined, peer.role, word, String(peer.in_flight), load ? `${load.running} / ${load.waiting}` : "–",
        percent(load?.kv_usage), percent(load?.cached_token_rate), String(peer.errors),
        peer.breaker.replaceAll("_", " "), peer.generation ?? "–", peer.version ?? "–", peer.models.join(", ") || "–",
      ]);
    });
  }
}

/** The tabs: arrows move between them, and the chosen one's panel is drawn. */
export class Panels {
  constructor(fleet, choose) {
    this.fleet = fleet;
    const requests = new Requests(byId("panel-requests"));
    this.requests = requests;
    const showRequest = (id) => {
      this.open("requests");
      requests.show(id);
    };
    this.showRequest = showRequest;
    this.all = {
      requests,
      handoffs: new HandOffs(byId("panel-handoffs"), showRequest),
      pairs: new Pairs(byId("panel-pairs")),
      matrix: new Matrix(byId("panel-matrix")),
      peers: new Peers(byId("panel-peers"), choose),
    };
    this.names = Object.keys(this.all);
    this.stale = new Set(this.names);
    this.current = "requests";
    for (const name of this.names) byId(`tab-${name}`).addEventListener("click", () => this.open(name));
    byId("tabs").addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const count = this.names.length;
      const next = this.names[(this.names.indexOf(this.current) + by + count) % count];
      this.open(next);
      byId(`tab-${next}`).focus();
      event.preventDefault();
    });
  }

  open(name) {
    this.current = name;
    for (const other of this.names) {
      const tab = byId(`tab-${other}`);
      setAttribute(tab, "aria-selected", String(other === name));
      tab.tabIndex = other === name ? 0 : -1;
      byId(`panel-${other}`).hidden = other !== name;
    }
    this.draw(new Set());
  }

  draw(changed) {
    for (const name of this.names) {
      if (this.all[name].parts.some((part) => changed.has(part))) this.stale.add(name);
    }
    if (!this.stale.delete(this.current)) return;
    this.all[this.current].draw(this.fleet);
  }

  tick() {
    if (this.current === "handoffs") this.all.handoffs.tick(this.fleet);
  }
}

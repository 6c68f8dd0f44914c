// A column of peers: only the rows in sight exist, so that a thousand peers cost what a screenful costs.
// A listbox for the keyboard and for screen readers: arrows move, Enter chooses.

import { byId, make, percent, setAttribute, setText } from "./dom.js";
import { condition } from "./state.js";

/** Below so many peers the rows are tall and tell more. */
const FEW = 8;
const TALL = 74;
const LOW = 40;
const SPARE = 4;

export class Column {
  constructor(role, onChoose) {
    this.role = role;
    this.onChoose = onChoose;
    this.list = byId(`${role}-list`);
    this.count = byId(`${role}-count`);
    this.space = make("div", { class: "space", role: "presentation" });
    this.list.append(this.space);
    this.rows = new Map();
    this.peers = [];
    this.active = null;
    this.chosen = null;
    this.list.addEventListener("scroll", () => this.draw(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("focus", () => this.move(Math.max(0, this.placeOf(this.active))));
    new ResizeObserver(() => this.draw()).observe(this.list);
  }

  /** Other peers, or the same with other values. */
  show(peers, all) {
    this.peers = peers;
    this.height = peers.length <= FEW ? TALL : LOW;
    this.list.classList.toggle("low", this.height === LOW);
    this.space.style.height = `${peers.length * this.height}px`;
    setText(this.count, peers.length === all ? String(all) : `${peers.length} of ${all}`);
    this.places = new Map(peers.map((peer, place) => [peer.id, place]));
    if (this.active !== null && !this.places.has(this.active)) this.active = null;
    this.draw();
  }

  placeOf(id) {
    return this.places?.get(id) ?? -1;
  }

  /** The middle of a peer's row within the list's box; beyond its edges for rows out of sight. */
  middle(id) {
    const place = this.placeOf(id);
    return place < 0 ? null : place * this.height + this.height / 2 - this.list.scrollTop;
  }

  draw() {
    if (!this.height) return;
    const from = Math.max(0, Math.floor(this.list.scrollTop / this.height) - SPARE);
    const sight = Math.ceil(this.list.clientHeight / this.height) + 2 * SPARE;
    const shown = this.peers.slice(from, from + sight);
    const stay = new Set(shown.map((peer) => peer.id));
    for (const [id, row] of this.rows) {
      if (stay.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    shown.forEach((peer, offset) => this.fill(peer, from + offset));
    const active = this.active !== null && this.rows.has(this.active) ? `peer-${this.active}` : null;
    if (active) setAttribute(this.list, "aria-activedescendant", active);
    else this.list.removeAttribute("aria-activedescendant");
  }

  fill(peer, place) {
    let row = this.rows.get(peer.id);
    if (!row) {
      row = this.blank(peer);
      this.rows.set(peer.id, row);
      this.space.append(row.element);
    }
    const top = place * this.height;
    if (row.top !== top) {
      row.top = top;
      row.element.style.transform = `translateY(${top}px)`;
    }
    setAttribute(row.element, "aria-posinset", String(place + 1));
    setAttribute(row.element, "aria-setsize", String(this.peers.length));
    setAttribute(row.element, "aria-selected", String(peer.id === this.chosen));
    row.element.classList.toggle("active", peer.id === this.active);
    if (row.peer === peer) return;
    row.peer = peer;
    const [word, mood] = condition(peer);
    setAttribute(row.element, "data-mood", mood);
    setText(row.name, peer.id);
    setText(row.word, word);
    setText(row.flight, `${peer.in_flight} in flight`);
    const usage = peer.load?.kv_usage ?? null;
    const cached = peer.load?.cached_token_rate ?? null;
    setText(row.kv, `KV ${percent(usage)}`);
    row.bar.style.transform = `scaleX(${usage ?? 0})`;
    setText(row.cached, `cached ${percent(cached)}`);
    setText(row.errors, peer.errors === 1 ? "1 error" : `${peer.errors} errors`);
    row.errors.hidden = peer.errors === 0;
  }

  blank(peer) {
    const part = (name) => make("span", { class: name });
    const row = { name: part("name"), word: part("word"), flight: part("flight"), kv: part("kv"), cached: part("cached") };
    row.errors = part("errors");
    row.bar = make("span", { class: "bar-fill" });
    const bar = make("span", { class: "bar", "aria-hidden": "true" }, row.bar);
    row.element = make(
      "div",
      { class: "peer", role: "option", id: `peer-${peer.id}`, onclick: () => this.choose(peer.id) },
      make("span", { class: "mark", "aria-hidden": "true" }),
      row.name,
      row.word,
      row.flight,
      bar,
      row.kv,
      row.cached,
      row.errors,
    );
    return row;
  }

  move(place) {
    if (this.peers.length === 0) return;
    const bounded = Math.min(Math.max(place, 0), this.peers.length - 1);
    this.active = this.peers[bounded].id;
    const top = bounded * this.height;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    const bottom = top + this.height - this.list.clientHeight;
    if (bottom > this.list.scrollTop) this.list.scrollTop = bottom;
    this.draw();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / this.height) - 1);
    const here = this.placeOf(this.active);
    const moves = {
      ArrowDown: here + 1,
      ArrowUp: here - 1,
      PageDown: here + page,
      PageUp: here - page,
      Home: 0,
      End: this.peers.length - 1,
    };
    if (event.key in moves) this.move(moves[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && this.active !== null) this.choose(this.active, true);
    else return;
    event.preventDefault();
  }

  choose(id, byKeyboard = false) {
    this.active = id;
    this.onChoose(id, byKeyboard);
  }

  mark(id) {
    this.chosen = id;
    this.draw();
  }
}

// The living picture between the columns: a curve for each busy pair, with hand-offs travelling along it.
// Only a picture: all it says is in the table of pairs too.

import { byId, millis, rate } from "./dom.js";

const MOST_CURVES = 60;
const MOST_LABELS = 6;
/** How long a hand-off travels across, in milliseconds. */
const JOURNEY = 1400;
/** Most dots that travel on one curve. */
const MOST_DOTS = 14;

/** Where on their curves labels stand, in turn. */
const PLACES = [0.24, 0.5, 0.76];

/** A place on a pair's curve, from 0 to 1. */
function along(t, from, to, width) {
  const u = 1 - t;
  const x = 3 * u * u * t * width * 0.45 + 3 * u * t * t * width * 0.55 + t * t * t * width;
  const y = (u * u * u + 3 * u * u * t) * from + (3 * u * t * t + t * t * t) * to;
  return [x, y];
}

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Flows {
  constructor(prefill, decode) {
    this.prefill = prefill;
    this.decode = decode;
    this.canvas = byId("flows");
    this.pen = this.canvas.getContext("2d");
    this.pairs = [];
    this.colours = {};
    this.dirty = true;
    new ResizeObserver(() => (this.dirty = true)).observe(this.canvas);
    for (const column of [prefill, decode]) {
      column.list.addEventListener("scroll", () => (this.dirty = true), { passive: true });
    }
    still.addEventListener("change", () => (this.dirty = true));
    const frame = (now) => {
      // Nothing moves where nothing flows, and nothing is drawn that is not looked at.
      if (this.dirty || (this.pairs.length > 0 && !still.matches)) this.draw(now);
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  show(pairs) {
    this.pairs = pairs.slice(0, MOST_CURVES);
    this.dirty = true;
  }

  /** The theme has changed. */
  repaint() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.colours = { line: colour("--flow"), dot: colour("--flow-dot"), text: colour("--text"), back: colour("--panel") };
    this.dirty = true;
  }

  draw(now) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    this.dirty = false;
    const pen = this.pen;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const box = this.canvas.getBoundingClientRect();
    const most = Math.max(1, ...this.pairs.map((pair) => pair.rate));
    const labels = [];
    for (const pair of this.pairs) {
      const from = this.end(this.prefill, pair.prefill, box);
      const to = this.end(this.decode, pair.decode, box);
      if (from === null || to === null) continue;
      const weight = pair.rate / most;
      pen.globalAlpha = from.out || to.out ? 0.25 : 0.35 + 0.45 * weight;
      pen.strokeStyle = this.colours.line;
      pen.lineWidth = 1 + 5 * weight;
      pen.beginPath();
      pen.moveTo(0, from.y);
      pen.bezierCurveTo(width * 0.45, from.y, width * 0.55, to.y, width, to.y);
      pen.stroke();
      if (!still.matches) this.dots(pair, from.y, to.y, width, now);
      if (labels.length < MOST_LABELS && !from.out && !to.out) labels.push([pair, from.y, to.y]);
    }
    pen.globalAlpha = 1;
    this.label(labels, width);
  }

  /** Where a curve ends: in the middle of the peer's row, or at the edge that it is beyond. */
  end(column, id, box) {
    const middle = column.middle(id);
    if (middle === null) return null;
    const height = column.list.clientHeight;
    const inside = Math.min(Math.max(middle, 4), height - 4);
    return { y: inside + column.list.getBoundingClientRect().top - box.top, out: middle < 0 || middle > height };
  }

  dots(pair, from, to, width, now) {
    // As many on their way as leave within one journey.
    const count = Math.min(MOST_DOTS, Math.max(1, Math.round((pair.rate * JOURNEY) / 1000)));
    this.pen.fillStyle = this.colours.dot;
    this.pen.globalAlpha = 0.95;
    // Each pair in a phase of its own, so that they do not march in step.
    const phase = (pair.prefill.length * 7 + from * 3 + to * 5) / 97;
    for (let dot = 0; dot < count; dot += 1) {
      const [x, y] = along((now / JOURNEY + phase + dot / count) % 1, from, to, width);
      this.pen.beginPath();
      this.pen.arc(x, y, 3, 0, 2 * Math.PI);
      this.pen.fill();
    }
  }

  label(labels, width) {
    const pen = this.pen;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const taken = [];
    labels.forEach(([pair, from, to], place) => {
      const text = `${rate(pair.rate)}/s · ${millis(pair.mean_ms)}`;
      const half = pen.measureText(text).width / 2 + 6;
      const places = width > 300 ? PLACES : [0.5];
      let [x, y] = along(places[place % places.length], from, to, width);
      x = Math.min(Math.max(x, half), width - half);
      while (taken.some((other) => Math.abs(other.x - x) < 2 * half && Math.abs(other.y - y) < 20)) y += 20;
      taken.push({ x, y });
      pen.globalAlpha = 0.9;
      pen.fillStyle = this.colours.back;
      pen.fillRect(x - half, y - 9, 2 * half, 18);
      pen.globalAlpha = 1;
      pen.fillStyle = this.colours.text;
      pen.fillText(text, x, y);
    });
  }
}

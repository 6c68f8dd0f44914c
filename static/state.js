// What the page knows of the fleet: the stream's frames put together. Draws nothing.

const MOST_REQUESTS = 200;

export class Fleet {
  constructor() {
    this.clear();
  }

  clear() {
    this.peers = new Map();
    this.requests = new Map();
    this.pairs = [];
    this.handOffs = { live: 0, shown: [] };
    this.matrix = null;
    this.router = null;
    this.shift = null;
    this.changed = new Set();
  }

  /** Takes one frame; what has changed is named in `changed` until somebody has drawn it. */
  take(frame, whole) {
    if (whole) this.clear();
    // How far the router's clock is ahead of this page's. The fastest frame tells it best.
    const shift = frame.now_ms - performance.now();
    if (this.shift === null || shift > this.shift || whole) this.shift = shift;
    for (const peer of frame.peers ?? []) this.peers.set(peer.id, peer);
    for (const id of frame.gone ?? []) this.peers.delete(id);
    for (const request of frame.requests ?? []) this.requests.set(request.number, request);
    if (this.requests.size > MOST_REQUESTS) {
      const old = [...this.requests.keys()].sort((one, other) => one - other);
      for (const number of old.slice(0, old.length - MOST_REQUESTS)) this.requests.delete(number);
    }
    if (frame.pairs) this.pairs = frame.pairs;
    if (frame.hand_offs) this.handOffs = frame.hand_offs;
    if (frame.matrix) this.matrix = frame.matrix;
    if (frame.router) this.router = frame.router;
    for (const name of Object.keys(frame)) this.changed.add(name);
    if (whole) for (const name of ["peers", "requests", "pairs", "hand_offs", "matrix", "router"]) this.changed.add(name);
  }

  /** The router's clock now, in milliseconds. */
  now() {
    return this.shift === null ? 0 : performance.now() + this.shift;
  }

  ofRole(role) {
    return [...this.peers.values()].filter((peer) => peer.role === role);
  }

  newestRequests(limit) {
    return [...this.requests.values()].sort((one, other) => other.number - one.number).slice(0, limit);
  }

  rate() {
    return this.pairs.reduce((sum, pair) => sum + pair.rate, 0);
  }
}

/** One word for how a peer is, and whether that is good. */
export function condition(peer) {
  if (peer.condition === "unready") {
    return peer.state === "unknown" ? ["not seen yet", "idle"] : ["unreachable", "bad"];
  }
  if (peer.condition !== "open") return [peer.condition, "idle"];
  if (peer.breaker === "open") return ["breaker open", "bad"];
  if (peer.breaker === "half_open") return ["being tried", "warn"];
  if (peer.quarantined) return ["quarantined", "warn"];
  if (peer.share < 1) return ["recovering", "warn"];
  return ["open", "good"];
}

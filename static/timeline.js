// One request, step by step: bars for the eye, and the same steps as a list for everybody.

import { bytes, keyedRows, make, seconds, setText, table, blankRow, fillRow } from "./dom.js";
import { Refused, ask } from "./stream.js";

const WORDS = {
  received: "Received",
  read: "Body read",
  admitted: "Admitted",
  decode_chosen: "Decode peer chosen",
  prefill_chosen: "Prefill peer chosen",
  prefill_sent: "Prefill sent",
  prefill_answered: "Prefill answered",
  prefill_failed: "Prefill failed",
  handed_off: "Handed off",
  hand_off_refused: "Hand-off refused",
  bypassed: "Without a prefill engine",
  decode_sent: "Decode sent",
  decode_head: "Decode answered",
  decode_failed: "Decode failed",
  first_byte: "First byte",
  first_token: "First token",
  ended: "Ended",
};

/** While a request runs its timeline is read again after so many milliseconds. */
const AGAIN = 700;

/** The stretches of time between the steps, as bars. */
function stretches(request) {
  const bars = [];
  const add = (name, kind, from, to, peer) => to > from && bars.push({ name, kind, from, to, peer });
  let read = null;
  let prefill = null;
  let granted = null;
  let decode = null;
  let first = null;
  for (const step of request.steps) {
    if (step.step === "read") read = step.seconds;
    if (step.step === "admitted" && read !== null) add("Queue", "queue", read, step.seconds);
    if (step.step === "prefill_sent") prefill = step;
    if (prefill && (step.step === "prefill_answered" || step.step === "prefill_failed")) {
      add("Prefill", "prefill", prefill.seconds, step.seconds, prefill.peer);
      prefill = null;
    }
    if (step.step === "handed_off") granted = step.seconds;
    if (step.step === "decode_sent") decode = step;
    if (step.step === "first_byte") {
      first = step.seconds;
      if (decode) add(granted === null ? "Decode, first byte" : "Hand-off", "handoff", granted ?? decode.seconds, first, decode.peer);
    }
    if (step.step === "decode_failed" && decode && first === null) {
      add("Decode failed", "failed", decode.seconds, step.seconds, decode.peer);
      decode = null;
    }
  }
  const end = request.seconds;
  if (prefill) add("Prefill", "prefill", prefill.seconds, end, prefill.peer);
  else if (decode && first === null) add("Hand-off", "handoff", granted ?? decode.seconds, end, decode.peer);
  if (first !== null) add("Tokens", "tokens", first, end, decode?.peer);
  return bars;
}

function about(request) {
  const words = [request.state === "running" ? "runs" : `ended with ${request.status}, ${request.outcome}`];
  words.push(request.endpoint.replaceAll("_", " "));
  if (request.model) words.push(`model ${request.model}`);
  if (request.stream !== null) words.push(request.stream ? "streamed" : "not streamed");
  if (request.key) words.push(`key ${request.key}`);
  words.push(`request ${bytes(request.request_bytes)}, answer ${bytes(request.answer_bytes)} in ${request.answer_pieces} pieces`);
  words.push(`${seconds(request.seconds)} in all`);
  return words.join(" · ");
}

export class Timeline {
  constructor() {
    this.heading = make("h3", { id: "timeline-title" }, "Timeline");
    this.about = make("p", { class: "hint" }, "Choose a request, or enter the id that stands in the answer’s x-request-id.");
    this.bars = make("div", { class: "bars", "aria-hidden": "true" });
    const { element, body } = table("Steps of the request", ["Step", "After", "Peer", "What"]);
    this.steps = body;
    this.scroll = element;
    this.scroll.hidden = true;
    this.fault = make("p", { class: "fault", role: "alert" });
    this.element = make(
      "section",
      { class: "timeline", "aria-labelledby": "timeline-title", tabindex: "-1" },
      this.heading,
      this.fault,
      this.about,
      this.bars,
      this.scroll,
    );
    this.turn = 0;
  }

  async show(id) {
    this.turn += 1;
    clearTimeout(this.timer);
    setText(this.heading, `Timeline of ${id}`);
    await this.read(id, this.turn);
  }

  async read(id, turn) {
    let request;
    try {
      request = await (await ask(`/admin/requests/${encodeURIComponent(id)}`)).json();
    } catch (error) {
      if (turn !== this.turn) return;
      setText(this.fault, error instanceof Refused ? error.message : "The router cannot be reached.");
      setText(this.about, "");
      this.bars.replaceChildren();
      this.scroll.hidden = true;
      return;
    }
    if (turn !== this.turn) return;
    this.draw(request);
    if (request.state === "running") this.timer = setTimeout(() => this.read(id, turn), AGAIN);
  }

  draw(request) {
    setText(this.fault, "");
    setText(this.about, about(request));
    const all = Math.max(request.seconds, 1e-6);
    this.bars.replaceChildren(
      ...stretches(request).map((bar) => {
        const fill = make("span", { class: `stretch ${bar.kind}` });
        fill.style.left = `${(bar.from / all) * 100}%`;
        fill.style.width = `${Math.max(0.4, ((bar.to - bar.from) / all) * 100)}%`;
        return make(
          "div",
          { class: "bar-row" },
          make("span", { class: "bar-name" }, bar.name),
          make("span", { class: "lane" }, fill),
          make("span", { class: "bar-time" }, seconds(bar.to - bar.from)),
        );
      }),
    );
    this.scroll.hidden = false;
    const steps = request.steps.map((step, place) => ({ ...step, place }));
    keyedRows(
      this.steps,
      steps,
      (step) => step.place,
      () => blankRow(4),
      (row, step) => {
        const what = [];
        if (step.status !== undefined) what.push(`status ${step.status}`);
        if (step.blocks !== undefined) what.push(`${step.blocks} blocks`);
        if (step.reason !== undefined) what.push(step.reason.replaceAll("_", " "));
        fillRow(row, [WORDS[step.step] ?? step.step, seconds(step.seconds), step.peer ?? "", what.join(", ")]);
      },
    );
  }
}

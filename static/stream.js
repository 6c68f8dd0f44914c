// The router's event stream and its other answers, read with fetch: an EventSource could not send a token.

const KEY = "kvbaton-token";
const PAUSES = [500, 1000, 2000, 5000];

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Asks the router; throws `Refused` with its own words. */
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (token.get()) headers.set("authorization", `Bearer ${token.get()}`);
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // Somebody between the router and here answered; the status has to do.
  }
  throw new Refused(answer.status, error.code ?? "", error.message ?? `answered with status ${answer.status}`);
}

/** The stream, read again whenever it ends. `told` gets what becomes of it. */
export class Stream {
  constructor(onFrame, told) {
    this.onFrame = onFrame;
    this.told = told;
    this.tries = 0;
    this.turn = 0;
  }

  /** Begins anew, with the token of now. */
  start() {
    this.turn += 1;
    this.tries = 0;
    this.abort?.abort();
    clearTimeout(this.timer);
    this.read(this.turn);
  }

  async read(turn) {
    this.abort = new AbortController();
    this.told("connecting");
    let why = "the router ended the stream";
    try {
      const answer = await ask("/admin/events", { signal: this.abort.signal });
      if (turn !== this.turn) return;
      this.tries = 0;
      this.told("live");
      await this.frames(answer.body.getReader(), turn);
    } catch (error) {
      if (turn !== this.turn) return;
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        this.told("refused", error);
        return;
      }
      why = error instanceof Refused ? error.message : "the router cannot be reached";
    }
    if (turn !== this.turn) return;
    this.told("lost", new Error(why));
    const pause = PAUSES[Math.min(this.tries, PAUSES.length - 1)];
    this.tries += 1;
    this.timer = setTimeout(() => this.read(turn), pause);
  }

  async frames(reader, turn) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (turn !== this.turn) return void reader.cancel().catch(() => {});
      if (done) return;
      text += decoder.decode(value, { stream: true });
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        this.event(text.slice(0, end));
        text = text.slice(end + 2);
      }
    }
  }

  event(text) {
    let name = "";
    let data = "";
    for (const line of text.split("\n")) {
      if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line.startsWith("data:")) data += line.slice(5).trimStart();
    }
    if (data) this.onFrame(JSON.parse(data), name === "snapshot");
  }
}

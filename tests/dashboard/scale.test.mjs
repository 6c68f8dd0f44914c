// A thousand peers: the page's own files, fed by a stream that changes every peer in every frame. Times are
// compared with those of ten peers on the same machine, so that a slow one changes nothing.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { after, before, test } from "node:test";

import { browse, close, live, open } from "./support.mjs";

const STATIC = new URL("../../static/", import.meta.url);
const KINDS = { html: "text/html", js: "text/javascript", css: "text/css", svg: "image/svg+xml" };
const FRAMES = 24;
const PAUSE = 250;

const peer = (role, number, turn) => ({
  id: `${role}-${number}`,
  role,
  url: `http://10.0.${number >> 8}.${number & 255}:8000`,
  state: "ready",
  condition: (number + turn) % 50 === 0 ? "drained" : "open",
  generation: "v14",
  version: "0.32.0",
  models: ["meta-llama/Llama-3.3-70B-Instruct"],
  in_flight: (number * 7 + turn) % 40,
  breaker: "closed",
  breaker_opened: 0,
  failures_in_a_row: 0,
  share: 1,
  errors: number % 3,
  last_error: null,
  drained: false,
  quarantined: false,
  leaving: false,
  adopted: true,
  engine_state: "ready",
  restarts: 0,
  load: { running: turn % 9, waiting: 0, kv_usage: ((number + turn) % 100) / 100, cached_token_rate: 0.4, at_ms: turn * PAUSE },
});

function frame(count, turn) {
  const each = (role) => Array.from({ length: count / 2 }, (_, at) => peer(role, at + 1, turn));
  const pairs = Array.from({ length: Math.min(200, count * 2) }, (_, at) => ({
    prefill: `prefill-${(at % (count / 2)) + 1}`,
    decode: `decode-${((at * 3) % (count / 2)) + 1}`,
    rate: 10 + ((at + turn) % 17),
    mean_ms: 5 + (at % 7),
    longest_ms: 20,
  }));
  const ids = (role) => each(role).map((one) => one.id);
  const whole = {
    router: {
      version: "0", ready: true, draining: false, prefill_ready: count / 2, decode_ready: count / 2,
      running: turn, keeps_requests: true, rate_seconds: 10,
    },
    matrix: {
      prefill: ids("prefill"),
      decode: ids("decode"),
      kinds: [{ verdict: "compatible", reason: null, quarantine: null, used: true }],
      rows: ids("prefill").map(() => [0, count / 2]),
    },
  };
  const peers = [...each("prefill"), ...each("decode")];
  return { now_ms: turn * PAUSE, peers, pairs, hand_offs: { live: 0, shown: [] }, ...(turn === 0 ? whole : {}) };
}

let server;
let browser;
let count = 10;

before(async () => {
  server = createServer(async (request, response) => {
    const path = new URL(request.url, "http://localhost").pathname;
    if (path === "/admin/events") {
      response.writeHead(200, { "content-type": "text/event-stream" });
      for (let turn = 0; turn < FRAMES && !response.destroyed; turn += 1) {
        response.write(`event: ${turn === 0 ? "snapshot" : "delta"}\ndata: ${JSON.stringify(frame(count, turn))}\n\n`);
        await new Promise((resolve) => setTimeout(resolve, PAUSE));
      }
      return; // It stays open.
    }
    const name = path === "/dashboard" ? "index.html" : path.replace("/dashboard/", "");
    const kind = KINDS[name.split(".").pop()];
    if (!kind) return void response.writeHead(404).end();
    response.writeHead(200, { "content-type": kind }).end(await readFile(new URL(name, STATIC)));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  browser = await browse();
});

after(async () => {
  await browser?.close();
  server?.closeAllConnections();
  server?.close();
});

/** The page with so many peers until the stream has said everything; what drawing a frame took, and how much there is. */
async function measured(peers, look = async () => {}) {
  count = peers;
  const page = await open(browser, `http://127.0.0.1:${server.address().port}`);
  await live(page);
  await page.waitForFunction((frames) => performance.getEntriesByName("kvbaton-draw").length >= frames, FRAMES - 4);
  const times = await page.evaluate(() => performance.getEntriesByName("kvbaton-draw").map((one) => one.duration));
  const nodes = await page.evaluate(() => document.querySelectorAll("*").length);
  await look(page);
  await close(page);
  const sorted = times.slice(1).sort((one, other) => one - other);
  return { median: sorted[sorted.length >> 1], nodes };
}

test("a hundred times the peers cost nowhere near a hundred times the work", async (t) => {
  const few = await measured(10);
  const many = await measured(1000, async (page) => {
    const rows = await page.locator("#prefill-list .peer").count();
    assert.ok(rows > 0 && rows < 40, `${rows} of 500 rows exist`);
    await page.locator("#prefill-list").focus();
    await page.keyboard.press("End");
    await page.locator("#peer-prefill-500").waitFor();
    assert.equal(await page.locator("#peer-prefill-500").getAttribute("aria-posinset"), "500");
    await page.locator("#tab-matrix").click();
    assert.match(await page.locator("#panel-matrix").innerText(), /250000 of 250000 pairs are used/);
    await page.locator("#tab-peers").click();
    assert.equal(await page.locator("#panel-peers tbody tr").count(), 50);
  });
  t.diagnostic(`median draw: ${few.median.toFixed(2)} ms for 10 peers, ${many.median.toFixed(2)} ms for 1000`);
  t.diagnostic(`elements: ${few.nodes} for 10 peers, ${many.nodes} for 1000`);
  assert.ok(many.median < few.median * 20, `${many.median} ms against ${few.median} ms`);
  assert.ok(many.nodes < few.nodes * 5, `${many.nodes} elements against ${few.nodes}`);
});

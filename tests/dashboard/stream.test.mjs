// A thousand peers in a real router, over its own stream of events. What a frame costs the page is compared with what
// it costs with a hundred, on the same machine.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Router, browse, close, live, open } from "./support.mjs";

const CHANGES = 4;

let browser;

before(async () => {
  browser = await browse();
});

after(async () => {
  await browser?.close();
});

/** A router with so many peers, of which one pair lives. The others refuse their probes, which are few. */
async function fleet(peers) {
  const others = Array.from({ length: peers / 2 - 1 }, (_, at) => at);
  const flags = ["prefill", "decode"].flatMap((role) => others.flatMap((at) => [`--${role}`, `http://127.0.0.1:9/${role}-${at}`]));
  const settings = { "fleet.embedded": "always", "probe.interval": "1h", "probe.metrics_interval": "0s" };
  return Router.start(settings, flags);
}

/** Draws of a page while operators change peers one after the other, each change seen before the next. */
async function measured(peers, look = async () => {}) {
  const router = await fleet(peers);
  try {
    const all = (await router.admin("peers")).peers;
    assert.equal(all.length, peers);
    const page = await open(browser, router.url);
    await live(page);
    // The one that lives is the last.
    const { id } = all.find((peer) => peer.role === "prefill" && peer.state === "ready");
    await page.locator("#prefill-list .peer").first().waitFor();
    await page.locator("#prefill-list").focus();
    await page.keyboard.press("End");
    await page.locator(`#peer-${id} .word`, { hasText: "open" }).waitFor();
    assert.equal(await page.locator(`#peer-${id}`).getAttribute("aria-posinset"), String(peers / 2));
    const draws = () => page.evaluate(() => performance.getEntriesByName("kvbaton-draw").map((one) => one.duration));
    const begun = (await draws()).length;
    for (let change = 0; change < CHANGES; change += 1) {
      const drains = change % 2 === 0;
      // Some others change with it, far from each other.
      const others = all.filter((peer) => peer.id !== id);
      const some = others.filter((_, at) => at % (peers / 10) === change);
      const changed = [id, ...some.map((peer) => peer.id)];
      await Promise.all(changed.map((one) => router.admin(`peers/${one}/${drains ? "drain?timeout=0" : "resume"}`, { method: "POST" })));
      const word = page.locator(`#peer-${id} .word`, { hasText: drains ? "drained" : "open" });
      await word.waitFor();
    }
    const times = (await draws()).slice(begun).sort((one, other) => one - other);
    const nodes = await page.evaluate(() => document.querySelectorAll("*").length);
    await look(page);
    await close(page);
    return { median: times[times.length >> 1], frames: times.length, nodes };
  } finally {
    await router.stop();
  }
}

test("a thousand peers over the real stream", async (t) => {
  const few = await measured(100);
  const many = await measured(1000, async (page) => {
    await page.locator("#tab-matrix").click();
    assert.match(await page.locator("#panel-matrix").innerText(), /of 250000 pairs are used/);
  });
  for (const [peers, seen] of [[100, few], [1000, many]]) {
    t.diagnostic(`${peers} peers: ${seen.frames} frames, median draw ${seen.median.toFixed(2)} ms, ${seen.nodes} elements`);
    assert.ok(seen.frames >= CHANGES, `${seen.frames} frames for ${CHANGES} changes`);
  }
  assert.ok(many.median < few.median * 20, `${many.median} ms against ${few.median} ms`);
  assert.ok(many.nodes < few.nodes * 3, `${many.nodes} elements against ${few.nodes}`);
});

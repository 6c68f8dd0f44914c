// What an operator sees and does, in a real browser.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Router, browse, close, live, open, violations } from "./support.mjs";

let router;
let browser;

before(async () => {
  router = await Router.start({ "fleet.prefill": 2, "fleet.decode": 2 });
  browser = await browse();
});

after(async () => {
  await browser?.close();
  await router?.stop();
});

const peer = async (id) => (await router.admin("peers")).peers.find((one) => one.id === id);
const text = (page, selector) => page.locator(selector).innerText();

/** Waits until an element says this. */
async function says(page, selector, words) {
  await page.locator(selector, { hasText: words }).first().waitFor();
}

test("the page stands by itself and may load nothing from elsewhere", async () => {
  const answer = await fetch(`${router.url}/dashboard`);
  assert.equal(answer.status, 200);
  const policy = answer.headers.get("content-security-policy");
  assert.match(policy, /default-src 'none'; script-src 'self'; style-src 'self'/);
  assert.doesNotMatch(policy, /unsafe/);
  const html = await answer.text();
  assert.doesNotMatch(html, /<script>|<style|style=|https?:/);
  const page = await open(browser, router.url);
  await live(page);
  await close(page);
});

test("the fleet is drawn, prefill on the left and decode on the right", async () => {
  const page = await open(browser, router.url);
  await live(page);
  for (const id of ["prefill-1", "prefill-2", "decode-1", "decode-2"]) {
    await says(page, `#peer-${id} .word`, "open");
  }
  const left = await page.locator("#peer-prefill-1").boundingBox();
  const right = await page.locator("#peer-decode-1").boundingBox();
  assert.ok(left.x + left.width < right.x, "prefill peers stand left of decode peers");
  assert.equal(await text(page, "#total-prefill"), "2");
  assert.equal(await text(page, "#total-decode"), "2");
  await says(page, "#peer-prefill-1 .kv", /KV \d+ %/);
  await page.locator("#tab-matrix").click();
  assert.equal(await page.locator("#panel-matrix table.grid td.used").count(), 4);
  assert.match(await text(page, "#panel-matrix"), /4 of 4 pairs are used/);
  await close(page);
});

test("a request shows up while it runs, and its timeline by its id", async () => {
  const page = await open(browser, router.url);
  await live(page);
  await router.arm("decode", { kind: "slow_chunks", millis: 400, sticky: true });
  const running = router.complete("seen-while-it-runs");
  const row = page.locator("#panel-requests tbody tr", { hasText: "seen-while-it-runs" });
  await row.locator("td", { hasText: "running" }).waitFor();
  await row.locator("button").click();
  await says(page, ".timeline .hint", "runs");
  assert.match(await running, /\[DONE\]/);
  await router.arm("decode");
  await row.locator("td", { hasText: "200 served" }).waitFor();
  await says(page, ".timeline .hint", "ended with 200, served");
  const steps = await page.locator(".timeline tbody th").allInnerTexts();
  assert.deepEqual(steps, [
    "Received", "Body read", "Admitted", "Decode peer chosen", "Prefill peer chosen", "Prefill sent", "Prefill answered",
    "Handed off", "Decode sent", "Decode answered", "First byte", "First token", "Ended",
  ]);
  const bars = await page.locator(".bar-row .bar-name").allInnerTexts();
  assert.deepEqual(bars.slice(-3), ["Prefill", "Hand-off", "Tokens"]);

  await page.locator("#tab-pairs").click();
  await says(page, "#panel-pairs tbody tr", /prefill-\d\s*decode-\d\s*0\.\d+/);
  await page.locator("#tab-requests").click();
  await page.locator("#request-id").fill("nobody-sent-this");
  await page.locator("#request-id").press("Enter");
  await says(page, ".timeline .fault", "nothing is known of a request `nobody-sent-this`");
  // The browser itself tells of a 404.
  assert.equal(page.faults.filter((fault) => !fault.includes("404")).length, 0);
  await page.context().close();
});

test("a link leads to a request", async () => {
  await router.complete("linked");
  const page = await open(browser, router.url);
  await page.goto(`${router.url}/dashboard#request=linked`);
  await says(page, "#timeline-title", "Timeline of linked");
  await says(page, ".timeline .hint", "ended with 200");
  await close(page);
});

test("live hand-offs show their leases running down", async () => {
  const page = await open(browser, router.url);
  await live(page);
  await page.locator("#tab-handoffs").click();
  await says(page, "#panel-handoffs .hint", "No prefill engine holds blocks");
  await router.arm("decode", { kind: "stall", stage: "before_head", leg: "decode", sticky: true });
  const abort = new AbortController();
  const body = JSON.stringify({ model: "sim", prompt: "A long tale of a lease that runs down.", max_tokens: 2 });
  const headers = { "content-type": "application/json", "x-request-id": "leased" };
  const waiting = fetch(`${router.url}/v1/completions`, { method: "POST", headers, body, signal: abort.signal });
  waiting.catch(() => {});
  const row = page.locator("#panel-handoffs tbody tr", { hasText: "leased" });
  await row.locator("td", { hasText: "dispatched" }).waitFor();
  const left = async () => Number.parseFloat(await row.locator("td:last-child span").innerText());
  const first = await left();
  assert.ok(first > 0 && first <= 30, `a lease of 30 s has ${first} s left`);
  await router.until("the lease runs down", async () => (await left()) < first);
  assert.equal(await text(page, "#total-live"), "1");
  abort.abort();
  await router.arm("decode");
  await says(page, "#panel-handoffs .hint", "No prefill engine holds blocks");
  await close(page);
});

test("a peer is drained and resumed by its buttons", async () => {
  const page = await open(browser, router.url);
  await live(page);
  await page.locator("#peer-decode-2").click();
  assert.equal(await text(page, "#detail-title"), "decode-2");
  await page.locator('[data-action="drain"]').click();
  assert.equal(await text(page, "#confirm-title"), "Drain decode-2?");
  await page.locator("#confirm-no").click();
  assert.equal((await peer("decode-2")).drained, false, "nothing is done without a yes");
  await page.locator('[data-action="drain"]').click();
  await page.locator("#confirm-yes").click();
  await says(page, "#peer-decode-2 .word", "drained");
  await says(page, ".toast", "decode-2 is drained");
  assert.equal((await peer("decode-2")).drained, true);
  assert.equal(await page.locator('[data-action="drain"]').isDisabled(), true);
  assert.equal(await text(page, "#total-decode"), "1");
  await page.locator('[data-action="resume"]').click();
  await page.locator("#confirm-yes").click();
  await says(page, "#peer-decode-2 .word", "open");
  assert.equal((await peer("decode-2")).drained, false);
  await close(page);
});

test("a peer is quarantined with the keyboard alone", async () => {
  const page = await open(browser, router.url);
  await live(page);
  const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.dataset.action || "");
  const tabTo = async (wanted) => {
    for (let presses = 0; presses < 40; presses += 1) {
      if ((await focused()) === wanted) return;
      await page.keyboard.press("Tab");
    }
    assert.fail(`${wanted} cannot be reached, the focus is on ${await focused()}`);
  };
  await page.locator("#peer-prefill-2").waitFor();
  await tabTo("prefill-list");
  await page.keyboard.press("End");
  const isActive = (wanted) => page.waitForFunction(
    (id) => document.getElementById("prefill-list").getAttribute("aria-activedescendant") === id, wanted);
  await isActive("peer-prefill-2");
  await page.keyboard.press("ArrowUp");
  await isActive("peer-prefill-1");
  await page.keyboard.press("Enter");
  assert.equal(await focused(), "detail");
  await tabTo("quarantine");
  await page.keyboard.press("Enter");
  assert.equal(await focused(), "confirm-yes");
  await page.keyboard.press("Enter");
  await says(page, "#peer-prefill-1 .word", "quarantined");
  await says(page, "#news", /prefill-1 is quarantined/);
  assert.equal((await peer("prefill-1")).quarantined, true);
  await tabTo("tab-requests");
  for (let right = 0; right < 3; right += 1) await page.keyboard.press("ArrowRight");
  assert.equal(await focused(), "tab-matrix");
  await says(page, "#panel-matrix", "quarantined by an operator");
  assert.equal(await page.locator("#panel-matrix table.grid td.unused").count(), 2);
  await router.admin("peers/prefill-1/resume", { method: "POST" });
  await says(page, "#peer-prefill-1 .word", "open");
  await close(page);
});

test("a peer that leaves the fleet leaves the page", async () => {
  const spec = JSON.stringify({ role: "decode", url: "http://127.0.0.1:9", name: "d-gone" });
  const headers = { "content-type": "application/json" };
  await router.admin("peers", { method: "POST", headers, body: spec });
  const page = await open(browser, router.url);
  await live(page);
  await says(page, "#peer-d-gone .word", "unreachable");
  await page.locator("#peer-d-gone").click();
  await page.locator('[data-action="remove"]').click();
  assert.equal(await page.evaluate(() => document.activeElement.id), "confirm-no", "Enter must not remove");
  await page.locator("#confirm-yes").click();
  await says(page, "#detail-title", "d-gone is gone");
  assert.equal(await page.locator("#peer-d-gone").count(), 0);
  assert.equal(await peer("d-gone"), undefined);
  await close(page);
});

test("peers are found by name, and the table has them all", async () => {
  const page = await open(browser, router.url);
  await live(page);
  await page.locator("#peer-filter").fill("decode-1");
  await says(page, "#prefill-count", "0 of 2");
  assert.equal(await page.locator("#decode-list .peer").count(), 1);
  await page.locator("#tab-peers").click();
  const names = await page.locator("#panel-peers tbody th").allInnerTexts();
  assert.deepEqual(names, ["prefill-1", "prefill-2", "decode-1", "decode-2"]);
  await close(page);
});

test("dark and light follow the system until somebody chooses", async () => {
  const page = await open(browser, router.url, { colorScheme: "dark" });
  await live(page);
  const back = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  assert.equal(await back(), "rgb(15, 21, 27)");
  await page.emulateMedia({ colorScheme: "light" });
  assert.equal(await back(), "rgb(244, 246, 248)");
  await page.locator("#theme-button").click();
  await page.locator("#theme-button").click();
  assert.equal(await text(page, "#theme-button"), "Theme: dark");
  assert.equal(await back(), "rgb(15, 21, 27)");
  await page.reload();
  await live(page);
  assert.equal(await back(), "rgb(15, 21, 27)", "the choice is kept");
  await close(page);
});

test("nothing moves for those who want it still", async () => {
  const page = await open(browser, router.url, { reducedMotion: "reduce" });
  await live(page);
  await router.complete("still-1");
  await page.locator("#tab-pairs").click();
  await page.locator("#panel-pairs tbody tr").first().waitFor();
  const drawn = () =>
    page.evaluate(
      () =>
        new Promise((resolve) => {
          const pen = CanvasRenderingContext2D.prototype;
          const arc = pen.arc;
          let dots = 0;
          pen.arc = function (...args) {
            dots += 1;
            return arc.apply(this, args);
          };
          // Ten frames that the browser has shown.
          let frames = 0;
          const step = () => (++frames < 10 ? requestAnimationFrame(step) : resolve(((pen.arc = arc), dots)));
          requestAnimationFrame(step);
        }),
    );
  assert.equal(await drawn(), 0);
  await page.emulateMedia({ reducedMotion: "no-preference" });
  assert.notEqual(await drawn(), 0);
  await close(page);
});

test("axe finds nothing to complain of", async () => {
  for (const colorScheme of ["light", "dark"]) {
    const page = await open(browser, router.url, { colorScheme });
    await live(page);
    await router.complete(`for-axe-${colorScheme}`);
    await page.locator("#panel-requests tbody button", { hasText: `for-axe-${colorScheme}` }).click();
    await says(page, ".timeline .hint", "ended with 200");
    await page.locator("#peer-prefill-1").click();
    for (const tab of ["requests", "handoffs", "pairs", "matrix", "peers"]) {
      await page.locator(`#tab-${tab}`).click();
      assert.deepEqual(await violations(page), [], `${colorScheme}, ${tab}`);
    }
    await page.locator('[data-action="remove"]').click();
    assert.deepEqual(await violations(page), [], `${colorScheme}, the question`);
    await page.locator("#confirm-no").click();
    await page.locator("#token-button").click();
    assert.deepEqual(await violations(page), [], `${colorScheme}, the token`);
    await close(page);
  }
});

test("a token is asked for, refused where it is wrong, and kept in the tab only", async () => {
  const guarded = await Router.start({ "admin.token": "right-token" });
  try {
    const page = await open(browser, guarded.url);
    await page.locator("#token-dialog[open]").waitFor();
    await says(page, "#trouble", "needs a token");
    assert.equal(await page.evaluate(() => document.activeElement.id), "token");
    await page.keyboard.type("wrong-token");
    await page.keyboard.press("Enter");
    await says(page, "#token-fault", "The token is wrong.");
    assert.equal(await page.locator("#link").getAttribute("data-state"), "refused");
    await page.locator("#token").fill("right-token");
    await page.locator("#token-use").click();
    await live(page);
    await says(page, "#peer-prefill-1 .word", "open");
    assert.equal(await page.locator("#token-dialog").isVisible(), false);
    const kept = await page.evaluate(() => [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]);
    assert.match(kept[0], /right-token/);
    assert.doesNotMatch(kept[1] + kept[2] + page.url(), /right-token/);
    await page.reload();
    await live(page);
    await page.locator("#token-button").click();
    await page.locator("#token-forget").click();
    await page.locator('#link[data-state="refused"]').waitFor();
    assert.equal(await page.evaluate(() => sessionStorage.length), 0);
    // The browser itself tells of each 401, and nobody else of anything.
    assert.deepEqual(page.faults.filter((fault) => !fault.includes("401")), []);
    await page.context().close();
  } finally {
    await guarded.stop();
  }
});

test("the page comes back when the router does", async () => {
  const first = await Router.start();
  const page = await open(browser, first.url);
  await live(page);
  await first.stop();
  await says(page, "#link-text", "Connection lost");
  const again = await Router.start({ listen: new URL(first.url).host });
  try {
    await live(page);
    await says(page, "#peer-prefill-1 .word", "open");
    assert.deepEqual(page.faults.filter((fault) => !fault.includes("ERR_")), []);
    await page.context().close();
  } finally {
    await again.stop();
  }
});

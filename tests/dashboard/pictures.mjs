// Makes the pictures of docs/images: a small fleet with some traffic, light and dark.

import { mkdirSync } from "node:fs";

import { Router, browse, close, live, open } from "./support.mjs";

const PICTURES = new URL("../../docs/images/", import.meta.url).pathname;
const CLIENTS = ["chat", "search", "agent", "mail", "code", "batch"];

mkdirSync(PICTURES, { recursive: true });
const router = await Router.start({ "fleet.prefill": 3, "fleet.decode": 4 });
const browser = await browse();
await router.arm("decode", { kind: "slow_chunks", millis: 25, sticky: true });
let stop = false;
const workers = CLIENTS.map(async (name) => {
  for (let turn = 0; !stop; turn += 1) await router.complete(`${name}-${turn}`, { max_tokens: 12 });
});
for (const colorScheme of ["light", "dark"]) {
  const page = await open(browser, router.url, { colorScheme });
  await live(page);
  await page.locator("#peer-prefill-2").click();
  await page.locator("#panel-requests tbody tr", { hasText: "200 served" }).nth(3).locator("button").click();
  await page.locator(".timeline .hint", { hasText: "ended with 200" }).waitFor();
  const rate = async () => Number(await page.locator("#total-rate").innerText());
  await router.until("there are rates over whole seconds", async () => (await rate()) > 1);
  await page.evaluate(() => scrollTo(0, 0));
  await page.screenshot({ path: `${PICTURES}dashboard-${colorScheme}.png` });
  await close(page);
}
stop = true;
await Promise.all(workers);
await browser.close();
await router.stop();

// The program with its embedded fleet, and a browser that looks at it.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

// The packages are installed outside of the repository.
const require = createRequire(pathToFileURL(`${process.env.KVBATON_NODE}/package.json`));
export const { chromium } = require("playwright-core");
export const axe = require("axe-core").source;

/** Far above what a loaded machine needs. */
export const PATIENCE = 180_000;

/** A router and its embedded fleet. */
export class Router {
  static async start(settings = {}, args = []) {
    const router = new Router();
    const set = Object.entries({ listen: "127.0.0.1:0", "probe.metrics_interval": "300ms", ...settings });
    const flags = set.flatMap(([key, value]) => ["--set", `${key}=${value}`]);
    const env = { PATH: process.env.PATH };
    router.process = spawn(process.env.KVBATON_BIN, [...flags, ...args], { env, stdio: ["ignore", "pipe", "ignore"] });
    router.engines = { prefill: [], decode: [] };
    for await (const line of createInterface({ input: router.process.stdout })) {
      const url = line.split(/\s+/).find((word) => word.startsWith("http"));
      if (line.includes("listens on")) router.url = url;
      else if (line.includes("prefill engine") && url) router.engines.prefill.push(url);
      else if (line.includes("decode engine") && url) router.engines.decode.push(url);
      if (line.includes("curl")) break;
    }
    await router.until("the router is ready", async () => (await fetch(`${router.url}/readyz`)).ok);
    return router;
  }

  async until(what, holds) {
    const end = Date.now() + PATIENCE;
    while (!(await holds())) {
      assert.ok(Date.now() < end, `it did not come to hold: ${what}`);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  }

  /** A streamed completion under this id; its text when it has ended. */
  async complete(id, more = {}) {
    const body = { model: "sim", prompt: `Tell me of ${id}, and of the sea and the wind.`, max_tokens: 8, stream: true, ...more };
    const headers = { "content-type": "application/json", "x-request-id": id };
    const answer = await fetch(`${this.url}/v1/completions`, { method: "POST", headers, body: JSON.stringify(body) });
    assert.equal(answer.status, 200);
    return answer.text();
  }

  async admin(path, options) {
    return (await fetch(`${this.url}/admin/${path}`, options)).json();
  }

  /** Makes all engines of a role misbehave, or behave again. */
  async arm(role, ...faults) {
    const request = { method: "POST", headers: { "content-type": "application/json" } };
    const body = JSON.stringify({ clear: true, arm: faults });
    for (const engine of this.engines[role]) await (await fetch(`${engine}/sim/faults`, { ...request, body })).text();
  }

  async stop() {
    this.process.kill("SIGTERM");
    if (this.process.exitCode === null) await once(this.process, "exit");
  }
}

/** Starts a browser; needs no display and no rights of its own. */
export function browse() {
  return chromium.launch({
    executablePath: process.env.KVBATON_CHROMIUM,
    args: ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
  });
}

/** A page whose console is listened to: `page.faults` are the errors that it told. */
export async function open(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1400, height: 900 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  page.faults = [];
  page.on("console", (message) => {
    if (message.type() === "error" || message.type() === "warning") page.faults.push(message.text());
  });
  page.on("pageerror", (error) => page.faults.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith(new URL(url).origin)) page.faults.push(`asked elsewhere: ${request.url()}`);
  });
  await page.goto(`${url}/dashboard`);
  return page;
}

export async function live(page) {
  await page.locator('#link[data-state="live"]').waitFor();
}

/** Ends a page, which must have had nothing to complain of. */
export async function close(page) {
  assert.deepEqual(page.faults, []);
  await page.context().close();
}

/** What axe finds wrong with the page as it is. */
export async function violations(page) {
  // The policy allows no script but the page's own files; this one comes through the debugger.
  await page.evaluate(axe);
  const found = await page.evaluate(() =>
    window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"] }),
  );
  return found.violations.map((one) => `${one.id}: ${one.nodes.map((node) => `${node.target} ${node.failureSummary}`).join(" | ")}`);
}

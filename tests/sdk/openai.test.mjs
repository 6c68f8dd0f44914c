// The official JavaScript SDK of OpenAI. KVBATON_URL is a router with an embedded fleet.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

// The packages are installed outside of the repository.
const require = createRequire(pathToFileURL(`${process.env.KVBATON_NODE}/package.json`));
const sdk = require("openai");
const OpenAI = sdk.default;
const url = process.env.KVBATON_URL;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me of the sea, in a few words." }];
const ask = { model: "sim", messages, max_tokens: 24, temperature: 0 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

async function metric(...marks) {
  const page = await (await fetch(`${url}/metrics`)).text();
  const lines = page.split("\n").filter((line) => marks.every((mark) => line.includes(mark)));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").pop()), 0);
}

async function until(holds) {
  const end = Date.now() + 60_000;
  while (!(await holds())) {
    assert.ok(Date.now() < end, "it did not come to hold");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

test("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids, ["sim"]);
  assert.equal((await client.models.retrieve("sim")).id, "sim");
});

test("chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create(ask);
  const text = whole.choices[0].message.content;
  assert.equal(text.length, 24);
  const stream = await client.chat.completions.create({
    ...ask, stream: true, stream_options: { include_usage: true },
  });
  let streamed = "";
  let usage = null;
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.deepEqual(usage.total_tokens, whole.usage.total_tokens);
});

test("completions, whole and streamed", async () => {
  const body = { model: "sim", prompt: "Once upon a time", max_tokens: 12, temperature: 0 };
  const whole = await client.completions.create(body);
  let streamed = "";
  for await (const piece of await client.completions.create({ ...body, stream: true })) streamed += piece.choices[0].text;
  assert.equal(streamed, whole.choices[0].text);
});

test("tool calls, whole and streamed", async () => {
  const body = { ...ask, tools: [weather], max_tokens: 200 };
  const whole = (await client.chat.completions.create(body)).choices[0];
  assert.equal(whole.finish_reason, "tool_calls");
  const [call] = whole.message.tool_calls;
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
  const final = await client.chat.completions.stream(body).finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  const runner = client.chat.completions.runTools({
    ...body,
    tools: [{ type: "function", function: { ...weather.function, function: (text) => `rain in ${JSON.parse(text).city}` } }],
  });
  // The simulated engine writes until it may write no more, of which the SDK makes an error.
  await assert.rejects(runner.finalContent(), /length limit/);
  assert.ok(runner.messages.some((message) => message.role === "tool" && message.content.startsWith("rain in ")));
});

test("JSON mode and JSON schema", async () => {
  const mode = await client.chat.completions.create({ ...ask, max_tokens: 200, response_format: { type: "json_object" } });
  assert.deepEqual(Object.keys(JSON.parse(mode.choices[0].message.content)), ["answer"]);
  const schema = {
    type: "object", additionalProperties: false, required: ["name", "age"],
    properties: { name: { type: "string" }, age: { type: "integer" } },
  };
  const response_format = { type: "json_schema", json_schema: { name: "person", strict: true, schema } };
  const parsed = await client.chat.completions.parse({ ...ask, max_tokens: 200, response_format });
  assert.deepEqual(Object.keys(parsed.choices[0].message.parsed), ["name", "age"]);
});

test("log probabilities and several choices", async () => {
  const logged = await client.chat.completions.create({ ...ask, logprobs: true, top_logprobs: 2, max_tokens: 4 });
  assert.equal(logged.choices[0].logprobs.content.length, 4);
  const several = await client.chat.completions.create({ ...ask, n: 3, temperature: 1, seed: 7 });
  assert.equal(new Set(several.choices.map((choice) => choice.message.content)).size, 3);
});

test("errors are the SDK's own", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask, model: "absent" }), sdk.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...ask, temperature: -1 }), (error) => {
    assert.ok(error instanceof sdk.BadRequestError);
    return error.param === "temperature";
  });
});

test("the SDK tries again after a refusal for now", async () => {
  const arm = [{ kind: "refuse", status: 429, body: { error: { message: "later" } }, leg: "any" }];
  const head = { "content-type": "application/json" };
  await fetch(`${process.env.KVBATON_DECODE}/sim/faults`, { method: "POST", headers: head, body: JSON.stringify({ arm }) });
  const before = await metric("kvbaton_requests_total{", 'status="429"');
  const answer = await client.chat.completions.create(ask, { maxRetries: 2 });
  assert.equal(answer.choices[0].message.content.length, 24);
  assert.equal(await metric("kvbaton_requests_total{", 'status="429"'), before + 1);
});

test("a stream that is aborted ends", async () => {
  const before = await metric("kvbaton_requests_total{", 'status="499"');
  const arm = [{ kind: "slow_chunks", millis: 20, leg: "decode" }];
  const head = { "content-type": "application/json" };
  await fetch(`${process.env.KVBATON_DECODE}/sim/faults`, { method: "POST", headers: head, body: JSON.stringify({ arm }) });
  const stream = await client.chat.completions.create({ ...ask, stream: true, max_tokens: 2000 });
  let seen = 0;
  for await (const _ of stream) {
    seen += 1;
    if (seen === 3) stream.controller.abort();
  }
  assert.ok(seen < 2000);
  await until(async () => (await metric("kvbaton_requests_total{", 'status="499"')) === before + 1);
});

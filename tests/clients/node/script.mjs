// What a program does with OpenAI's client for Node. Reads what it needs as JSON from standard input; prints a line of
// JSON for each case: {"case": NAME, "found": what the test checks} or {"case": NAME, "failed": the error}.

import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const given = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: given.base_url, apiKey: given.key, maxRetries: 0, timeout: 60_000 });
const question = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "Grüße, 世界! What is new?" },
];
const asked = { model: given.text, messages: question, temperature: 0, max_tokens: 40 };
const person = z.object({ name: z.enum(["Ada", "Bob"]), age: z.number().int().min(1).max(99), well: z.boolean() });
const verdict = z.object({ verdict: z.enum(["good", "bad"]) });

const read = {
  type: "function",
  function: {
    name: "read_file",
    strict: true,
    parameters: {
      type: "object",
      properties: { path: { type: "string", enum: Object.keys(given.files) } },
      required: ["path"],
      additionalProperties: false,
    },
  },
};
const call_it = { type: "function", function: { name: "read_file" } };

async function models() {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  return { ids, one: (await client.models.retrieve(given.text)).id };
}

async function chat() {
  const answer = await client.chat.completions.create(asked);
  const choice = answer.choices[0];
  return { text: choice.message.content, reason: choice.finish_reason, usage: answer.usage };
}

async function stream() {
  const chunks = await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let reason = null;
  let usage = null;
  let pieces = 0;
  for await (const chunk of chunks) {
    pieces += 1;
    text += chunk.choices[0]?.delta.content ?? "";
    reason = chunk.choices[0]?.finish_reason ?? reason;
    usage = chunk.usage ?? usage;
  }
  return { text, reason, usage, pieces };
}

// The model has to call the tool; the tool is run; then the model has to say what it thinks of the result.
async function round_trip(answer_of) {
  const messages = [...question];
  const body = { ...asked, messages, tools: [read], max_tokens: 200 };
  const first = await answer_of({ ...body, tool_choice: call_it });
  const [call] = first.choices[0].message.tool_calls;
  const { path } = JSON.parse(call.function.arguments);
  messages.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: given.files[path] });
  const form = zodResponseFormat(verdict, "verdict");
  const second = await answer_of({ ...body, tool_choice: "none", response_format: form });
  return {
    path,
    reasons: [first.choices[0].finish_reason, second.choices[0].finish_reason],
    text: second.choices[0].message.content,
    known: first.usage.prompt_tokens + first.usage.completion_tokens,
    cached: second.usage.prompt_tokens_details.cached_tokens,
  };
}

const tools = () => round_trip((body) => client.chat.completions.create(body));

const tools_streamed = () =>
  round_trip((body) =>
    client.chat.completions.stream({ ...body, stream_options: { include_usage: true } }).finalChatCompletion(),
  );

async function structured() {
  const answer = await client.chat.completions.parse({
    ...asked,
    max_tokens: 200,
    response_format: zodResponseFormat(person, "person"),
  });
  return answer.choices[0].message.parsed;
}

async function completion() {
  const answer = await client.completions.create({ model: given.text, prompt: ["one", "two"], max_tokens: 3, echo: true });
  return answer.choices.map((choice) => choice.text);
}

async function images() {
  const found = [];
  for (const url of given.pictures) {
    const content = [
      { type: "text", text: "What is this?" },
      { type: "image_url", image_url: { url } },
    ];
    const rules = { role: "system", content: "Say what you see. ".repeat(8) };
    const body = { ...asked, model: given.pictures_model, messages: [rules, { role: "user", content }] };
    const answer = await client.chat.completions.create(body);
    const cached = answer.usage.prompt_tokens_details.cached_tokens;
    found.push({ text: answer.choices[0].message.content, prompt: answer.usage.prompt_tokens, cached });
  }
  return found;
}

// This client asks for base64 and decodes it, unless told otherwise.
async function embeddings() {
  const body = { model: given.vectors_model, input: given.inputs };
  const decoded = await client.embeddings.create(body);
  const floats = await client.embeddings.create({ ...body, encoding_format: "float" });
  const vectors = (answer) => answer.data.map((item) => Array.from(item.embedding));
  return { decoded: vectors(decoded), floats: vectors(floats), usage: decoded.usage };
}

async function closed() {
  const chunks = await client.chat.completions.create({
    ...asked,
    stream: true,
    max_tokens: 3000,
    ignore_eos: true,
  });
  for await (const _ of chunks) break;
  return { after: (await client.chat.completions.create({ ...asked, max_tokens: 2 })).usage.completion_tokens };
}

async function error_of(work) {
  try {
    await work();
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
  return { kind: "none" };
}

async function errors() {
  const chat_with = (fields) => error_of(() => client.chat.completions.create({ ...asked, ...fields }));
  const stranger = new OpenAI({ baseURL: given.base_url, apiKey: "wrong", maxRetries: 0 });
  return {
    temperature: await chat_with({ temperature: 3 }),
    streamed: await chat_with({ temperature: 3, stream: true }),
    tools: await chat_with({ tools: [{ type: "function", function: {} }] }),
    length: await chat_with({ messages: [{ role: "user", content: "x".repeat(1_000_000) }] }),
    model: await chat_with({ model: "nobody/knows" }),
    picture: await chat_with({
      model: given.pictures_model,
      messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } }] }],
    }),
    key: await error_of(() => stranger.models.list()),
  };
}

const cases = {
  models, chat, stream, tools, tools_streamed, structured, completion, images, embeddings, closed, errors,
};
for (const [name, run] of Object.entries(cases)) {
  let line;
  try {
    line = { case: name, found: await run() };
  } catch (error) {
    line = { case: name, failed: `${error.stack}` };
  }
  console.log(JSON.stringify(line));
}

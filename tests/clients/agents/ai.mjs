// A tool loop of the AI SDK over `model`, which the lines before these have made. Prints the final text.
import { execFileSync } from "node:child_process";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const bash = tool({
  description: "Run a command",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execFileSync("sh", ["-c", command], { encoding: "utf8" }),
});
const result = streamText({
  model,
  system: "You are careful.",
  prompt: process.env.TASK,
  tools: { bash },
  stopWhen: stepCountIs(9),
  onError: ({ error }) => { console.error(error); process.exit(1); },
});
console.log(await result.text);

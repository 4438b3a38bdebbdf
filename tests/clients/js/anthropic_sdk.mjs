// The official Anthropic JavaScript SDK. argv: base URL. Prints one JSON object: what each call gave.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const shared = { model: "m", max_tokens: 100, messages };
const out = {};

const whole = await client.messages.create({ ...shared, thinking: { type: "adaptive" } });
out.message = { types: whole.content.map((block) => block.type), usage: whole.usage, stop: whole.stop_reason };

const stream = client.messages.stream({ ...shared, thinking: { type: "adaptive" } });
let deltas = "";
let thinking = "";
stream.on("text", (delta) => (deltas += delta));
stream.on("thinking", (delta) => (thinking += delta));
const streamed = await stream.finalMessage();
out.stream = { deltas, thinking, signature: streamed.content[0].signature, usage: streamed.usage };

const ran = [];
const read = betaZodTool({
  name: "read_file",
  description: "Read.",
  inputSchema: z.object({ path: z.string() }),
  run: ({ path }) => {
    ran.push(path);
    return `text of ${path}`;
  },
});
const runner = client.beta.messages.toolRunner({ ...shared, tools: [read], stream: true });
const last = await runner;
out.tool_runner = { ran, text: last.content[0].text };

const Title = z.object({ title: z.string() });
const parsed = await client.messages.parse({ ...shared, output_config: { format: zodOutputFormat(Title) } });
out.parse = parsed.parsed_output;

out.count = (await client.messages.countTokens({ model: "m", messages })).input_tokens;
out.models = [];
for await (const model of client.models.list()) out.models.push([model.id, model.type]);

try {
  await client.messages.create({ ...shared, max_tokens: 0 });
} catch (error) {
  out.error = [error.status, error.type, error.constructor.name];
}
try {
  await client.messages.stream(shared).finalMessage();
} catch (error) {
  out.failure = String(error.message);
}
console.log(JSON.stringify(out));

// The official OpenAI JavaScript SDK. argv: base URL. Prints one JSON object: what each call gave.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const Title = z.object({ title: z.string() });
const out = {};

out.chat = (await client.chat.completions.create({ model: "m", messages })).choices[0].message.content;

const stream = client.chat.completions.stream({ model: "m", messages, stream_options: { include_usage: true } });
let deltas = "";
stream.on("content", (delta) => (deltas += delta));
const streamed = await stream.finalChatCompletion();
out.chat_stream = { deltas, content: streamed.choices[0].message.content, cached: streamed.usage.prompt_tokens_details.cached_tokens };

const ran = [];
const runner = client.chat.completions.runTools({
  model: "m",
  messages,
  stream: true,
  tools: [
    {
      type: "function",
      function: {
        name: "read_file",
        parameters: { type: "object", properties: { path: { type: "string" } } },
        parse: JSON.parse,
        function: ({ path }) => {
          ran.push(path);
          return `text of ${path}`;
        },
      },
    },
  ],
});
out.run_tools = { final: await runner.finalContent(), ran };

const parsed = await client.chat.completions.parse({ model: "m", messages, response_format: zodResponseFormat(Title, "title") });
out.chat_parse = parsed.choices[0].message.parsed;

out.responses = (await client.responses.create({ model: "m", input: "hi" })).output_text;

const kinds = [];
const events = client.responses.stream({ model: "m", input: "hi", reasoning: { effort: "low" } });
events.on("event", (event) => kinds.push(event.type));
const final = await events.finalResponse();
out.responses_stream = { kinds, text: final.output_text, types: final.output.map((item) => item.type) };

out.responses_parse = (
  await client.responses.parse({ model: "m", input: "hi", text: { format: zodTextFormat(Title, "title") } })
).output_parsed;

const tools = [{ type: "function", name: "read_file", parameters: { type: "object" }, strict: false }];
const first = await client.responses.create({ model: "m", input: "hi", tools });
const second = await client.responses.create({
  model: "m",
  tools,
  previous_response_id: first.id,
  input: [{ type: "function_call_output", call_id: first.output[0].call_id, output: "text" }],
});
out.stored = { arguments: first.output[0].arguments, text: second.output_text };

out.errors = [];
for (const body of [{ input: "hi", background: true }, { input: "hi", previous_response_id: "resp_none" }]) {
  try {
    await client.responses.create({ model: "m", ...body });
  } catch (error) {
    out.errors.push([error.status, error.code, error.constructor.name]);
  }
}
out.models = [];
for await (const model of client.models.list()) out.models.push(model.id);
console.log(JSON.stringify(out));

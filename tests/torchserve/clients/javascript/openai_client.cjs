// Uses OpenAI's client for JavaScript as a user does: openai_client.cjs RUNTIME_URL PICTURE (a data URL).
// Prints the results as one line of JSON.
const { OpenAI } = require("openai");

const [, , address, picture] = process.argv;
const gpt = new OpenAI({ baseURL: `${address}/v1`, apiKey: "any", timeout: 90_000, maxRetries: 0 });
const model = "llava";
const text = "What color is the circle?";
const messages = [{ role: "user", content: [{ type: "text", text }, { type: "image_url", image_url: { url: picture } }] }];
const input = [{ role: "user", content: [{ type: "input_text", text }, { type: "input_image", image_url: picture }] }];
const parameters = {
  type: "object",
  properties: { color: { enum: ["red"] } },
  required: ["color"],
  additionalProperties: false,
};

async function collect(stream, read) {
  const found = [];
  for await (const event of stream) found.push(read(event));
  return found;
}

async function refusal(call) {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status, error.code];
  }
}

async function chat() {
  const whole = await gpt.chat.completions.create({ model, messages });
  const pieces = await collect(
    await gpt.chat.completions.create({ model, messages, stream: true }),
    (chunk) => chunk.choices[0].delta.content,
  );
  const schema = { name: "answer", strict: true, schema: parameters };
  const parsed = await gpt.chat.completions.parse({
    model,
    messages,
    response_format: { type: "json_schema", json_schema: schema },
  });

  const painted = [];
  const paint = { name: "paint", parameters, parse: JSON.parse, function: async (given) => painted.push(given.color) };
  const tool_choice = { type: "function", function: { name: "paint" } };
  const runner = gpt.chat.completions.runTools({
    ...{ model, messages, stream: true, tool_choice },
    tools: [{ type: "function", function: paint }],
  });
  await runner.done();

  const long = await gpt.chat.completions.create({ model, messages, stream: true, min_tokens: 1500, max_tokens: 1900 });
  let num_read = 0;
  for await (const _ of long) if (++num_read === 5) long.controller.abort();

  return {
    whole: whole.choices[0].message.content,
    pieces,
    parsed: parsed.choices[0].message.parsed,
    painted,
    calling: runner.messages.at(-2).content,
    num_read,
  };
}

async function responses() {
  const first = await gpt.responses.create({ model, input });
  const next = await gpt.responses.create({ model, input: "What shape is it?", previous_response_id: first.id });

  const begun = await gpt.responses.create({ model, input, background: true, stream: true });
  let id, number;
  for await (const event of begun) {
    if (event.type === "response.created") id = event.response.id;
    number = event.sequence_number;
    if (event.type === "response.output_item.added") break;
  }
  const resumed = await gpt.responses.stream({ response_id: id, starting_after: number }).finalResponse();

  const conversation = (await gpt.conversations.create()).id;
  await gpt.responses.create({ model, input: "Hello", conversation });
  const items = await collect(gpt.conversations.items.list(conversation, { limit: 1 }), (item) => item.role);
  return { next: next.output_text, resumed: resumed.output_text, items };
}

async function refusals() {
  const image = { type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } };
  const long = "word ".repeat(20_000);
  return {
    model: await refusal(() => gpt.models.retrieve("other")),
    image: await refusal(() => gpt.chat.completions.create({ model, messages: [{ role: "user", content: [image] }] })),
    length: await refusal(() => gpt.chat.completions.create({ model, messages: [{ role: "user", content: long }] })),
    response: await refusal(() => gpt.responses.create({ model, input: "Hi", previous_response_id: "resp_1" })),
  };
}

(async () => {
  console.log(JSON.stringify({ chat: await chat(), responses: await responses(), refusals: await refusals() }));
})();

// A streamed answer: from the bytes of InvokeEndpointWithResponseStream to pieces of text.

import { BrokenFrame, FrameReader } from "./eventstream.js";

const EVENT_STREAM = "application/vnd.amazon.eventstream";
const INNER_TYPE = "x-amzn-sagemaker-content-type";
export const JSON_LINES = "application/jsonlines";

// The answer began and cannot be finished. code: the proxy's error code, or "".
export class AnswerBroken extends Error {
  name = "AnswerBroken";

  constructor(message, code = "") {
    super(message);
    this.code = code;
  }
}

// Yields {text, isToken, finish}. finish: why the answer ended, with its last piece if it says so; otherwise null.
export async function* readAnswer(response) {
  const type = response.headers.get("content-type") ?? "";
  if (!type.startsWith(EVENT_STREAM)) throw new AnswerBroken(`The answer is not an event stream but ${type || "untyped"}.`);
  const reader = makeReader(response.headers.get(INNER_TYPE) ?? "");
  try {
    for await (const payload of readPayloads(response.body)) yield* reader.feed(payload);
    yield* reader.end();
  } catch (error) {
    throw error instanceof BrokenFrame ? new AnswerBroken(`The answer cannot be read: ${error.message}.`) : error;
  }
}

async function* readPayloads(body) {
  const frames = new FrameReader();
  const source = body.getReader();
  try {
    for (;;) {
      const { done, value } = await source.read();
      if (done) break;
      for (const { headers, payload } of frames.feed(value)) {
        const kind = headers.get(":message-type");
        if (kind === "exception" || kind === "error") throw failureOf(headers, payload);
        if (headers.get(":event-type") === "PayloadPart") yield payload;
      }
    }
    frames.end();
  } finally {
    source.cancel().catch(() => {}); // a failure was reported above
  }
}

function failureOf(headers, payload) {
  let body = {};
  try {
    body = JSON.parse(new TextDecoder().decode(payload));
  } catch {
    // The error has no JSON body, only a name.
  }
  const name = headers.get(":exception-type") ?? headers.get(":error-code") ?? "error";
  const message = body?.Message ?? headers.get(":error-message") ?? name;
  return new AnswerBroken(String(message), String(body?.ErrorCode ?? name));
}

function makeReader(type) {
  if (type.startsWith(JSON_LINES)) return new LineReader();
  return type.startsWith("application/json") ? new WholeReader() : new TextReader();
}

// Plain text, from a handler that does not support JSON lines.
class TextReader {
  #decoder = new TextDecoder();

  *feed(bytes) {
    const text = this.#decoder.decode(bytes, { stream: true });
    if (text) yield { text, isToken: false, finish: null };
  }

  *end() {
    yield { text: this.#decoder.decode(), isToken: false, finish: null };
  }
}

// One JSON value, from a handler that does not stream.
class WholeReader {
  #decoder = new TextDecoder();
  #text = "";

  *feed(bytes) {
    this.#text += this.#decoder.decode(bytes, { stream: true });
  }

  *end() {
    const text = this.#text + this.#decoder.decode();
    let said;
    try {
      const value = JSON.parse(text);
      said = value?.response_text ?? value?.generated_text ?? value?.[0]?.generated_text;
    } catch {
      // Not JSON: the text is shown unchanged.
    }
    yield { text: typeof said === "string" ? said : text, isToken: false, finish: null };
  }
}

// LMI's JSON lines: `{"token": {"text"}}`, the last one with `details`. An error is a line, too.
class LineReader {
  #decoder = new TextDecoder();
  #line = "";
  #isOver = false;

  *feed(bytes) {
    this.#line += this.#decoder.decode(bytes, { stream: true });
    const lines = this.#line.split("\n");
    this.#line = lines.pop();
    for (const line of lines) yield* this.#read(line);
  }

  *end() {
    yield* this.#read(this.#line + this.#decoder.decode());
    if (!this.#isOver) throw new AnswerBroken("The answer ended before it was complete.");
  }

  *#read(line) {
    if (!line.trim()) return;
    let value;
    try {
      value = JSON.parse(line);
    } catch {
      throw new AnswerBroken("The answer cannot be read: one line is not JSON.");
    }
    if (value.error !== undefined) throw new AnswerBroken(String(value.error), String(value.code ?? ""));
    this.#isOver ||= typeof value.generated_text === "string" || (value.details ?? null) !== null;
    yield { text: String(value.token?.text ?? ""), isToken: Boolean(value.token), finish: value.details?.finish_reason ?? null };
  }
}

// The operations of the runtime API that a conversation needs.

import { JSON_LINES, readAnswer } from "./answer.js";
import { FIELDS } from "./receipt.js";

const SESSION = "X-Amzn-SageMaker-Session-Id";
const DENIED = [
  "MissingAuthenticationTokenException",
  "UnrecognizedClientException",
  "IncompleteSignatureException",
  "InvalidSignatureException",
];
const FINAL = [400, 406, 413, 415];

// The server refused a request. kind: the API's name of the error; status: HTTP's.
export class Refused extends Error {
  name = "Refused";

  // handlerStatus: the handler's own status, or null if the proxy itself refused.
  constructor(message, kind, status, { retryAfterS = null, handlerStatus = null } = {}) {
    super(message);
    Object.assign(this, { kind, status, retryAfterS, handlerStatus });
  }

  // True if the same request would be refused again, such as one that is longer than the context.
  get isFinal() {
    return FINAL.includes(this.handlerStatus ?? this.status);
  }

  get isBusy() {
    return this.status === 503 || this.status === 429;
  }

  get isDenied() {
    return this.status === 401 || DENIED.includes(this.kind);
  }
}

// The server did not answer, or the connection broke.
export class NetworkGone extends Error {
  name = "NetworkGone";
}

let token = ""; // kept in this page's memory only

export function setToken(value) {
  token = value;
}

// An id for a request, which keeps it when it is sent again, so that it runs once. (crypto.randomUUID needs https.)
export function newInvocationId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function send(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new NetworkGone("The server cannot be reached.");
  }
  if (!answer.ok) throw await refusalOf(answer);
  return answer;
}

async function refusalOf(answer) {
  let body = {};
  try {
    body = await answer.json();
  } catch {
    // Another server, such as a reverse proxy, has answered.
  }
  const kind = answer.headers.get("x-amzn-errortype") ?? "";
  const message = body?.OriginalMessage || body?.Message || body?.message || `The server answered ${answer.status}.`;
  const retryAfterS = Number.parseFloat(answer.headers.get("retry-after") ?? "");
  return new Refused(handlersWords(String(message)), kind, answer.status, {
    retryAfterS: Number.isFinite(retryAfterS) ? retryAfterS : null,
    handlerStatus: body?.OriginalStatusCode ?? null,
  });
}

// A ModelError's original message may be the handler's whole error body.
function handlersWords(message) {
  try {
    return String(JSON.parse(message).error.message);
  } catch {
    return message;
  }
}

// Reads an answer to its end, so that its connection is free for the next request.
async function finish(answer) {
  try {
    await answer.arrayBuffer();
  } catch (error) {
    throw error instanceof TypeError ? new NetworkGone("The connection broke in the middle of the answer.") : error;
  }
}

function invoke(endpoint, sessionId, body, { signal, invocationId, keepalive = false } = {}) {
  return send(`endpoints/${encodeURIComponent(endpoint)}/invocations`, {
    method: "POST",
    headers: {
      "Content-Type": "application/json",
      [SESSION]: sessionId,
      ...(invocationId ? { "amz-sdk-invocation-id": invocationId } : {}),
    },
    body: JSON.stringify(body),
    signal,
    keepalive,
  });
}

// The endpoints, their models' capabilities, and the limits of requests.
export async function findEndpoints() {
  return (await send("chat/endpoints")).json();
}

// A text about the progress of starting instances of the endpoint; "" if none is starting.
export async function findProgress(endpoint, signal) {
  const description = await (await send(`endpoints/${encodeURIComponent(endpoint)}`, { signal })).json();
  const statuses = (description.ProductionVariants ?? []).flatMap((variant) => variant.VariantStatus ?? []);
  return statuses.map((status) => status.StatusMessage).join("; ");
}

// Opens a session with pictures (data URLs) or without. Returns {id, expiresAt (ms since 1970, or null), instance}.
export async function openSession(endpoint, images, options) {
  const body = { requestType: "NEW_SESSION", ...(images.length ? { images } : {}) };
  return readOpened(await invoke(endpoint, "NEW_SESSION", body, options));
}

// Opens a session that begins with the first turns of another one.
export async function branchSession(endpoint, { id, turns }, options) {
  return readOpened(await invoke(endpoint, id, { type: "branch_session", turns }, options));
}

async function readOpened(answer) {
  const [id, ...attributes] = (answer.headers.get("x-amzn-sagemaker-new-session-id") ?? "").split(";");
  if (!id) throw new Refused("This endpoint answers, but opens no sessions.", "", answer.status);
  const expires = attributes.map((each) => each.trim()).find((each) => each.startsWith("Expires="));
  const expiresAt = expires ? Date.parse(expires.slice("Expires=".length)) : Number.NaN;
  await finish(answer);
  return { id, expiresAt: Number.isNaN(expiresAt) ? null : expiresAt, instance: answer.headers.get("x-torchmoor-instance") };
}

export async function addImages(endpoint, sessionId, images, options) {
  await finish(await invoke(endpoint, sessionId, { type: "add_images", images }, options));
}

// Ends the running answer; its text so far stays in the conversation. Returns whether there was one to end.
export async function stopAnswer(endpoint, sessionId, options) {
  const answer = await invoke(endpoint, sessionId, { type: "stop_answer" }, options);
  return (await answer.json()).stopped === true;
}

export async function closeSession(endpoint, sessionId, options) {
  await finish(await invoke(endpoint, sessionId, { type: "close_session" }, options));
}

// Asks a question. Yields {receipt} first, then the pieces of `readAnswer`.
// parameters: TGI's, such as max_new_tokens. system: the session's system prompt, or "".
export async function* ask(endpoint, sessionId, question, { signal, invocationId, parameters, system }) {
  const answer = await send(`endpoints/${encodeURIComponent(endpoint)}/invocations-response-stream`, {
    method: "POST",
    headers: {
      "Content-Type": "application/json",
      "X-Amzn-SageMaker-Accept": JSON_LINES,
      [SESSION]: sessionId,
      "amz-sdk-invocation-id": invocationId,
    },
    body: JSON.stringify({
      type: "send_text_prompt",
      prompt_text: question,
      stream: true,
      ...(system ? { system } : {}),
      ...(Object.keys(parameters).length ? { parameters } : {}),
    }),
    signal,
  });
  yield { receipt: receiptOf(answer.headers) };
  try {
    yield* readAnswer(answer);
  } catch (error) {
    throw error instanceof TypeError ? new NetworkGone("The connection broke in the middle of the answer.") : error;
  }
}

// Fields that the answer lacks are null.
function receiptOf(headers) {
  const receipt = { ttftMs: null, numTokens: 0, tokensPerS: null }; // measured here
  for (const { header, name, is_number: isNumber } of FIELDS) {
    const value = headers.get(header);
    if (!isNumber) receipt[name] = value;
    else receipt[name] = value === null || !Number.isFinite(Number(value)) ? null : Number(value);
  }
  return receipt;
}

// Sentences for the API's names.

let reasons = {}; // sentences by name, from the server

export function setReasons(sentences) {
  reasons = sentences;
}

const TIERS = {
  kv: "KV cache hit",
  features: "hit for the picture, not for the words",
  encoded: "the picture was encoded again",
  journal: "the picture was read from the journal",
  none: "nothing to reuse",
  answer: "hit for the whole answer, as recorded",
};

export const reasonInWords = (reason) => reasons[reason] ?? reason;
export const tierInWords = (tier) => TIERS[tier] ?? tier;

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function duration(ms) {
  if (ms < 1000) return `${number(ms, ms < 10 ? 1 : 0)} ms`;
  return `${number(ms / 1000, ms < 10_000 ? 2 : 1)} s`;
}

export function bytes(value) {
  return value < 1 << 20 ? `${number(Math.max(1, value / 1024))} KiB` : `${number(value / (1 << 20), 1)} MiB`;
}

export function span(seconds) {
  if (seconds < 100) return `${Math.ceil(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

// Rows of a receipt: [name, text].
export function receiptRows(receipt) {
  const rows = [];
  const add = (name, text) => rows.push([name, text]);
  if (receipt.instance) add("Instance", receipt.instance);
  if (receipt.reason) add("Chosen because", reasonInWords(receipt.reason));
  if (receipt.tier) add("Cache", tierInWords(receipt.tier));
  if (receipt.contextTokens !== null && receipt.prefillTokens !== null) {
    add("Tokens computed", `${number(receipt.prefillTokens)} of ${number(receipt.contextTokens)} in context`);
  }
  if (receipt.rebuiltEvents) add("Rebuilt", `${plural(receipt.rebuiltEvents, "event")} from the journal`);
  if (receipt.droppedTurns) add("Left out", `the oldest ${plural(receipt.droppedTurns, "turn")}, for room`);
  if (receipt.queueMs) add("Waited in line", duration(receipt.queueMs));
  if (receipt.ttftMs !== null) add("First token", `after ${duration(receipt.ttftMs)}`);
  if (receipt.serverTtftMs !== null) add("At the server", `after ${duration(receipt.serverTtftMs)}`);
  if (receipt.numTokens) add("Answer", plural(receipt.numTokens, "token"));
  if (receipt.tokensPerS !== null) add("Speed", `${number(receipt.tokensPerS)} tokens/s`);
  return rows;
}

// The receipt in one line, where there is little room.
export function receiptSummary(receipt) {
  const parts = [receipt.instance];
  if (receipt.contextTokens !== null && receipt.prefillTokens !== null) {
    parts.push(`${number(receipt.prefillTokens)} of ${number(receipt.contextTokens)} tokens`);
  }
  if (receipt.ttftMs !== null) parts.push(duration(receipt.ttftMs));
  return parts.filter(Boolean).join(" · ") || "Receipt";
}

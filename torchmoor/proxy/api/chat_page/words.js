// Texts for the API's names, numbers and receipts.

import { FIELDS } from "./receipt.js";

const MAX_TITLE = 100; // characters
let reasons = {}; // name -> sentence, from the server

export function setReasons(sentences) {
  reasons = sentences;
}

const TIERS = {
  kv: "KV cache hit",
  "stored-kv": "the KV cache was read from the journal",
  features: "hit for the picture, not for the text",
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

// The first line of a text, or its beginning.
export function shortened(text) {
  const [line] = text.trim().split("\n", 1);
  const letters = [...line];
  return letters.length <= MAX_TITLE ? line : `${letters.slice(0, MAX_TITLE).join("")}…`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

// Fields of a receipt that are shown in a form of their own below; others with a label are shown as numbers. A receipt
// that the browser kept before a field was added lacks that field.
const OWN_FORM = new Set(["context_tokens", "prefill_tokens", "generated_tokens", "rebuilt_events", "dropped_turns"]);

const isKnown = (value) => typeof value === "number";

// Rows of a receipt: [name, text].
export function receiptRows(receipt) {
  const rows = [];
  const add = (name, text) => rows.push([name, text]);
  if (receipt.instance) add("Instance", receipt.instance);
  if (receipt.routing_reason) add("Chosen because", reasonInWords(receipt.routing_reason));
  if (receipt.cache_tier) add("Cache", tierInWords(receipt.cache_tier));
  if (isKnown(receipt.context_tokens) && isKnown(receipt.prefill_tokens)) {
    add("Tokens computed", `${number(receipt.prefill_tokens)} of ${number(receipt.context_tokens)} in context`);
  }
  if (receipt.rebuilt_events) add("Rebuilt", `${plural(receipt.rebuilt_events, "event")} from the journal`);
  if (receipt.dropped_turns) add("Left out", `the oldest ${plural(receipt.dropped_turns, "turn")}, to fit the context`);
  for (const { name, label } of FIELDS) {
    if (label && !OWN_FORM.has(name) && isKnown(receipt[name])) add(label, number(receipt[name]));
  }
  if (receipt.queue_ms) add("Waited in the queue", duration(receipt.queue_ms));
  if (receipt.ttftMs !== null) add("First token", `after ${duration(receipt.ttftMs)}`);
  if (isKnown(receipt.ttft_ms)) add("At the server", `after ${duration(receipt.ttft_ms)}`);
  if (receipt.numTokens) add("Answer", plural(receipt.numTokens, "token"));
  if (receipt.tokensPerS !== null) add("Speed", `${number(receipt.tokensPerS)} tokens/s`);
  return rows;
}

// The receipt in one line, for narrow windows and closed receipts.
export function receiptSummary(receipt) {
  const parts = [receipt.instance];
  if (isKnown(receipt.context_tokens) && isKnown(receipt.prefill_tokens)) {
    parts.push(`${number(receipt.prefill_tokens)} of ${number(receipt.context_tokens)} tokens`);
  }
  if (receipt.ttftMs !== null) parts.push(duration(receipt.ttftMs));
  return parts.filter(Boolean).join(" · ") || "Receipt";
}

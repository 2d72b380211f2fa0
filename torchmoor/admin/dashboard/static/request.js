// The page of one request: what happened to it and why, its times as a waterfall, and its tokens.

import { $, make, say, setClass } from "./dom.js";
import { get } from "./feed.js";
import { FIELDS } from "./receipt.js";
import { bytes, count, duration, number, outcomeOf, reason, setReasons } from "./words.js";

function addFact(list, name, value, href) {
  if (value === null || value === undefined || value === "") return;
  const cell = make("dd", href ? "" : String(value));
  if (href) cell.append(make("a", String(value), { href, rel: "noreferrer" }));
  list.append(make("dt", name), cell);
}

function showFacts(row) {
  const list = $("facts");
  addFact(list, "Request id", row.request_id);
  if (row.inference_id !== row.request_id) addFact(list, "Inference id", row.inference_id);
  addFact(list, "Ended", new Date(row.time * 1000).toLocaleString("en-GB"));
  addFact(list, "Path", `${row.method} ${row.path}`);
  addFact(list, "Operation", row.operation);
  addFact(list, "Endpoint", `${row.endpoint} / ${row.variant}`);
  addFact(list, "Model", row.model);
  addFact(list, "Instance", row.instance ?? "none");
  addFact(list, "Why this instance", reason(row.reason));
  if (row.retries) addFact(list, "Sent again", count(row.retries, "time"));
  addFact(list, "Session", row.session, row.session && `../?session=${row.session}#decisions-title`);
  addFact(list, "Caller", row.caller);
  addFact(list, "Status", row.status);
  addFact(list, "Error that the client received", row.error);
  addFact(list, "Status at the instance", row.instance_status);
  addFact(list, "Error code of the model", row.model_error);
  addFact(list, "Request body", row.bytes_in && bytes(row.bytes_in));
  addFact(list, "Trace", row.trace_id, row.trace_url);
}

// The request's spans: name, begin and end in milliseconds since the request's head. The worker measures the model's
// spans; they are drawn from the time when the request was sent.
function spansOf(row) {
  const spans = [];
  const add = (name, begin, end) => {
    if (begin !== null && end !== null && end >= begin) spans.push({ name, begin, end });
  };
  if (row.waited_ms) add("Waits for an instance", 0, row.waited_ms);
  if (row.sent_ms === null) {
    add("In the proxy", 0, row.ms);
    return spans;
  }
  add("In the proxy, until it is sent", row.waited_ms, row.sent_ms);
  add("At the instance, until its answer begins", row.sent_ms, row.answered_ms ?? row.ms);
  const { queue_ms: queue, ttft_ms: first } = row.receipt;
  if (queue !== undefined) add("Waits in the model's queue", row.sent_ms, row.sent_ms + queue);
  if (first !== undefined) add("Until the first token", row.sent_ms + (queue !== undefined && queue <= first ? queue : 0), row.sent_ms + first);
  if (row.answered_ms !== null) add("The answer is passed on", row.answered_ms, row.ms);
  return spans;
}

function showTimes(row) {
  const whole = Math.max(row.ms, 0.001);
  for (const { name, begin, end } of [{ name: "In all", begin: 0, end: row.ms }, ...spansOf(row)]) {
    const line = make("li");
    const track = make("span", "", { class: "bar", "aria-hidden": "true" });
    const bar = make("span");
    const left = Math.min(100, (100 * begin) / whole);
    bar.style.marginLeft = `${left}%`;
    bar.style.width = `${Math.min(100 - left, Math.max(0.5, (100 * (end - begin)) / whole))}%`;
    track.append(bar);
    line.title = `from ${duration(begin)} to ${duration(end)}`;
    line.append(make("span", name, { class: "label" }), make("span", duration(end - begin), { class: "value" }), track);
    $("times").append(line);
  }
}

function showTokens(row) {
  for (const { name, label } of FIELDS) {
    if (label && row.receipt[name] !== undefined) addFact($("tokens"), label, number(row.receipt[name]));
  }
  if (!$("tokens").children.length) addFact($("tokens"), "Tokens", "not reported by the answer");
}

async function show() {
  const id = new URLSearchParams(location.search).get("id") ?? "";
  const [found, dashboard] = await Promise.all([get("../decisions", { request: id, limit: 1 }), get("../dashboard.json")]);
  const row = id ? found.decisions[0] : undefined;
  if (!row) throw new Error(`There is no request ${id} among the last ones; the access log may have it.`);
  setReasons(dashboard.reasons);
  const { word, kind, more } = outcomeOf(row);
  say($("outcome"), more ? `${word}: ${more}` : word);
  setClass($("outcome"), `badge ${kind}`);
  showFacts(row);
  showTimes(row);
  showTokens(row);
  $("found").hidden = false;
}

show().catch((error) => {
  $("problem").hidden = false;
  say($("problem"), error.message);
});

// Asynchronous requests of one endpoint: the backlog and its age, and the list with reasons, results and cancelling.

import { act } from "./actions.js";
import { $, keep, make, only, say, setAttribute } from "./dom.js";
import { fillBars } from "./drawings.js";
import { Feed, get } from "./feed.js";
import { Table, badge, buttons, text } from "./table.js";
import { ago, count, number, span } from "./words.js";

const LIMIT = 200;
const STATES = { WAITING: "warn", RUNNING: "good", DECIDED: "good", COMPLETED: "", FAILED: "bad", CANCELLED: "", EXPIRED: "bad" };
const OPEN = ["WAITING", "RUNNING"];
let counts = {}; // of each endpoint since the start of the proxy
let toBeDone = 0; // waiting and running requests of the endpoint that is shown

function cancel(row) {
  const isRunning = row.state === "RUNNING";
  act({
    title: `Cancel ${row.inference_id}?`,
    text: `${isRunning ? `${row.instance || "The instance that runs it"} stops it.` : "It will not start."} Its failure object, and its notification if it has one, report the cancellation.`,
    yes: "Cancel it",
    subject: row.inference_id,
    path: `async-requests/${encodeURIComponent(row.inference_id)}/cancel`,
    done: () => {
      feed.hurry();
      return `${row.inference_id} is cancelled.`;
    },
  });
}

const table = new Table($("queue-table"), {
  noun: "request",
  nothing: "No such requests.",
  page: 15,
  key: (row) => row.inference_id,
  sort: { column: 2, isDown: true },
  columns: [
    { title: "Request", is: "name", value: (row) => row.inference_id, fill: text((row) => row.inference_id) },
    {
      title: "State",
      value: (row) => row.state,
      fill: badge((row) => ({ word: row.state.toLowerCase(), kind: STATES[row.state] ?? "", more: row.attempts > 1 ? `attempt ${number(row.attempts)}` : "" })),
    },
    { title: "Received", is: "figure", value: (row) => row.received_at, fill: text((row) => ago(row.received_at)) },
    { title: "Instance", value: (row) => row.instance, fill: text((row) => row.instance || "–") },
    { title: "Reason", value: (row) => row.reason, fill: showReason },
    { title: "Result", value: (row) => row.output_location ?? "", fill: showResult },
    {
      title: "Actions",
      is: "actions",
      fill: buttons((row) => (OPEN.includes(row.state) ? [{ verb: "Cancel", label: `Cancel ${row.inference_id}`, press: () => cancel(row) }] : [])),
    },
  ],
});

function showReason(cell, row) {
  cell.classList.add("long");
  say(cell, row.reason || "–");
}

// Shows the location of the result or of the failure object; a result is a link that downloads it.
function showResult(cell, row) {
  cell.classList.add("long");
  if (row.state !== "COMPLETED") {
    say(cell, row.state === "FAILED" || row.state === "EXPIRED" ? (row.failure_location ?? "–") : "–");
    return;
  }
  const link = only(cell, () => make("a"));
  say(link, row.output_location ?? "download");
  setAttribute(link, "href", `async-requests/${encodeURIComponent(row.inference_id)}/result`);
}

function show(data) {
  const lines = [
    ["Waiting", data.waiting],
    ["Running", data.running],
    ["Answered, being published", data.decided],
  ];
  const most = Math.max(1, ...lines.map(([, each]) => each));
  fillBars($("queue-lines"), lines.map(([label, each]) => ({ label, text: number(each), part: each / most })));
  toBeDone = data.waiting + data.running;
  const { processed = 0, failed = 0, expired = 0, cancelled = 0 } = counts[data.endpoint] ?? {};
  const todo = toBeDone ? `${count(toBeDone, "request")} waiting or running, the oldest is ${span(data.oldest_age_s)} old` : "No request waits or runs";
  say($("queue-facts"), `${todo} · since the start ${number(processed)} done, ${number(failed)} failed, ${number(expired)} expired, ${number(cancelled)} cancelled`);
  table.show(data.requests);
}

const find = () => get("async-requests", { endpoint: $("queue-endpoint").value, state: $("queue-state").value, order: "newest", limit: LIMIT });
const feed = new Feed(find, show, $("queue-facts"));

export function pollQueue(data) {
  const endpoints = data.async_endpoints;
  $("queue-section").hidden = $("queue-link").hidden = !endpoints.length;
  if (!endpoints.length) {
    toBeDone = 0;
    return;
  }
  counts = {};
  for (const { endpoint, asynchronous } of data.variants) {
    const sum = (counts[endpoint] ??= {});
    for (const [name, each] of Object.entries(asynchronous)) sum[name] = (sum[name] ?? 0) + each;
  }
  keep($("queue-endpoint"), endpoints, (name) => make("option", name));
  $("queue-endpoint-label").hidden = endpoints.length < 2;
  feed.poll();
}

// Describes the backlog of the endpoint that is shown.
export function describeBacklog() {
  const where = $("queue-endpoint").options.length > 1 ? ` at ${$("queue-endpoint").value}` : "";
  return toBeDone ? ` ${count(toBeDone, "asynchronous request")} waiting or running${where}.` : "";
}

function onFilter() {
  table.toStart();
  feed.hurry();
}

$("queue-endpoint").onchange = onFilter;
$("queue-state").onchange = onFilter;

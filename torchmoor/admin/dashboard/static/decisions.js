// The last routing decisions, their reasons and outcomes. While paused, the list does not change.

import { $, make, say } from "./dom.js";
import { Feed, get } from "./feed.js";
import { Table, badge, offer, text } from "./table.js";
import { clock, duration, number, reason } from "./words.js";

const LIMIT = 300;
let isPaused = false;

// The outcome as a word, and its severity.
function outcomeOf(row) {
  if (row.outcome === "client gone") return { word: "client left", kind: "warn" };
  if (row.outcome === "broken") return { word: "broken off", kind: "bad", more: row.error ?? "" };
  if (row.status === null) return { word: row.outcome, kind: "warn" };
  const kind = row.status >= 500 ? "bad" : row.status >= 400 ? "warn" : "good";
  return { word: row.status < 400 ? "answered" : String(row.status), kind, more: row.error ?? "" };
}

const table = new Table($("decisions-table"), {
  noun: "request",
  nothing: "No requests.",
  page: 15,
  key: (row) => row.request_id,
  sort: { column: 0, isDown: true },
  holdsOrder: false,
  columns: [
    { title: "Time", is: "figure", value: (row) => row.time, fill: text((row) => clock(row.time)) },
    { title: "Endpoint", value: (row) => row.endpoint, fill: text((row) => row.endpoint) },
    { title: "Instance", value: (row) => row.instance ?? "", fill: text((row) => row.instance ?? "–") },
    {
      title: "Why",
      value: (row) => reason(row.reason),
      fill: text((row) => reason(row.reason) + (row.retries ? ` (attempt ${number(row.retries + 1)})` : "")),
    },
    { title: "Outcome", value: (row) => row.status ?? 0, fill: badge(outcomeOf) },
    { title: "Waited", is: "figure", value: (row) => row.waited_ms, fill: text((row) => (row.waited_ms ? duration(row.waited_ms) : "–")) },
    { title: "Took", is: "figure", value: (row) => row.ms, fill: text((row) => duration(row.ms)) },
    { title: "Session", value: (row) => row.session ?? "", fill: showSession },
  ],
});

// A click on a session's hash filters the list of sessions.
function showSession(cell, row) {
  if (!row.session) {
    say(cell, "–");
    return;
  }
  let button = cell.firstElementChild;
  if (!button) {
    cell.textContent = "";
    button = make("button", "", { type: "button", class: "link" });
    cell.append(button);
  }
  say(button, row.session);
  button.title = "Find it among the sessions";
  button.onclick = () => {
    $("sessions-filter").value = row.session;
    $("sessions-filter").dispatchEvent(new Event("input"));
    $("sessions-title").scrollIntoView();
    $("sessions-filter").focus();
  };
}

function show(data) {
  if (isPaused) return;
  const facts = [];
  if (data.oldest !== null) facts.push(`since ${clock(data.oldest)}`);
  if (data.left_out) facts.push(`${number(data.left_out)} left out, of seconds with too many`);
  say($("decisions-facts"), facts.join(" · "));
  table.show(data.decisions);
}

const find = () => get("decisions", { endpoint: $("decisions-endpoint").value, instance: $("decisions-instance").value, limit: LIMIT });
const feed = new Feed(find, show, $("decisions-facts"));

export function pollDecisions(data) {
  offer($("decisions-endpoint"), "all", [...new Set(data.variants.map((each) => each.endpoint))]);
  offer($("decisions-instance"), "all", data.instances.map((each) => each.name));
  if (!isPaused) feed.poll();
}

function onFilter() {
  table.toStart();
  setPaused(false);
  feed.hurry();
}

function setPaused(value) {
  isPaused = value;
  $("decisions-pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) say($("decisions-facts"), "Paused; new requests are not shown.");
}

$("decisions-endpoint").onchange = onFilter;
$("decisions-instance").onchange = onFilter;
$("decisions-pause").onclick = () => {
  setPaused(!isPaused);
  if (!isPaused) feed.hurry();
};

// The last routing decisions, their reasons and outcomes. While paused, the list does not change.

import { $, make, only, say, setAttribute } from "./dom.js";
import { Feed, get } from "./feed.js";
import { Table, badge, offer, text } from "./table.js";
import { clock, duration, errorOf, nameOfVariant, number, outcomeOf, reason } from "./words.js";

const LIMIT = 300;
const ANY_ERROR = "any"; // a value of GET /decisions
const MAX_CODES = 100;
let isPaused = false;

const codes = new Set(); // error codes that requests have had, offered as filters
let variants = [];
let places = new Map(); // the filter's names of endpoints, and of the variants of those that have several

const table = new Table($("decisions-table"), {
  noun: "request",
  nothing: "No requests.",
  page: 15,
  key: (row) => row.request_id,
  sort: { column: 0, isDown: true },
  holdsOrder: false,
  columns: [
    { title: "Time", is: "figure", value: (row) => row.time, fill: showTime },
    { title: "Endpoint", value: nameOfPlace, fill: text(nameOfPlace) },
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

function findPlaces() {
  const found = new Map();
  for (const variant of variants) {
    const { endpoint, name } = variant;
    found.set(endpoint, { endpoint });
    const own = nameOfVariant(variant, variants);
    if (own !== endpoint) found.set(own, { endpoint, variant: name });
  }
  return found;
}

function nameOfPlace({ endpoint, variant }) {
  return nameOfVariant({ endpoint, name: variant }, variants);
}

// The time links to the request's own page.
function showTime(cell, row) {
  const link = only(cell, () => make("a"));
  say(link, clock(row.time));
  setAttribute(link, "aria-label", `Request at ${clock(row.time)}`);
  setAttribute(link, "href", `dashboard/request.html?id=${encodeURIComponent(row.request_id)}`);
}

// A click on a session's hash filters the list of sessions.
function showSession(cell, row) {
  if (!row.session) {
    say(cell, "–");
    return;
  }
  const button = only(cell, () => make("button", "", { type: "button", class: "link" }));
  say(button, row.session);
  button.title = "Find this session in the list of sessions";
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
  if (data.left_out) facts.push(`${number(data.left_out)} not kept, because there were too many per second`);
  say($("decisions-facts"), facts.join(" · "));
  for (const code of data.decisions.map(errorOf)) if (code && codes.size < MAX_CODES) codes.add(code);
  offer($("decisions-error"), "all", [ANY_ERROR, ...[...codes].sort()]);
  table.show(data.decisions);
}

const find = () =>
  get("decisions", {
    ...places.get($("decisions-endpoint").value),
    instance: $("decisions-instance").value,
    error: $("decisions-error").value,
    session: $("decisions-session").value.trim().toLowerCase(),
    limit: LIMIT,
  });
const feed = new Feed(find, show, $("decisions-facts"));

export function pollDecisions(data) {
  variants = data.variants;
  places = findPlaces();
  offer($("decisions-endpoint"), "all", [...places.keys()]);
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
$("decisions-error").onchange = onFilter;
$("decisions-session").oninput = onFilter;
$("decisions-pause").onclick = () => {
  setPaused(!isPaused);
  if (!isPaused) feed.hurry();
};
$("decisions-session").value = new URLSearchParams(location.search).get("session") ?? "";

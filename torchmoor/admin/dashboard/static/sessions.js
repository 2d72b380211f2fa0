// The instances' sessions, named by the hash that the access log and the decisions show; close, pin and unpin.

import { act } from "./actions.js";
import { $, make, only, say } from "./dom.js";
import { Feed, get } from "./feed.js";
import { FIELDS } from "./session_row.js";
import { Table, badge, buttons, offer, text } from "./table.js";
import { ago, bytes, count, number, until } from "./words.js";

const PAGE = 1000; // sessions in one answer of the proxy
const MAX_ROWS = 4000; // sessions that are read; the filters find others
const TIERS = { device: "good", host: "", journal: "warn" };
const ACTIONS = {
  Close: {
    text: (row) =>
      `${row.is_running ? "Its running answer ends with an error, and its memory is freed." : "Its memory is freed."} The client's next question is refused, because the session is closed. A closed session cannot be opened again.`,
    done: "is closed.",
  },
  Pin: {
    text: () => "Its part of the KV cache stays on the device between its turns until it is unpinned or ends, even if other sessions need the memory.",
    done: "is pinned.",
  },
  Unpin: { text: () => "Its part of the KV cache may be evicted between its turns, like that of other sessions.", done: "is no longer pinned." },
};

function press(action, row) {
  act({
    title: `${action} session ${row.session}?`,
    text: ACTIONS[action].text(row),
    yes: action,
    subject: `session ${row.session}`,
    path: `sessions/${row.session}/${action.toLowerCase()}`,
    done: () => {
      feed.hurry();
      return `Session ${row.session} ${ACTIONS[action].done}`;
    },
  });
}

// How the list shows a value of a session: by its kind in torchmoor/wire/session_row.py, or by its name.
const WRITERS = { count: (value) => (value === null ? "–" : number(value)), bytes, past: ago, future: until, flag: (value) => (value ? "yes" : "no"), text: (value) => value ?? "–" };
const FILLERS = { tier: badge((row) => ({ word: row.tier, kind: TIERS[row.tier] ?? "" })) };
const VALUES = FIELDS.filter((each) => each.title).map(({ name, kind, title }) => ({
  title,
  name,
  is: kind === "text" ? "" : "figure",
  value: (row) => row[name],
  fill: FILLERS[name] ?? text((row) => WRITERS[kind](row[name])),
}));

const table = new Table($("sessions-table"), {
  noun: "session",
  nothing: "No sessions.",
  key: (row) => `${row.session} ${row.instance}`,
  sort: { column: 3 + VALUES.findIndex((each) => each.name === "last_used_at"), isDown: true },
  columns: [
    { title: "Session", is: "name", value: (row) => row.session, fill: showName },
    { title: "Instance", value: (row) => row.instance, fill: text((row) => row.instance) },
    {
      title: "State",
      value: (row) => (row.is_running ? 2 : 0) + (row.is_pinned ? 1 : 0),
      fill: badge((row) => ({
        word: row.is_running ? "answering" : "idle",
        kind: row.is_running ? "good" : "",
        more: [row.is_pinned ? "pinned" : "", row.waiting ? `${number(row.waiting)} waiting` : ""].filter(Boolean).join(", "),
      })),
    },
    ...VALUES,
    {
      title: "Actions",
      is: "actions",
      fill: buttons((row) =>
        [row.is_pinned ? "Unpin" : "Pin", "Close"].map((verb) => ({
          verb,
          label: `${verb} session ${row.session}`,
          press: () => press(verb, row),
        }))
      ),
    },
  ],
});

function showName(cell, row) {
  say(only(cell, () => make("code")), row.session);
}

async function find() {
  const query = { instance: $("sessions-instance").value, session: prefix(), limit: PAGE };
  const rows = [];
  let page;
  do {
    page = await get("sessions", { ...query, after: page?.next });
    rows.push(...page.sessions);
  } while (page.next && rows.length < MAX_ROWS);
  return { rows, instances: page.instances, hasMore: Boolean(page.next) };
}

function prefix() {
  return $("sessions-filter").value.trim().toLowerCase();
}

function show({ rows, instances, hasMore }) {
  const silent = instances.filter((each) => !each.answered).map((each) => each.instance);
  const facts = [];
  if (hasMore) facts.push(`the first ${number(rows.length)} by their hashes; the filters find the others`);
  if (silent.length) facts.push(`${silent.join(", ")} cannot list sessions`);
  const evicted = instances.filter((each) => each.evicted).map((each) => `${number(each.evicted)} by ${each.instance}`);
  if (evicted.length) facts.push(`evicted: ${evicted.join(", ")}; an evicted session continues when it is used`);
  say($("sessions-facts"), facts.join(" · "));
  table.show(rows);
}

const feed = new Feed(find, show, $("sessions-facts"));

export function pollSessions(data) {
  offer($("sessions-instance"), "all", data.instances.map((each) => each.name));
  feed.poll();
}

function onFilter() {
  const isHash = /^[0-9a-f]{0,16}$/.test(prefix());
  $("sessions-filter").setAttribute("aria-invalid", String(!isHash));
  if (!isHash) {
    say($("sessions-facts"), "A session's hash has the digits 0 to 9 and a to f.");
    return;
  }
  table.toStart();
  feed.hurry();
}

$("sessions-filter").oninput = onFilter;
$("sessions-instance").onchange = onFilter;

export const describeOpen = (data) => {
  const open = data.instances.reduce((sum, each) => sum + (each.status?.sessions?.open ?? 0), 0);
  return count(open, "session");
};

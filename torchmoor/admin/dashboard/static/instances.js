// The instances: their state, load and limits; drain and resume.

import { act } from "./actions.js";
import { $, copy, keep, part, say, setAttribute, setClass } from "./dom.js";
import { fillBars, fillTile } from "./drawings.js";
import { get } from "./feed.js";
import { ago, bytes, count, number } from "./words.js";

const STATES = { ready: "good", starting: "warn", draining: "warn", down: "bad" };

const WRITERS = { count: number, bytes, text: String };
const find = (instance, path) => path.split(".").reduce((found, name) => found?.[name], instance) ?? null;

// shown: the proxy's list of values (torchmoor/admin/views.py). Values with a limit are drawn as bars.
function gauges(instance, shown, budgets) {
  const rows = [];
  const add = (label, used, most, write) => {
    if (used !== null && most) rows.push({ label, text: `${write(used)} of ${write(most)}`, part: used / most });
  };
  for (const { label, used, most, unit } of shown) {
    if (most) add(label, find(instance, used), find(instance, most), WRITERS[unit]);
  }
  if (instance.gpu !== null) {
    const { name, percent, used_bytes: used, total_bytes: total } = instance.gpu;
    rows.push({ label: `GPU ${name}`, text: `${number(percent)} %`, part: percent / 100 });
    add(`Memory of GPU ${name}`, used, total, bytes);
  }
  for (const [tier, budget] of Object.entries(budgets)) add(`Models (${tier})`, budget.used, budget.max, bytes);
  return rows;
}

function facts(instance, shown) {
  const breaker = instance.failures_in_a_row ? `${instance.breaker}, ${instance.failures_in_a_row} failures in a row` : instance.breaker;
  const rows = [["Breaker", breaker]];
  if (instance.share < 1) rows.push(["Share of work while recovering", `${Math.round(100 * instance.share)} %`]);
  for (const { label, used, most, unit } of shown) {
    const value = find(instance, used);
    if (!most && value !== null) rows.push([label, WRITERS[unit](value)]);
  }
  return rows;
}

function progress(instance) {
  if (instance.starting_s === null) return "";
  const usual = instance.last_start_s === null ? "" : ` of about ${Math.round(instance.last_start_s)} s`;
  return `, ${Math.round(instance.starting_s)} s${usual}`;
}

const percent = (value) => `${number(value)} %`;
const HISTORY = [
  ["In flight", "in_flight", number],
  ["Sessions", "sessions", number],
  ["Not in service", "down", (value) => (value ? "yes" : "no")],
  ["GPU", "gpu_percent", percent],
  ["GPU memory", "gpu_memory_percent", percent],
];

// Reads and draws an instance's history while it is open.
async function showHistory(card, name) {
  const box = part(card, "history");
  if (!box.open || box.dataset.isAsking) return;
  box.dataset.isAsking = "yes";
  try {
    const { series } = await get(`instances/${encodeURIComponent(name)}/history`, { range: $("range").value });
    const known = HISTORY.filter(([, field]) => series[field].some((value) => value !== null));
    const tiles = keep(part(card, "history-tiles"), known.map(([title]) => title), () => copy("tile-template"));
    known.forEach(([title, field, write], at) => {
      const curve = series[field];
      const newest = curve[curve.length - 1];
      fillTile(tiles[at], title, newest === null ? "–" : write(newest), [curve], series.seconds_ago, write);
    });
  } catch {
    // The next poll draws it; main.js reports a proxy that does not answer.
  } finally {
    delete box.dataset.isAsking;
  }
}

function showInstance(card, instance, shown, budgets) {
  const state = part(card, "state");
  const isCutOff = instance.breaker !== "closed" && instance.state === "ready";
  say(part(card, "name"), instance.name);
  say(state, isCutOff ? `breaker ${instance.breaker}` : instance.state + progress(instance));
  setClass(state, `badge ${isCutOff ? "bad" : (STATES[instance.state] ?? "bad")}`);
  say(part(card, "where"), `${instance.endpoint} / ${instance.variant} · ${instance.host}:${instance.port}`);
  fillBars(part(card, "gauges"), gauges(instance, shown, budgets));
  const rows = facts(instance, shown);
  const keys = rows.flatMap(([name]) => [`dt ${name}`, `dd ${name}`]);
  const elements = keep(part(card, "facts"), keys, (key) => document.createElement(key.slice(0, 2)));
  rows.forEach(([name, text], at) => {
    say(elements[2 * at], name);
    say(elements[2 * at + 1], text);
  });
  part(card, "history").ontoggle = () => showHistory(card, instance.name);
  showHistory(card, instance.name);
  const end = instance.last_end;
  part(card, "end").hidden = end === null;
  if (end !== null) {
    say(part(card, "end-reason"), `Previous process: it ${end.reason}, ${ago(end.at)}`);
    say(part(card, "end-log"), end.log.join("\n") || "It wrote no log.");
    setAttribute(part(card, "end-log"), "aria-label", `End of the log of ${instance.name}`);
  }
  const button = part(card, "button");
  const verb = instance.is_drained ? "Resume" : instance.state === "ready" ? "Drain" : undefined;
  if (button.hidden !== (verb === undefined)) button.hidden = verb === undefined;
  say(button, verb ?? "");
  setAttribute(button, "aria-label", `${verb} ${instance.name}`);
  button.onclick = () => move(verb, instance);
}

function move(verb, instance) {
  const running = instance.outstanding ? `the ${count(instance.outstanding, "request")} in progress ${instance.outstanding === 1 ? "ends" : "end"} normally` : "none is in progress";
  const open = instance.status?.sessions?.open;
  const sessions = open ? ` It holds ${count(open, "session")}: with a journal they continue at other instances; without one they stay here until they end.` : "";
  act({
    title: `${verb} ${instance.name}?`,
    text:
      verb === "Drain"
        ? `It gets no new requests; ${running}.${sessions}`
        : "It gets requests again as soon as it answers a probe, a few at first.",
    yes: verb,
    subject: instance.name,
    path: `instances/${encodeURIComponent(instance.name)}/${verb.toLowerCase()}`,
    done: (data) => `${data.name} is ${data.state}.`,
  });
}

// budgetsOf(name): used and allowed bytes of an instance's models, by tier.
export function showInstances(data, budgetsOf) {
  const instances = data.instances.slice().sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  const cards = keep($("instances"), instances.map((each) => each.name), () => copy("instance-template"));
  instances.forEach((instance, at) => showInstance(cards[at], instance, data.shown_values, budgetsOf(instance.name)));
  $("instances-none").hidden = instances.length > 0;
}

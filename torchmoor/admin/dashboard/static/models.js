// The models of endpoints with many models: instances, tiers, the order of eviction, and actions.

import { act } from "./actions.js";
import { $, make, say } from "./dom.js";
import { Feed, get } from "./feed.js";
import { Table, badge, buttons, text } from "./table.js";
import { bytes, number, span } from "./words.js";

const TIERS = ["device", "host", "loading", "leaving", "disk", "broken"];
const TIER_CLASSES = { device: "good", host: "good", loading: "warn", broken: "bad" };
const PLACES = { device: ", on device", host: ", on host" }; // no others: pin and prewarm do not wait for the load
const ACTIONS = {
  Pin: {
    text: "It is loaded if necessary and stays in memory until it is unpinned.",
    done: (tier) => `is pinned${PLACES[tier] ?? ""}.`,
  },
  Unpin: { text: "It may be evicted when another model needs the memory.", done: () => "is no longer pinned." },
  Prewarm: {
    text: "It is loaded now, which may evict other models and take minutes.",
    done: (tier) => (PLACES[tier] ? `is loaded${PLACES[tier]}.` : "is being loaded."),
  },
  Unload: {
    text: "It is removed from memory when the requests that use it have ended. The next request for it waits until it is loaded again.",
    done: () => "is unloaded.",
  },
};

let models = { models: [], instances: [] }; // the last answer
let queues = new Map(); // instance -> models in the order of their eviction

// row: undefined if the proxy chooses the instance.
function press(action, name, row) {
  const where = row ? `?${new URLSearchParams({ endpoint: row.endpoint, instance: row.instance })}` : "";
  act({
    title: `${action} ${name}${row ? ` at ${row.instance}` : ""}?`,
    text: ACTIONS[action].text,
    yes: action,
    subject: name,
    path: `models/${encodeURIComponent(name)}/${action.toLowerCase()}${where}`,
    done: (data) => {
      feed.hurry();
      return `${name} ${ACTIONS[action].done(data.instances.find((each) => each.status === 200)?.tier)}`;
    },
  });
}

// Sorts rows: models in memory first, then by last use.
function rank(row) {
  const place = TIERS.includes(row.tier) ? TIERS.indexOf(row.tier) : TIERS.length;
  return place * 1e12 + Math.min(row.last_used_s ?? 1e11, 1e11);
}

function actionsOf(row) {
  if (row.retired) return [];
  const verbs = [row.pinned ? "Unpin" : "Pin"];
  if (row.tier !== "device" && row.tier !== "loading") verbs.push("Prewarm");
  if (row.tier === "device" || row.tier === "host") verbs.push("Unload");
  return verbs.map((verb) => ({ verb, label: `${verb} ${row.name} at ${row.instance}`, press: () => press(verb, row.name, row) }));
}

const sizeOf = (row) => (row.bytes ?? 0) + (row.mapped_bytes ?? 0);
const turnOf = (row) => (queues.get(row.instance) ?? []).indexOf(row.name);

function placeInQueue(row) {
  const turn = turnOf(row);
  return row.pinned ? "pinned" : turn === 0 ? "next" : turn > 0 ? number(turn + 1) : "–";
}

function showName(cell, row) {
  if (!cell.firstElementChild) cell.append(make("span"), " ", make("span", "", { class: "quiet" }));
  say(cell.children[0], row.name);
  say(cell.children[1], row.version === undefined || row.version === null ? "" : `version ${row.version}`);
}

const table = new Table($("models-table"), {
  noun: "model",
  nothing: "No such models.",
  key: (row) => JSON.stringify([row.instance, row.name, row.version ?? null, Boolean(row.retired)]),
  sort: { column: 2, isDown: false },
  columns: [
    { title: "Model", is: "name", value: (row) => row.name, fill: showName },
    { title: "Instance", value: (row) => row.instance, fill: text((row) => row.instance) },
    {
      title: "Tier",
      value: rank,
      fill: badge((row) => ({ word: row.tier, kind: TIER_CLASSES[row.tier] ?? "", more: row.reason ?? row.progress ?? "" })),
    },
    { title: "Size", is: "figure", value: sizeOf, fill: text((row) => (sizeOf(row) ? bytes(sizeOf(row)) : "–")) },
    {
      title: "Last use",
      is: "figure",
      value: (row) => -(row.last_used_s ?? Infinity),
      fill: text((row) => (typeof row.last_used_s === "number" ? `${span(row.last_used_s)} ago` : "–")),
    },
    { title: "Requests", is: "figure", value: (row) => row.hits ?? 0, fill: text((row) => number(row.hits ?? 0)) },
    { title: "Eviction", is: "figure", value: (row) => (turnOf(row) < 0 ? -Infinity : -turnOf(row)), fill: text(placeInQueue) },
    { title: "Actions", is: "actions", fill: buttons(actionsOf) },
  ],
});

function show(data) {
  models = data;
  draw();
}

function draw() {
  queues = new Map(models.instances.map((each) => [each.instance, each.next_to_go]));
  const wanted = $("models-filter").value.trim().toLowerCase();
  const silent = models.instances.filter((each) => !each.answered).map((each) => each.instance);
  say($("models-facts"), silent.length ? `no answer from ${silent.join(", ")}` : "");
  table.show(models.models.filter((row) => row.name.toLowerCase().includes(wanted)));
  const isKnown = models.models.some((row) => row.name.toLowerCase() === wanted);
  $("models-prewarm").hidden = !wanted || isKnown;
}

const feed = new Feed(() => get("models"), show, $("models-facts"));

export function pollModels(data) {
  $("models-section").hidden = $("models-link").hidden = !data.has_many_models;
  if (data.has_many_models) feed.poll();
}

// Used and allowed bytes of each tier of an instance; empty if it has not answered.
export function budgetsOf(name) {
  return models.instances.find((each) => each.instance === name)?.budgets ?? {};
}

$("models-filter").oninput = () => {
  table.toStart();
  draw();
};
$("models-prewarm").onclick = () => press("Prewarm", $("models-filter").value.trim());

// The models of endpoints with many: which are where, what goes next, and what may be done to them.
// Uses the tools of dashboard.js, which calls `pollModels` each time that it has drawn the rest.
"use strict";

const MAX_ROWS = 100; // that are drawn; the filter finds the others
const POLL_SHARE = 20; // asking takes no more than a twentieth of the time,
const MAX_PAUSE_MS = 30000; // but is not forgotten
const TIERS = ["device", "host", "loading", "leaving", "disk", "broken"];
const TIER_CLASSES = { device: "good", host: "good", loading: "warn", broken: "bad" };
const ACTIONS = {
  pin: {
    title: "Pin",
    text: "It is loaded, if it is not, and stays in memory until it is unpinned.",
    done: (tier) => `is pinned${tier ? `, on ${tier}` : ""}.`,
  },
  unpin: { title: "Unpin", text: "It may go again when another model needs the memory.", done: () => "is not pinned any more." },
  prewarm: {
    title: "Prewarm",
    text: "It is loaded now, and others may go for it. That may take minutes.",
    done: (tier) => `is loaded${tier ? `, on ${tier}` : ""}.`,
  },
  unload: {
    title: "Unload",
    text: "It goes from memory when the requests that use it have ended. The next request for it waits until it is loaded again.",
    done: () => "is unloaded.",
  },
};

let models = { models: [], instances: [] }; // as last told
let areModelsAsked = false;
let modelsDueAt = 0; // 0: at once, because something was done

async function pollModels(areThere) {
  $("models-section").hidden = !areThere;
  if (!areThere || areModelsAsked || performance.now() < modelsDueAt) return;
  areModelsAsked = true;
  modelsDueAt = Infinity;
  const began = performance.now();
  try {
    const answer = await fetch("models", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    models = await answer.json();
    showModels();
  } catch (error) {
    say($("models-facts"), `The list is old: ${error.message}`);
  }
  const tookMs = performance.now() - began;
  if (modelsDueAt) modelsDueAt = performance.now() + Math.min(MAX_PAUSE_MS, POLL_SHARE * tookMs);
  areModelsAsked = false;
}

// Bytes used and allowed of each tier of an instance; none if it has not told.
function budgetsOf(name) {
  return models.instances.find((each) => each.instance === name)?.budgets ?? {};
}

function showModels() {
  const queues = new Map(models.instances.map((each) => [each.instance, each.next_to_go]));
  const wanted = $("models-filter").value.trim().toLowerCase();
  const rows = models.models.filter((row) => row.name.toLowerCase().includes(wanted));
  const place = (row) => (TIERS.includes(row.tier) ? TIERS.indexOf(row.tier) : TIERS.length);
  const age = (row) => row.last_used_s ?? Infinity;
  rows.sort(
    (a, b) => place(a) - place(b) || (age(a) === age(b) ? a.name.localeCompare(b.name, "en", { numeric: true }) : age(a) - age(b))
  );
  const shown = rows.slice(0, MAX_ROWS);
  const silent = models.instances.filter((each) => !each.answered).map((each) => each.instance);
  const facts = [shown.length < rows.length ? `${number(shown.length)} of ${number(rows.length)} shown` : `${number(rows.length)} shown`];
  if (silent.length) facts.push(`no word from ${silent.join(", ")}`);
  say($("models-facts"), facts.join(" · "));
  const keys = shown.map((row) => JSON.stringify([row.instance, row.name, row.version ?? null, Boolean(row.retired)]));
  const elements = keep($("models"), keys, () => copy("model-template"));
  shown.forEach((row, at) => showModel(elements[at], row, queues.get(row.instance) ?? []));
  const isKnown = models.models.some((row) => row.name.toLowerCase() === wanted);
  $("models-prewarm").hidden = !wanted || isKnown;
}

function showModel(element, row, queue) {
  say(part(element, "name"), row.name);
  say(part(element, "version"), row.version === undefined || row.version === null ? "" : `version ${row.version}`);
  say(part(element, "instance"), row.instance);
  say(part(element, "tier"), row.tier);
  setClass(part(element, "tier"), `badge ${TIER_CLASSES[row.tier] ?? ""}`);
  say(part(element, "more"), row.reason ?? row.progress ?? "");
  const size = (row.bytes ?? 0) + (row.mapped_bytes ?? 0);
  say(part(element, "bytes"), size ? bytes(size) : "–");
  say(part(element, "used"), typeof row.last_used_s === "number" ? `${span(row.last_used_s)} ago` : "–");
  say(part(element, "hits"), number(row.hits ?? 0));
  const turn = queue.indexOf(row.name);
  say(part(element, "goes"), row.pinned ? "pinned" : turn === 0 ? "next" : turn > 0 ? number(turn + 1) : "–");
  const isInMemory = row.tier === "device" || row.tier === "host";
  const actions = row.retired ? [] : [row.pinned ? "unpin" : "pin"];
  if (!row.retired && row.tier !== "device" && row.tier !== "loading") actions.push("prewarm");
  if (!row.retired && isInMemory) actions.push("unload");
  const buttons = keep(part(element, "actions"), actions, () => Object.assign(document.createElement("button"), { type: "button" }));
  actions.forEach((action, at) => {
    say(buttons[at], ACTIONS[action].title);
    buttons[at].setAttribute("aria-label", `${ACTIONS[action].title} ${row.name} at ${row.instance}`);
    buttons[at].onclick = () => askModel(action, row.name, row);
  });
}

// row: undefined to have the proxy choose where.
function askModel(action, name, row) {
  const { title, text } = ACTIONS[action];
  askFirst(`${title} ${name}${row ? ` at ${row.instance}` : ""}?`, text, title, () => actOnModel(action, name, row));
}

async function actOnModel(action, name, row) {
  const where = row ? `?${new URLSearchParams({ endpoint: row.endpoint, instance: row.instance })}` : "";
  say($("done"), `${ACTIONS[action].title} ${name} …`);
  try {
    const answer = await fetch(`models/${encodeURIComponent(name)}/${action}${where}`, { method: "POST" });
    const told = await answer.json();
    const failed = (told.instances ?? []).find((each) => each.status !== 200);
    if (!answer.ok) throw new Error(told.error ?? failed?.error ?? `status ${answer.status}`);
    complain("");
    const tier = told.instances.find((each) => each.status === 200)?.tier;
    say($("done"), `${name} ${ACTIONS[action].done(tier)}`);
  } catch (error) {
    complain(`${name}: ${error.message}`);
  }
  modelsDueAt = 0;
  poll();
}

function startModels() {
  $("models-filter").oninput = showModels;
  $("models-prewarm").onclick = () => askModel("prewarm", $("models-filter").value.trim());
}

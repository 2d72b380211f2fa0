// Draws what GET /dashboard.json tells, every two seconds while somebody can see it.
// Elements are kept and only changed texts are written, so that focus, selection and screen readers stay where they are.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const RETRY_MS = 2000;
const STATES = { ready: "good", starting: "warn", draining: "warn", down: "bad" };
const $ = (id) => document.getElementById(id);
const part = (element, name) => element.querySelector(`[data-is="${name}"]`);
const copy = (id) => $(id).content.firstElementChild.cloneNode(true);

let lastAnswer = null; // when it came
let timer = 0;

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

// One child for each key, made by `make(key)` the first time, in the order of the keys.
function keep(parent, keys, make) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const children = keys.map((key) => {
    const child = known.get(key) ?? make(key);
    known.delete(key);
    child.dataset.key = key;
    return child;
  });
  for (const child of known.values()) child.remove();
  children.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
  return children;
}

// Numbers as text

function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1) return `${number(ms * 1000)} µs`;
  if (ms < 1000) return `${number(ms, ms < 10 ? 1 : 0)} ms`;
  return `${number(ms / 1000, ms < 10000 ? 2 : 1)} s`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1023.5 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

function span(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

const last = (values) => (values.length ? values[values.length - 1] : null);

// Drawings

function draw(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// Curves of the same scale over five minutes, the newest value at the right; null is a gap.
function drawCurves(svg, curves) {
  const most = Math.max(...curves.flat().filter((value) => value !== null), 0) || 1;
  svg.replaceChildren();
  draw(svg, "line", { x1: 0, y1: 35, x2: 150, y2: 35 });
  curves.forEach((values, which) => {
    let path = "";
    let pen = "M";
    values.forEach((value, at) => {
      if (value === null) {
        pen = "M";
        return;
      }
      const x = 150 - (values.length - 1 - at);
      path += `${pen}${x} ${(34 - (value / most) * 32).toFixed(1)}`;
      if (pen === "M" && (at + 1 === values.length || values[at + 1] === null)) path += "h1";
      pen = "L";
    });
    draw(svg, "path", which ? { d: path, class: "second" } : { d: path });
  });
}

function drawHistogram(box, told, what) {
  const total = told.counts.reduce((sum, count) => sum + count, 0);
  const key = JSON.stringify(told);
  if (box.dataset.drawn === key) return;
  box.dataset.drawn = key;
  box.replaceChildren();
  if (!total) {
    box.append(Object.assign(document.createElement("p"), { className: "quiet", textContent: "None in five minutes." }));
    return;
  }
  const bounds = told.upper_ms.map((bound) => (bound === null ? "more" : duration(bound)));
  const label = told.counts.map((count, at) => `${count} up to ${bounds[at]}`).join(", ");
  const svg = draw(box, "svg", { viewBox: "0 0 300 110", preserveAspectRatio: "xMinYMid", role: "img", "aria-label": `${what}: ${label}` });
  const width = Math.min(60, 300 / told.counts.length);
  const most = Math.max(...told.counts);
  const every = Math.ceil(told.counts.length / 6);
  told.counts.forEach((count, at) => {
    const height = count ? Math.max(1.5, (count / most) * 76) : 0;
    draw(svg, "rect", { x: at * width + 1, y: 90 - height, width: width - 2, height });
    if (count === most) {
      draw(svg, "text", { x: (at + 0.5) * width, y: 86 - height, "text-anchor": "middle" }, number(count));
    }
    if (at % every === 0) {
      draw(svg, "text", { x: (at + 0.5) * width, y: 104, "text-anchor": "middle" }, bounds[at]);
    }
  });
  draw(svg, "line", { x1: 0, y1: 90.5, x2: width * told.counts.length, y2: 90.5 });
}

function fillBars(list, rows) {
  const elements = keep(list, rows.map((row) => row.label), () => copy("bar-template"));
  rows.forEach((row, at) => {
    say(elements[at].querySelector(".label"), row.label);
    say(elements[at].querySelector(".value"), row.text);
    const bar = elements[at].querySelector(".bar");
    bar.hidden = row.part === null;
    bar.firstElementChild.style.width = `${Math.min(100, 100 * (row.part ?? 0))}%`;
  });
}

// Parts of the page

function showVariant(panel, variant) {
  const series = variant.series;
  say(part(panel, "name"), `${variant.endpoint} / ${variant.name}`);
  say(
    part(panel, "facts"),
    `${variant.strategy} · ${variant.ready} of ${variant.instances} instances ready · ${number(variant.invocations)} requests`
  );
  const failed = variant.client_errors + variant.server_errors;
  const tiles = [
    ["Requests", `${number(last(series.requests_per_s) ?? 0, 1)}/s`, "", [series.requests_per_s]],
    ["In flight", number(variant.in_flight), "", [series.in_flight]],
    ["Waiting", number(variant.waiting), variant.no_capacity ? `${number(variant.no_capacity)} refused` : "", [series.waiting]],
    ["Errors", `${number(last(series.errors_per_s) ?? 0, 1)}/s`, `${number(failed)} in all`, [series.errors_per_s]],
    [
      "Latency p50, p99",
      duration(last(series.latency_p50_ms)),
      duration(last(series.latency_p99_ms)),
      [series.latency_p50_ms, series.latency_p99_ms],
    ],
    [
      "First chunk p50, p99",
      duration(last(series.first_chunk_p50_ms)),
      duration(last(series.first_chunk_p99_ms)),
      [series.first_chunk_p50_ms, series.first_chunk_p99_ms],
    ],
  ];
  const elements = keep(part(panel, "tiles"), tiles.map((tile) => tile[0]), () => copy("tile-template"));
  tiles.forEach(([title, value, more, curves], at) => {
    say(elements[at].querySelector("dt"), title);
    say(elements[at].querySelector("b"), value);
    const second = elements[at].querySelector("dd > span");
    say(second, more);
    setClass(second, curves.length > 1 ? "second" : "quiet");
    drawCurves(elements[at].querySelector("svg"), curves);
  });
  const quantiles = (told) => (told.counts.length ? `p50 ${duration(told.p50_ms)}, p99 ${duration(told.p99_ms)}` : "");
  say(part(panel, "latency-facts"), quantiles(variant.latency));
  drawHistogram(part(panel, "latency"), variant.latency, "Answers by latency");
  say(part(panel, "first-chunk-facts"), quantiles(variant.first_chunk));
  drawHistogram(part(panel, "first-chunk"), variant.first_chunk, "Streams by time to their first chunk");
  const decisions = Object.entries(variant.decisions).sort((a, b) => b[1] - a[1]);
  const total = decisions.reduce((sum, [, count]) => sum + count, 0);
  say(part(panel, "decisions-facts"), total ? "" : "none in five minutes");
  fillBars(
    part(panel, "decisions"),
    decisions.map(([reason, count]) => ({ label: reason, text: number(count), part: count / total }))
  );
}

// What an instance holds, of what it may hold.
function gauges(instance) {
  const rows = [
    {
      label: "Requests",
      text: `${number(instance.outstanding)} of ${number(instance.capacity)}`,
      part: instance.outstanding / instance.capacity,
    },
  ];
  const add = (label, used, most, write) => {
    if (used !== undefined && most) rows.push({ label, text: `${write(used)} of ${write(most)}`, part: used / most });
  };
  const { sessions = {}, memory = {} } = instance.status ?? {};
  add("Sessions", sessions.open, sessions.max, number);
  add("KV cache (device)", memory.kv_bytes, memory.kv_capacity_bytes, bytes);
  add("Features (device)", memory.features_bytes, memory.features_capacity_bytes, bytes);
  add("Images (host)", memory.host_bytes, memory.host_capacity_bytes, bytes);
  for (const [tier, budget] of Object.entries(budgetsOf(instance.name))) add(`Models (${tier})`, budget.used, budget.max, bytes);
  return rows;
}

function facts(instance) {
  const rows = [["Breaker", instance.failures_in_a_row ? `${instance.breaker}, ${instance.failures_in_a_row} failures in a row` : instance.breaker]];
  if (instance.share < 1) rows.push(["Share of work, coming back", `${Math.round(100 * instance.share)} %`]);
  if (instance.session_room !== null) rows.push(["Room for new sessions", number(instance.session_room)]);
  const { turns, tokens, device } = instance.status ?? {};
  if (turns) rows.push(["Turns running, waiting, done", `${number(turns.running)}, ${number(turns.waiting)}, ${number(turns.finished)}`]);
  if (tokens) {
    const prompts = tokens.prefilled + tokens.reused;
    rows.push(["Tokens generated", number(tokens.generated)]);
    rows.push(["Prompt tokens reused", prompts ? `${Math.round((100 * tokens.reused) / prompts)} %` : "–"]);
  }
  if (device) rows.push(["Device", device]);
  return rows;
}

function progress(instance) {
  if (instance.starting_s === null) return "";
  const usual = instance.last_start_s === null ? "" : ` of about ${Math.round(instance.last_start_s)} s`;
  return `, ${Math.round(instance.starting_s)} s${usual}`;
}

function showInstance(card, instance) {
  const state = part(card, "state");
  say(part(card, "name"), instance.name);
  say(state, instance.state + progress(instance));
  setClass(state, `badge ${STATES[instance.state] ?? "bad"}`);
  if (instance.breaker !== "closed" && instance.state === "ready") {
    say(state, `breaker ${instance.breaker}`);
    setClass(state, "badge bad");
  }
  say(part(card, "where"), `${instance.endpoint} / ${instance.variant} · ${instance.host}:${instance.port}`);
  fillBars(part(card, "gauges"), gauges(instance));
  const list = part(card, "facts");
  const rows = facts(instance);
  const keys = rows.flatMap(([name]) => [`dt ${name}`, `dd ${name}`]);
  const elements = keep(list, keys, (key) => document.createElement(key.slice(0, 2)));
  rows.forEach(([name, text], at) => {
    say(elements[2 * at], name);
    say(elements[2 * at + 1], text);
  });
  const button = part(card, "button");
  const verb = instance.is_drained ? "resume" : instance.state === "ready" ? "drain" : undefined;
  button.hidden = verb === undefined;
  say(button, verb === "resume" ? "Resume" : "Drain");
  button.setAttribute("aria-label", `${button.textContent} ${instance.name}`);
  button.onclick = () => ask(verb, instance);
}

// Nothing is done without a second press, and the first answer is no.
function askFirst(title, text, yes, action) {
  const dialog = $("confirm");
  say($("confirm-title"), title);
  say($("confirm-text"), text);
  say($("confirm-yes"), yes);
  $("confirm-no").onclick = () => dialog.close();
  $("confirm-yes").onclick = () => {
    dialog.close();
    action();
  };
  dialog.showModal();
  $("confirm-no").focus();
}

// Draining

function ask(verb, instance) {
  const isDrain = verb === "drain";
  const title = isDrain ? "Drain" : "Resume";
  const text = isDrain
    ? `It gets no new requests; the ${number(instance.outstanding)} that it works on are finished. With a journal its sessions go on elsewhere.`
    : "It gets requests again as soon as it answers a probe, at first a few.";
  askFirst(`${title} ${instance.name}?`, text, title, () => act(verb, instance.name));
}

async function act(verb, name) {
  try {
    const answer = await fetch(`instances/${encodeURIComponent(name)}/${verb}`, { method: "POST" });
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error);
    complain("");
    say($("done"), `${name} is ${told.state}.`);
  } catch (error) {
    complain(`${name}: ${error.message}`);
  }
  poll();
}

// The loop

function complain(text) {
  const problem = $("problem");
  problem.hidden = !text;
  say(problem, text);
}

function show(told) {
  say($("about"), `version ${told.version} · up for ${span(told.uptime_s)} · ${new Date(told.time * 1000).toLocaleTimeString()}`);
  const ready = told.instances.filter((instance) => instance.state === "ready" && instance.breaker === "closed").length;
  const dead = told.variants.filter((variant) => !variant.ready && variant.desired !== 0);
  say(
    $("health"),
    dead.length ? `no instance ready for ${dead.map((each) => each.endpoint).join(", ")}` : `${ready} of ${told.instances.length} instances ready`
  );
  setClass($("health"), `badge ${dead.length ? "bad" : ready < told.instances.length ? "warn" : "good"}`);
  const panels = keep($("variants"), told.variants.map((each) => `${each.endpoint}/${each.name}`), () => copy("variant-template"));
  told.variants.forEach((variant, at) => showVariant(panels[at], variant));
  const instances = told.instances.slice().sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  const cards = keep($("instances"), instances.map((each) => each.name), () => copy("instance-template"));
  instances.forEach((instance, at) => showInstance(cards[at], instance));
  pollModels(told.has_many_models);
}

let isAsking = false;
let isLost = false;

async function poll() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  let waitMs = RETRY_MS;
  try {
    const answer = await fetch("dashboard.json", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const told = await answer.json();
    show(told);
    if (isLost) complain("");
    isLost = false;
    waitMs = 1000 * told.interval_s;
    lastAnswer = new Date();
  } catch (error) {
    const since = lastAnswer ? ` since ${lastAnswer.toLocaleTimeString()}` : "";
    isLost = true;
    complain(`The proxy does not answer${since}; what is shown is old. (${error.message})`);
  }
  isAsking = false;
  if (!document.hidden) timer = setTimeout(poll, waitMs);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
startModels();
poll();

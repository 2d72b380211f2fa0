// The fleet in one sentence, and the problems that need attention.

import { $, keep, make, say, setAttribute, setClass } from "./dom.js";
import { describeBacklog } from "./queue.js";
import { describeOpen } from "./sessions.js";
import { count, nameOfVariant, number, span } from "./words.js";

const isWell = (instance) => instance.state === "ready" && instance.breaker === "closed";

function sentence(data, ready) {
  const waiting = data.variants.reduce((sum, each) => sum + each.waiting, 0);
  const running = data.variants.reduce((sum, each) => sum + each.in_flight, 0);
  const rate = data.variants.reduce((sum, each) => sum + each.recent.requests_per_s, 0);
  const backlog = describeBacklog();
  const nothing = backlog ? "no client waits" : "nothing waits";
  const waits = waiting ? `${count(waiting, "request")} ${waiting === 1 ? "waits" : "wait"} for an instance` : nothing;
  return `${number(ready)} of ${count(data.instances.length, "instance")} ready, ${waits}. ${count(running, "request")} running, ${number(rate, 1)} per second; ${describeOpen(data)} open.${backlog}`;
}

// The problems, the worst first: text, link target and severity.
function problems(data) {
  const found = [];
  for (const variant of data.variants) {
    const name = `${variant.endpoint} / ${variant.name}`;
    const add = (text, kind = "warn", to = "traffic-title") => found.push({ text, kind, to });
    // With autoscaling, requests may wait until an instance has started.
    const refuses = variant.desired === null ? ": new requests are refused" : "";
    if (!variant.ready && variant.desired !== 0) add(`${name} has no ready instance${refuses}.`, "bad", "instances-title");
    const faults = variant.recent.faults_per_s; // without errors that clients cause
    if (faults > 0.05 * Math.max(variant.recent.requests_per_s, 0.1)) {
      add(`${name}: ${number(faults, 1)} failures per second in the last ten seconds.`, "warn", "decisions-title");
    }
    if (variant.waiting) add(`${name}: ${count(variant.waiting, "request")} waiting for an instance.`);
  }
  for (const instance of data.instances) {
    const add = (text, kind) => found.push({ text: `${instance.name} ${text}`, kind, to: "instances-title" });
    if (instance.state === "down") add(`is down${instance.last_end ? `: it ${instance.last_end.reason}` : ""}.`, "bad");
    else if (instance.breaker !== "closed") add(`answers its probes but fails requests (breaker ${instance.breaker}); its log says why.`, "bad");
    else if (instance.is_drained) add(`is drained: it gets no new requests until it is resumed${instance.outstanding ? `, and works on ${count(instance.outstanding, "request")}` : ""}.`, "warn");
    else if (instance.state === "starting") add(`is starting${instance.starting_s === null ? "" : `, for ${span(instance.starting_s)}`}.`, "warn");
    const { sessions = {} } = instance.status ?? {};
    const isFull = sessions.max && sessions.open >= 0.95 * sessions.max;
    if (isFull && !sessions.is_durable) add(`holds ${number(sessions.open)} of ${number(sessions.max)} sessions: new ones are refused soon.`, "warn");
  }
  for (const group of data.autoscaling) {
    if (group.is_limited) {
      found.push({ text: `${group.endpoint} / ${group.variant}: ${group.why}.`, kind: "warn", to: "scaling-title" });
    }
  }
  return found.sort((a, b) => a.kind.localeCompare(b.kind));
}

export function showOverview(data) {
  const ready = data.instances.filter(isWell).length;
  const dead = data.variants.filter((variant) => !variant.ready && variant.desired !== 0);
  const { length } = data.instances;
  const lost = dead.map((each) => nameOfVariant(each, data.variants)).join(", ");
  say($("health"), dead.length ? `no instance ready for ${lost}` : `${number(ready)} of ${count(length, "instance")} ready`);
  setClass($("health"), `badge ${dead.length ? "bad" : ready < length ? "warn" : "good"}`);
  say($("about"), `version ${data.version} · up for ${span(data.uptime_s)} · ${new Date(data.time * 1000).toLocaleTimeString("en-GB")}`);
  say($("overview"), sentence(data, ready));
  const found = problems(data);
  $("attention-title").hidden = !found.length;
  const rows = keep($("attention"), found.map((each) => each.text), () => {
    const row = make("li");
    row.append(make("a"));
    return row;
  });
  found.forEach(({ text, kind, to }, at) => {
    setClass(rows[at], kind);
    say(rows[at].firstElementChild, text);
    setAttribute(rows[at].firstElementChild, "href", `#${to}`);
  });
}

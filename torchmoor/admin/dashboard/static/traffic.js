// The variants: load, latencies, routing reasons, and waiting requests.

import { $, copy, keep, part, say, setClass } from "./dom.js";
import { drawHistogram, fillBars, fillTile } from "./drawings.js";
import { count, duration, number, quantilesOf, reason } from "./words.js";

function tilesOf(variant) {
  const { series, recent } = variant;
  const failed = variant.client_errors + variant.server_errors;
  return [
    ["Requests", `${number(recent.requests_per_s, 1)}/s`, "", [series.requests_per_s]],
    ["In flight", number(variant.in_flight), "", [series.in_flight]],
    ["Waiting", number(variant.waiting), variant.no_capacity ? `${number(variant.no_capacity)} refused` : "", [series.waiting]],
    ["Errors", `${number(recent.errors_per_s, 1)}/s`, `${number(failed)} in all`, [series.errors_per_s]],
    quantilesTile("Latency", variant, "latency_"),
    quantilesTile("First chunk", variant, "first_chunk_"),
  ];
}

function quantilesTile(title, variant, prefix) {
  const quantiles = quantilesOf(variant.series, prefix);
  const [value, ...more] = quantilesOf(variant.recent, prefix).map(([, each]) => duration(each));
  return [`${title} ${quantiles.map(([name]) => name).join(", ")}`, value, more.join(", "), quantiles.map(([, curve]) => curve), duration];
}

// A session's turn waits for the instance that holds it; other requests wait for any.
function linesOf(variant) {
  const turns = Object.entries(variant.waiting_turns);
  const others = variant.waiting - turns.reduce((sum, [, each]) => sum + each, 0);
  const lines = turns.map(([home, each]) => [`Turns of sessions, for ${home}`, each]);
  if (others > 0) lines.push([variant.ready ? "Others, for any instance" : "Held until an instance is started", others]);
  return lines.map(([label, each]) => ({ label, text: number(each), part: each / variant.waiting }));
}

function showVariant(panel, variant) {
  say(part(panel, "name"), `${variant.endpoint} / ${variant.name}`);
  const facts = [variant.strategy, `${number(variant.ready)} of ${count(variant.instances, "instance")} ready`, count(variant.invocations, "request")];
  if (variant.retries) facts.push(`${number(variant.retries)} sent again`);
  if (variant.mid_stream_errors) facts.push(`${number(variant.mid_stream_errors)} streams broken off`);
  say(part(panel, "facts"), facts.join(" · "));
  const tiles = tilesOf(variant);
  const elements = keep(part(panel, "tiles"), tiles.map((tile) => tile[0]), () => copy("tile-template"));
  tiles.forEach(([title, value, more, curves, write = (each) => number(each, 1)], at) => {
    fillTile(elements[at], title, value, curves, variant.series.seconds_ago, write);
    const second = elements[at].querySelector("dd > span");
    say(second, more);
    setClass(second, curves.length > 1 ? "second" : "quiet");
  });
  const quantiles = (data) =>
    data.counts.length ? quantilesOf(data).map(([name, ms]) => `${name} ${duration(ms)}`).join(", ") : "";
  say(part(panel, "latency-facts"), quantiles(variant.latency));
  drawHistogram(part(panel, "latency"), variant.latency, "Answers by latency");
  say(part(panel, "first-chunk-facts"), quantiles(variant.first_chunk));
  drawHistogram(part(panel, "first-chunk"), variant.first_chunk, "Streams by time to their first chunk");
  const decisions = Object.entries(variant.decisions).sort((a, b) => b[1] - a[1]);
  const total = decisions.reduce((sum, [, each]) => sum + each, 0);
  say(part(panel, "decisions-facts"), total ? "" : "none in this time");
  fillBars(
    part(panel, "decisions"),
    decisions.map(([word, each]) => ({ label: reason(word), text: number(each), part: each / total }))
  );
  const lines = linesOf(variant);
  part(panel, "lines-figure").hidden = !lines.length;
  fillBars(part(panel, "lines"), lines);
}

export function showTraffic(data) {
  const panels = keep($("variants"), data.variants.map((each) => `${each.endpoint}/${each.name}`), () => copy("variant-template"));
  data.variants.forEach((variant, at) => showVariant(panels[at], variant));
}

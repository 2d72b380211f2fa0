// Curves, histograms and bars.

import { $, copy, draw, keep, make, say } from "./dom.js";
import { duration, quantilesOf, short, span } from "./words.js";

// Draws curves on one scale, the newest value at the right; null is a gap.
function drawCurves(svg, curves) {
  const most = Math.max(...curves.flat().filter((value) => value !== null), 0) || 1;
  const paths = curves.map((values) => {
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
    return path;
  });
  if (svg.dataset.drawn === paths.join("|")) return;
  svg.dataset.drawn = paths.join("|");
  svg.replaceChildren();
  draw(svg, "line", { x1: 0, y1: 35, x2: 150, y2: 35 });
  paths.forEach((path, which) => draw(svg, "path", which ? { d: path, class: "second" } : { d: path }));
}

// Shows the values under the pointer, or under a finger. write(value): the text of one.
function showOnHover(svg, curves, secondsAgo, write) {
  const tip = $("tip");
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const x = (150 * (event.clientX - box.left)) / box.width;
    const at = Math.min(secondsAgo.length - 1, Math.round(x) - 150 + secondsAgo.length - 1);
    tip.hidden = at < 0;
    if (at < 0) return;
    const values = curves.map((curve) => (curve[at] === null ? "–" : write(curve[at])));
    say(tip, `${values.join(", ")} · ${span(secondsAgo[at])} ago`);
    tip.style.left = `${Math.max(0, Math.min(event.clientX, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(0, box.top - tip.offsetHeight - 4)}px`;
  };
  svg.onpointerdown = svg.onpointermove;
  svg.onpointerleave = () => {
    tip.hidden = true;
  };
}

// The position of a value, in buckets from the left; values are assumed to spread evenly within a bucket.
function placeOf(value, uppers) {
  const at = uppers.findIndex((upper) => upper === null || value <= upper);
  if (at < 0) return uppers.length;
  if (uppers[at] === null) return at;
  const lower = at ? uppers[at - 1] : uppers[0] / 2;
  return at + Math.min(1, Math.max(0, (value - lower) / (uppers[at] - lower)));
}

// Fills a tile: a title, its newest value, and its curves; write: of a value under the pointer.
export function fillTile(tile, title, value, curves, secondsAgo, write) {
  say(tile.querySelector("dt"), title);
  say(tile.querySelector("b"), value);
  drawCurves(tile.querySelector("svg"), curves);
  showOnHover(tile.querySelector("svg"), curves, secondsAgo, write);
}

// Draws buckets with their counts, and a mark at each quantile.
export function drawHistogram(box, data, what) {
  const total = data.counts.reduce((sum, count) => sum + count, 0);
  const key = JSON.stringify(data);
  if (box.dataset.drawn === key) return;
  box.dataset.drawn = key;
  box.replaceChildren();
  if (!total) {
    box.append(make("p", "None in this time.", { class: "quiet" }));
    return;
  }
  const bounds = data.upper_ms.map((bound) => (bound === null ? "more" : duration(bound)));
  const label = data.counts.map((count, at) => `${count} up to ${bounds[at]}`).join(", ");
  const quantiles = quantilesOf(data);
  const spread = quantiles.map(([name, ms]) => `${name.slice(1)} % within ${duration(ms)}`).join(", ");
  const svg = draw(box, "svg", { viewBox: "0 0 300 128", role: "img", "aria-label": `${what}: ${label}; ${spread}` });
  const width = Math.min(44, 300 / data.counts.length);
  const most = Math.max(...data.counts);
  const every = Math.ceil(data.counts.length / 6);
  data.counts.forEach((count, at) => {
    const height = count ? Math.max(1.5, (count / most) * 74) : 0;
    const bar = draw(svg, "rect", { x: at * width + 1, y: 106 - height, width: width - 2, height });
    draw(bar, "title", {}, `${count} up to ${bounds[at]}`);
    if (at % every === 0) {
      draw(svg, "text", { x: (at + 0.5) * width, y: 121, "text-anchor": "middle" }, bounds[at]);
    }
  });
  draw(svg, "line", { x1: 0, y1: 106.5, x2: width * data.counts.length, y2: 106.5 });
  let labelAt = -14; // labels are 25 wide and do not overlap
  quantiles.forEach(([name, ms], which) => {
    const at = placeOf(ms, data.upper_ms) * width;
    labelAt = Math.min(289 - 25 * (quantiles.length - 1 - which), Math.max(labelAt + 25, at));
    draw(svg, "line", { x1: at, y1: 16, x2: at, y2: 106, class: "mark" });
    draw(svg, "text", { x: labelAt, y: 11, "text-anchor": "middle", class: "mark" }, name);
  });
  data.counts.forEach((count, at) => {
    const y = 102 - Math.max(1.5, (count / most) * 74);
    if (count) draw(svg, "text", { x: (at + 0.5) * width, y, "text-anchor": "middle", class: "count" }, short(count));
  });
}

// Draws bars. rows: label, text, and the filled part of the bar; null for no bar.
export function fillBars(list, rows) {
  const elements = keep(list, rows.map((row) => row.label), () => copy("bar-template"));
  rows.forEach((row, at) => {
    say(elements[at].querySelector(".label"), row.label);
    say(elements[at].querySelector(".value"), row.text);
    const bar = elements[at].querySelector(".bar");
    bar.hidden = row.part === null;
    const width = `${Math.min(100, 100 * (row.part ?? 0)).toFixed(1)}%`;
    if (bar.firstElementChild.style.width !== width) bar.firstElementChild.style.width = width;
  });
}

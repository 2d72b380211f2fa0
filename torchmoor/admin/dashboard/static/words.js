// Formats numbers, times and routing reasons.

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function short(value) {
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

// An endpoint's name; if it has several variants, with this one's.
export function nameOfVariant({ endpoint, name }, variants) {
  const hasOthers = variants.some((each) => each.endpoint === endpoint && each.name !== name);
  return hasOthers ? `${endpoint} / ${name}` : endpoint;
}

// "1 request", "2 requests".
export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1) return `${number(ms * 1000)} µs`;
  if (ms < 1000) return `${number(ms, ms < 10 ? 1 : 0)} ms`;
  return `${number(ms / 1000, ms < 10000 ? 2 : 1)} s`;
}

// The quantiles in an object of /dashboard.json, as [name, value]: {latency_p50_ms: 3} has ["p50", 3] after "latency_".
export function quantilesOf(data, prefix = "") {
  const form = new RegExp(`^${prefix}(p[0-9]+)_ms$`);
  return Object.entries(data).flatMap(([key, value]) => (form.test(key) ? [[form.exec(key)[1], value]] : []));
}

export function bytes(value) {
  if (typeof value !== "number") return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1023.5 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

export function span(seconds) {
  if (seconds < 120) return `${Math.floor(Math.max(0, seconds))} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

// The proxy's times are in seconds since 1970; its clock may differ from this machine's.
let clockAhead = 0;

export function setClock(proxySeconds) {
  clockAhead = proxySeconds - Date.now() / 1000;
}

export function ago(at) {
  return typeof at === "number" ? `${span(Date.now() / 1000 + clockAhead - at)} ago` : "–";
}

export function until(at) {
  return typeof at === "number" ? `in ${span(at - Date.now() / 1000 - clockAhead)}` : "–";
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

// A request's error: the handler's own code if there is one, else the code that the client received.
export const errorOf = (row) => row.model_error ?? row.error;

// A request's outcome as a word, and its severity.
export function outcomeOf(row) {
  if (row.outcome === "client gone") return { word: "client left", kind: "warn" };
  if (row.outcome === "broken") return { word: "broken off", kind: "bad", more: errorOf(row) ?? "" };
  if (row.status === null) return { word: row.outcome, kind: "warn" };
  const kind = row.status >= 500 ? "bad" : row.status >= 400 ? "warn" : "good";
  return { word: row.status < 400 ? "answered" : String(row.status), kind, more: errorOf(row) ?? "" };
}

let reasons = {}; // name -> sentence, from the proxy

export function setReasons(sentences) {
  reasons = sentences;
}

// The text of a routing reason; an unknown one is shown as it is.
export function reason(word) {
  if (!word) return "none could be chosen";
  return reasons[word] ?? word.replaceAll("-", " ");
}

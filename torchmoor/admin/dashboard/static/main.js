// Draws what GET /dashboard.json tells, every two seconds while somebody can see it, and has the lists ask for theirs.

import { onChange } from "./actions.js";
import { pollDecisions } from "./decisions.js";
import { $, say } from "./dom.js";
import { showInstances } from "./instances.js";
import { budgetsOf, pollModels } from "./models.js";
import { showOverview } from "./overview.js";
import { pollQueue } from "./queue.js";
import { showScaling } from "./scaling.js";
import { pollSessions } from "./sessions.js";
import { showTraffic } from "./traffic.js";
import { setClock } from "./words.js";

const RETRY_MS = 2000;
const TIMEOUT_MS = 10000;

let lastAnswer = null; // when it came
let timer = 0;
let isAsking = false;

function show(told) {
  setClock(told.time);
  showOverview(told);
  showTraffic(told);
  showInstances(told, budgetsOf);
  showScaling(told);
  if (document.hidden) return; // since the question was asked
  pollSessions(told);
  pollDecisions(told);
  pollQueue(told);
  pollModels(told);
}

function tellLost(text) {
  $("lost").hidden = !text;
  say($("lost"), text);
  document.body.classList.toggle("old", Boolean(text));
}

async function ask() {
  let told;
  try {
    const answer = await fetch("dashboard.json", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!answer.ok) {
      tellLost(answer.status === 401 ? "The admin token is asked for: reload the page." : `The proxy answers ${answer.status}; what is shown is old.`);
      return RETRY_MS;
    }
    told = await answer.json();
  } catch (error) {
    const since = lastAnswer ? ` since ${lastAnswer.toLocaleTimeString("en-GB")}` : "";
    tellLost(`The proxy does not answer${since}; what is shown is old. Is it running? (${error.message})`);
    return RETRY_MS;
  }
  lastAnswer = new Date();
  tellLost("");
  show(told);
  return 1000 * told.interval_s;
}

async function poll() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  let waitMs = RETRY_MS;
  try {
    waitMs = await ask();
  } finally {
    isAsking = false;
    if (!document.hidden) timer = setTimeout(poll, waitMs);
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else poll();
});
onChange(poll);
poll();

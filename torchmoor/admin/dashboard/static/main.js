// Polls GET /dashboard.json every two seconds while the page is visible, draws it, and refreshes the lists.

import { onChange } from "./actions.js";
import { pollDecisions } from "./decisions.js";
import { $, say, setAttribute } from "./dom.js";
import { showInstances } from "./instances.js";
import { budgetsOf, pollModels } from "./models.js";
import { showOverview } from "./overview.js";
import { pollQueue } from "./queue.js";
import { showScaling } from "./scaling.js";
import { pollSessions } from "./sessions.js";
import { showTraffic } from "./traffic.js";
import { setClock, setReasons } from "./words.js";

const RETRY_MS = 2000;
const TIMEOUT_MS = 10000;

let lastAnswer = null; // time of the last answer
let timer = 0;
let isAsking = false;
let isStale = false; // the user has chosen another range during the request

function show(data) {
  setClock(data.time);
  setReasons(data.reasons);
  showChatLink(data);
  showOverview(data);
  showTraffic(data);
  showInstances(data, budgetsOf);
  showScaling(data);
  if (document.hidden) return; // the page was hidden during the request
  pollSessions(data);
  pollDecisions(data);
  pollQueue(data);
  pollModels(data);
}

function showChatLink({ chat_scheme: scheme, chat_port: port }) {
  $("chat-link").hidden = port === null;
  setAttribute($("chat-link"), "href", `${scheme}://${location.hostname}:${port}/chat`);
}

function showLost(text) {
  $("lost").hidden = !text;
  say($("lost"), text);
  document.body.classList.toggle("old", Boolean(text));
}

async function ask() {
  let data;
  try {
    const answer = await fetch(`dashboard.json?range=${$("range").value}`, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!answer.ok) {
      showLost(answer.status === 401 ? "The admin plane requires the admin token: reload the page." : `The proxy answers ${answer.status}; the page shows old data.`);
      return RETRY_MS;
    }
    data = await answer.json();
  } catch (error) {
    const since = lastAnswer ? ` since ${lastAnswer.toLocaleTimeString("en-GB")}` : "";
    showLost(`The proxy does not answer${since}; the page shows old data. Is it running? (${error.message})`);
    return RETRY_MS;
  }
  lastAnswer = new Date();
  showLost("");
  show(data);
  return 1000 * data.interval_s;
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
    if (isStale) waitMs = 0;
    isStale = false;
    if (!document.hidden) timer = setTimeout(poll, waitMs);
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else poll();
});
$("range").onchange = () => {
  if (isAsking) isStale = true;
  else poll();
};
onChange(poll);
poll();

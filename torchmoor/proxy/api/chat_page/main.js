// Connects the sessions, their log and the composer; owns the choice of the session that is shown.

import * as api from "./api.js";
import { Composer } from "./composer.js";
import * as history from "./history.js";
import { Session } from "./session.js";
import { chosenParameters, takeSystem } from "./settings.js";
import { askForToken, untilToken } from "./token.js";
import { download } from "./transcript.js";
import { $, alarm, announce, complain, Log, movedInWords, reveal, say, showSessions, switchButtonOf } from "./view.js";
import { setReasons, span } from "./words.js";

const TICK_MS = 1000;
const RETRY_MS = 3000;
const LEARN_MS = 1000;
const LEARN_TRIES = 5;
const CONTINUE = "Continue where you stopped.";
const log = new Log();
const composer = new Composer(ask, () => current.stop());
const heard = new WeakSet(); // turns whose beginning was announced
const closedKeys = new Set(); // of sessions that the user has closed, in any tab
let sessions = [];
let current = null;
let limits = null;

const hooks = {
  onTurn(session, turn) {
    if (!sessions.includes(session)) return; // the user has closed it
    for (const each of session.turns) {
      if (each === turn || each.failure || each.state === "stopped" || each.isCut) log.update(session, each, remedyFor(session, each), toolsFor(session, each));
    }
    tell(session, turn);
    refresh(session);
    if (!turn.isRunning || turn.state === "sending") save(session);
  },
  onSession(session) {
    refresh(session);
    if (sessions.includes(session)) save(session); // what the server has changed
  },
  onReturned(session, turn, message) {
    log.forgetTurn(session, turn);
    const { draft } = session; // typed during the request
    session.draft = { text: draft.text || turn.question, pictures: [...turn.pictures, ...draft.pictures] };
    if (session === current) composer.show(session);
    const words = `The pictures were refused: ${message} The question was not sent.`;
    if (session === current) complain(words);
    else log.notice(session, words, "bad");
  },
  onExpiring(session, leftS) {
    announce(`${named(session)} expires in ${span(leftS)}.`);
    refresh(session);
  },
  onEnded(session, message) {
    const explanation = `${message} The server no longer has the session; the conversation stays here while this page is open.`;
    offerReopening(session, explanation);
    announce(`${named(session)}: ${message}`);
    refresh(session);
  },
  needToken: askForToken,
};

function remedyFor(session, turn) {
  if (session.running || session.state === "closed") return null;
  if (turn.failure?.remedy === "edit") return { label: "Edit the question", run: () => composer.write(turn.question) };
  if (turn.failure && (turn.failure.remedy === "reopen" || session.state === "ended")) return { label: reopenWords(session), run: () => reopen(session, turn) };
  if (turn.failure || turn.state === "stopped") return { label: "Ask again", run: () => askAgain(session, turn) };
  if (turn.isCut && turn === session.turns.at(-1) && session.state === "open") {
    return { label: "Continue", run: () => ask(CONTINUE, []) };
  }
  return null;
}

function toolsFor(session, turn) {
  return {
    copy: turn.text && navigator.clipboard && (() => copy(turn.text)), // no clipboard over plain HTTP from another host
    edit: turn.failure?.remedy !== "edit" && (() => edit(session, turn)),
    another: turn.state === "done" && (() => askForAnother(session, turn)),
  };
}

// Show a branch with the turns before this one; the session stays as it is. Returns false if the server lacks them.
function showBranch(session, turn) {
  const branch = session.branch(turn, limits);
  if (!branch) return false;
  sessions = [branch, ...sessions];
  for (const each of branch.turns) log.update(branch, each, null, toolsFor(branch, each));
  show(branch);
  return true;
}

function edit(session, turn) {
  if (showBranch(session, turn)) announce("A branch of the session begins before this question. The session stays as it is.");
  else composer.write(turn.question);
  $("question").focus();
}

function askForAnother(session, turn) {
  if (session.running || session.state === "closed") return;
  if (!showBranch(session, turn)) ask(turn.question, []);
  else composer.ask(turn.question);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied.");
  } catch (error) {
    complain(`The answer cannot be copied: ${error.message}`);
  }
}

function askAgain(session, turn) {
  if (session.running) return;
  log.moveToEnd(session, turn);
  session.askAgain(turn);
}

const reopenWords = (session) =>
  session.pictures.length + session.untaken.length ? "Open it again with the same pictures" : "Open it again";

function offerReopening(session, message) {
  session.offer?.remove();
  session.offer = log.notice(session, message, "warn", { label: reopenWords(session), run: () => reopen(session) });
}

// turn: the question that failed because the session had ended, which is then asked again; or null.
async function reopen(session, turn = null) {
  session.offer?.remove();
  session.offer = null;
  const hadTurns = session.turns.some((turn) => turn.state === "done");
  const line = log.notice(session, "Opening it again…");
  await session.reopen();
  line.remove();
  if (session.state !== "open") return;
  if (turn) askAgain(session, turn);
  const words = hadTurns ? "Opened again. The model has the pictures, but not the conversation above." : "Opened again.";
  log.notice(session, words);
  announce(words);
  refresh(session);
}

// Announce a turn to screen readers: its beginning, and the whole answer at its end.
function tell(session, turn) {
  if (turn.isRunning) {
    if (turn.waiting && session === current) announceOnce(turn, turn.waiting);
    return;
  }
  const where = session === current ? "" : `${named(session)}: `;
  if (turn.moved) announce(where + movedInWords(turn));
  if (turn.failure) alarm(where + turn.failure.message);
  else if (turn.state === "stopped") announce(`${where}Stopped.`);
  else announce(`${where}Answer: ${turn.text}`);
}

function announceOnce(turn, text) {
  if (heard.has(turn)) return;
  heard.add(turn);
  announce(text);
}

const named = (session) => (session === current ? "This session" : `The session “${session.title}”`);

// Sessions

function startSession() {
  const unused = sessions.find((session) => !session.turns.length && session.state === "new");
  if (unused && unused.endpoint === $("endpoint").value) return show(unused);
  learn($("endpoint").value);
  const session = new Session($("endpoint").value, limits, hooks);
  if (unused) session.draft = unused.draft;
  sessions = [session, ...sessions.filter((each) => each !== unused)];
  return show(session);
}

// Ask the server again as long as it does not know an endpoint's capabilities, because no instance has reported yet.
async function learn(endpoint) {
  for (let tries = 0; tries < LEARN_TRIES && limits.capabilities[endpoint].can_see === null; tries += 1) {
    await new Promise((resolve) => setTimeout(resolve, LEARN_MS));
    try {
      limits.capabilities = { ...limits.capabilities, ...(await api.findEndpoints()).capabilities };
    } catch {
      return; // the next session asks again
    }
  }
  for (const session of sessions) session.capabilities = limits.capabilities[session.endpoint];
  if (current?.endpoint === endpoint) composer.showState();
}

function show(session) {
  current = session;
  log.show(session);
  composer.show(session);
  if ($("endpoint").value !== session.endpoint) $("endpoint").value = session.endpoint;
  refresh(session);
  reveal(session);
}

function refresh(session) {
  showSessions(sessions, current, { onSwitch: switchTo, onClose: close });
  if (session !== current) return;
  say($("title"), session.title);
  document.title = session.turns.length ? `${session.title} – torchmoor chat` : "torchmoor chat";
  composer.showState();
  showExpiry();
}

function switchTo(session) {
  show(session);
  announce(`Session: ${session.title}`);
  $("question").focus();
}

async function close(session) {
  const closing = session.close();
  history.tellClosed(session.key);
  drop(session);
  (switchButtonOf(current) ?? $("new-session")).focus();
  announce(`Closed: ${session.title}`);
  try {
    await closing;
  } catch (error) {
    const isForgotten = error instanceof api.Refused && error.kind === "ValidationError"; // it is gone already
    if (!isForgotten) announce(`The server did not get the request to close the session (${error.message}); the session expires there.`);
  }
}

function onClosedElsewhere(key) {
  closedKeys.add(key);
  const session = sessions.find((each) => each.key === key);
  if (!session) return;
  const half = session === current ? session.draft.text : "";
  session.leave();
  drop(session);
  if (half) {
    startSession();
    composer.write(half);
  }
  announce(`Closed in another tab: ${session.title}`);
}

// Remove a closed session from the page, and from what the browser keeps.
function drop(session) {
  const at = sessions.indexOf(session);
  sessions.splice(at, 1);
  closedKeys.add(session.key);
  history.remove(session.key).catch(complainOfKeeping);
  log.forget(session);
  session.release();
  if (session === current) {
    if (sessions.length) show(sessions[Math.min(at, sessions.length - 1)]);
    else startSession();
  } else {
    refresh(session);
  }
}

async function ask(question, pictures) {
  const session = current;
  if (session.state === "ended") await reopen(session);
  if (session.state === "closed") return; // by the user, meanwhile
  if (session.state === "ended") {
    session.draft = { text: question, pictures };
    if (session === current) composer.show(session);
    return;
  }
  announce("Asked.");
  takeSystem(session);
  session.ask(question, pictures, chosenParameters());
}

function showExpiry() {
  const leftS = current.expiresAt === null ? null : (current.expiresAt - Date.now()) / 1000;
  const isOpen = current.state === "open" && leftS !== null && leftS > 0;
  $("expiry").hidden = !isOpen;
  if (!isOpen) return;
  $("expiry").classList.toggle("soon", leftS <= 120);
  say($("expiry"), `This session expires in ${span(leftS)}.`);
}

// Start and end of the page

async function begin() {
  for (;;) {
    try {
      limits = await api.findEndpoints();
      break;
    } catch (error) {
      complain(error.message);
      const isDenied = error instanceof api.Refused && error.isDenied;
      if (isDenied && (await askForToken(error.message))) continue;
      await untilToken(isDenied ? null : RETRY_MS);
    }
  }
  complain("");
  const names = limits.endpoints;
  setReasons(limits.reasons);
  $("endpoint").replaceChildren(...names.map((name) => new Option(name, name)));
  $("endpoint-choice").hidden = names.length < 2;
  if (!names.length) {
    complain("This server has no model for this page, which supports only endpoints with one model.");
    return;
  }
  await restoreSessions();
  $("frame").inert = false;
  startSession();
  $("question").focus();
  setInterval(() => {
    for (const session of sessions) session.tick(Date.now());
    showExpiry();
  }, TICK_MS);
}

// What the browser keeps

function complainOfKeeping(error) {
  complain(`This browser does not keep the session: ${error.message}`);
}

function save(session) {
  if (!session.turns.length || session.state === "closed") return;
  history.save(session.makeRecord(), session.known, session.own).catch(complainOfKeeping);
}

// Show the kept sessions, also those that another tab has added or changed.
async function restoreSessions() {
  $("keep").checked = history.isKept();
  if (!history.isKept()) return;
  try {
    for (const record of await history.load()) {
      if (limits.endpoints.includes(record.endpoint)) restoreSession(record);
    }
  } catch (error) {
    complain(`The sessions that this browser keeps cannot be read: ${error.message}`);
  }
}

function restoreSession(record) {
  if (closedKeys.has(record.key)) return; // closed while the records were read
  const old = sessions.find((session) => session.key === record.key);
  if (old && (old.running || !old.isBehind(record))) return;
  const session = Session.restore(record, limits, hooks);
  if (old) {
    [session.draft, old.draft] = [old.draft, session.draft];
    log.forget(old);
    old.release();
  }
  sessions = old ? sessions.map((each) => (each === old ? session : each)) : [...sessions, session];
  for (const turn of session.turns) log.update(session, turn, null, toolsFor(session, turn));
  for (const turn of session.turns) log.update(session, turn, remedyFor(session, turn), toolsFor(session, turn));
  if (current && current === old) show(session);
  else if (current) refresh(session);
}

$("keep").onchange = async () => {
  try {
    if ($("keep").checked) {
      history.keep();
      sessions.forEach(save);
    } else {
      await history.forgetAll();
    }
    announce($("keep").checked ? "Sessions are kept in this browser." : "The kept sessions are deleted.");
  } catch (error) {
    $("keep").checked = history.isKept();
    complainOfKeeping(error);
  }
};
$("export").onclick = () => download(current);
$("log").addEventListener("click", (event) => {
  const button = event.target.closest("[data-copies]");
  if (button) copy(button.closest(".code").querySelector("code").textContent);
});

$("new-session").onclick = () => {
  startSession();
  $("question").focus();
};
$("endpoint").onchange = startSession;
const isDark = matchMedia("(prefers-color-scheme: dark)");
function showScheme(scheme) {
  document.documentElement.dataset.scheme = scheme;
  say($("scheme-button"), scheme === "dark" ? "Light colours" : "Dark colours");
}
$("scheme-button").onclick = () => showScheme(document.documentElement.dataset.scheme === "dark" ? "light" : "dark");
showScheme(isDark.matches ? "dark" : "light");
isDark.onchange = () => showScheme(isDark.matches ? "dark" : "light");
$("token-button").onclick = () => askForToken("");
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && current?.running && !document.querySelector("dialog[open]")) current.stop();
});
history.watchClosed(onClosedElsewhere);
addEventListener("focus", () => {
  if (current) restoreSessions();
});
addEventListener("offline", () => complain("The network is down. The text that you typed stays here."));
addEventListener("online", () => complain(""));
addEventListener("pagehide", (event) => {
  if (event.persisted || history.isKept()) return; // the user may return to the sessions
  for (const session of sessions) session.close({ keepalive: true }).catch(() => {});
});
begin();

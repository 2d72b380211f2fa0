// What an operator does: nothing without a question that says what will happen, and what came of it is said aloud.

import { $, say } from "./dom.js";

const SHOWN_MS = 10000;
const TIMEOUT_MS = 400000; // an unload waits for the requests that use the model, at the proxy up to 360 s
const HINTS = {
  401: "Reload the page and give the admin token.",
  404: "It may have ended meanwhile; the list will show.",
  409: "It has changed meanwhile; look again.",
  429: "It is busy: try again in a moment.",
  503: "Try again in a moment.",
  504: "It may still happen: look at the list before you try again.",
};

let refresh = () => {};
let timer = 0;

// What to do when something was changed.
export function onChange(poll) {
  refresh = poll;
}

export function complain(text) {
  $("problem").hidden = !text;
  say($("problem-text"), text);
}

export function announce(text) {
  const done = $("done");
  done.classList.remove("visually-hidden");
  say(done, text);
  clearTimeout(timer);
  timer = setTimeout(() => done.classList.add("visually-hidden"), SHOWN_MS);
}

// The first answer is no.
function confirm(title, text, yes) {
  const dialog = $("confirm");
  say($("confirm-title"), title);
  say($("confirm-text"), text);
  say($("confirm-yes"), yes);
  $("confirm-no").onclick = () => dialog.close("no");
  $("confirm-yes").onclick = () => dialog.close("yes");
  dialog.returnValue = "no";
  dialog.showModal();
  $("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
  });
}

// Ask, POST, and tell. title: of the question; text: what will happen; yes: the verb; subject: what it is done to;
// done(told): what came of it.
export async function act({ title, text, yes, subject, path, done }) {
  if (!(await confirm(title, text, yes))) return;
  announce(`${yes} ${subject} …`);
  try {
    const answer = await fetch(path, { method: "POST", signal: AbortSignal.timeout(TIMEOUT_MS) });
    const told = await answer.json().catch(() => ({}));
    if (!answer.ok) {
      const failed = (told.instances ?? []).find((each) => each.status !== 200);
      const said = told.error ?? failed?.error ?? (told.state ? `it is ${told.state} already.` : `status ${answer.status}.`);
      throw new Error(`${said.replace(/[.\s]*$/, ".")} ${HINTS[answer.status] ?? ""}`.trim());
    }
    complain("");
    announce(done(told));
  } catch (error) {
    const isLost = error instanceof TypeError;
    const isLate = error.name === "TimeoutError";
    const why = isLost ? "the proxy does not answer; is it running?" : isLate ? `no answer in time. ${HINTS[504]}` : error.message;
    announce("");
    complain(`${yes} ${subject}: ${why}`);
  }
  refresh();
}

$("problem-close").onclick = () => complain("");

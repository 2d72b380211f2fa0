// Operator actions. Each asks for confirmation, and screen readers announce its result.

import { $, say } from "./dom.js";

const SHOWN_MS = 10000;
const TIMEOUT_MS = 400000; // an unload waits for the requests that use the model; the proxy allows 360 s
const HINTS = {
  401: "Reload the page and enter the admin token.",
  404: "It may have ended in the meantime; the list will show it.",
  409: "It has changed in the meantime; check the list.",
  429: "It is busy: try again in a moment.",
  503: "Try again in a moment.",
  504: "It may still happen: look at the list before you try again.",
};

let refresh = () => {};
let timer = 0;

// Sets the function to call after a change.
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

// The default button cancels.
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
    // A browser sends the event later. If the dialog is open, the event is of the question before.
    dialog.onclose = () => dialog.open || resolve(dialog.returnValue === "yes");
  });
}

// Asks for confirmation, POSTs, and announces the result. title, text: of the dialog; yes: the verb on its button;
// subject: the verb's object; done(data): returns the text that reports success.
export async function act({ title, text, yes, subject, path, done }) {
  if (!(await confirm(title, text, yes))) return;
  announce(`${yes} ${subject} …`);
  try {
    const answer = await fetch(path, { method: "POST", signal: AbortSignal.timeout(TIMEOUT_MS) });
    const data = await answer.json().catch(() => ({}));
    if (!answer.ok) {
      const failed = (data.instances ?? []).find((each) => each.status !== 200);
      const said = data.error ?? failed?.error ?? (data.state ? `it is ${data.state} already.` : `status ${answer.status}.`);
      throw new Error(`${said.replace(/[.\s]*$/, ".")} ${HINTS[answer.status] ?? ""}`.trim());
    }
    complain("");
    announce(done(data));
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

// The token that requests are sent with: the dialog that asks for it.

import { setToken } from "./api.js";
import { $, announce, say } from "./view.js";

let answer = null; // a promise of the open dialog's result
let onToken = () => {}; // called when a token is set

// Return whether the user has given a token.
export function askForToken(message) {
  answer ??= new Promise((resolve) => {
    const dialog = $("token-dialog");
    say($("token-text"), message || "Requests are sent with this token if the server requires one.");
    $("token").value = "";
    $("token-no").onclick = () => dialog.close("");
    dialog.returnValue = "";
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      dialog.close("used");
    };
    dialog.addEventListener(
      "close",
      () => {
        const given = $("token").value.trim();
        const isUsed = dialog.returnValue === "used" && Boolean(given);
        $("token").value = "";
        answer = null;
        if (isUsed) {
          setToken(given);
          announce("The token is in use.");
          onToken();
        }
        resolve(isUsed);
      },
      { once: true }
    );
    dialog.showModal();
  });
  return answer;
}

// Wait until a token is set, or for this time; null: without a limit.
export function untilToken(limitMs) {
  return new Promise((resolve) => {
    onToken = resolve;
    if (limitMs !== null) setTimeout(resolve, limitMs);
  });
}

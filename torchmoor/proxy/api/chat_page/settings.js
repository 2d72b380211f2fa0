// The user's settings for the next answers; for an empty field, the server's default applies.

import { $ } from "./view.js";

const FIELDS = { max_new_tokens: "max-tokens", temperature: "temperature", seed: "seed" };

export function chosenParameters() {
  const given = Object.entries(FIELDS).filter(([, id]) => $(id).value !== "");
  return Object.fromEntries(given.map(([name, id]) => [name, Number($(id).value)]));
}

// Returns whether all fields are valid; otherwise shows the first one that is not, and why.
export function checkParameters() {
  const wrong = Object.values(FIELDS).find((id) => !$(id).validity.valid);
  if (!wrong) return true;
  $("settings").open = true;
  $(wrong).reportValidity();
  return false;
}

// The system prompt belongs to a session from its first question on.
export function showSystem(session) {
  const isFixed = session.turns.length > 0;
  $("system").disabled = isFixed;
  if (isFixed) $("system").value = session.system;
  $("system-note").hidden = !isFixed;
}

export function takeSystem(session) {
  if (!session.turns.length) session.system = $("system").value.trim();
}

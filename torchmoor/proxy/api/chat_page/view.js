// Shows sessions and turns. Texts of users, models and files never become markup (markdown.js makes elements).

import { showMarkdown } from "./markdown.js";
import { plural, receiptRows, receiptSummary } from "./words.js";

export const $ = (id) => document.getElementById(id);
export const part = (element, name) => element.querySelector(`[data-is="${name}"]`);
const copy = (id) => $(id).content.firstElementChild.cloneNode(true);
const LONG_TEXT = 4000; // characters; a running answer that is longer is drawn at most every DRAW_MS
const DRAW_MS = 100;
const isNarrow = matchMedia("(max-width: 760px)");

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// For screen readers, which read only the last text. So it contains the texts of the last moment, too.
let said = [];

export function announce(text) {
  const now = performance.now();
  said = [...said.filter((each) => now - each.at < 800), { at: now, text }];
  $("announcer").textContent = said.map((each) => each.text).join(" ");
}

export function alarm(text) {
  $("alarm").textContent = "";
  $("alarm").textContent = text;
}

// Show why the page cannot send the question, in the line above it.
export function complain(text) {
  $("composer-notice").hidden = !text;
  say($("composer-notice"), text);
  if (text) alarm(text);
}

// A picture with its note; with onRemove also a button that removes it.
export function showPicture(picture, onRemove) {
  const element = copy("picture-template");
  const image = element.querySelector("img");
  image.src = picture.url;
  image.alt = picture.name;
  image.title = picture.description;
  part(element, "note").textContent = onRemove ? picture.note : "";
  const remove = part(element, "remove");
  if (!onRemove) image.replaceWith(zoomable(image));
  if (onRemove) {
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.onclick = onRemove;
  } else {
    remove.remove();
  }
  return element;
}

// A button around a picture that shows it in its full size, if there is room.
function zoomable(image) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "zoom" });
  button.setAttribute("aria-label", `Enlarge ${image.alt}`);
  button.append(image.cloneNode());
  button.onclick = () => {
    Object.assign($("zoom").querySelector("img"), { src: image.src, alt: image.alt });
    $("zoom").showModal();
  };
  return button;
}

// Elements of turns and notices, by session; only the current session's are in the page.
export class Log {
  #items = new Map(); // session -> its elements in order
  #turns = new Map(); // turn -> element
  #drawing = new Set(); // turns whose text will be drawn soon
  #session = null;

  show(session) {
    this.#session = session;
    $("log").replaceChildren(...this.#itemsOf(session));
    scrollTo({ top: document.documentElement.scrollHeight });
  }

  #itemsOf(session) {
    if (!this.#items.has(session)) this.#items.set(session, []);
    return this.#items.get(session);
  }

  #append(session, element) {
    this.#itemsOf(session).push(element);
    if (session === this.#session) keepAtEnd(() => $("log").append(element));
  }

  // A line between the turns; with an action also a button, which removes the line and runs the action.
  notice(session, text, kind = "info", action = null) {
    const element = document.createElement("li");
    element.className = `notice ${kind}`;
    const words = document.createElement("p");
    words.textContent = text;
    element.append(words);
    if (action) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: action.label });
      button.onclick = () => {
        this.#drop(session, element);
        $("question").focus();
        action.run();
      };
      element.append(button);
    }
    this.#append(session, element);
    return { remove: () => this.#drop(session, element) };
  }

  #drop(session, element) {
    element.remove();
    const items = this.#itemsOf(session);
    if (items.includes(element)) items.splice(items.indexOf(element), 1);
  }

  moveToEnd(session, turn) {
    const element = this.#turns.get(turn);
    if (!element || this.#itemsOf(session).at(-1) === element) return;
    this.#drop(session, element);
    this.#append(session, element);
  }

  forgetTurn(session, turn) {
    const element = this.#turns.get(turn);
    if (element) this.#drop(session, element);
    this.#turns.delete(turn);
  }

  forget(session) {
    for (const turn of session.turns) this.#turns.delete(turn);
    this.#items.delete(session);
  }

  #add(session, turn) {
    const element = copy("turn-template");
    part(element, "question").textContent = turn.question;
    part(element, "thumbs").append(...turn.pictures.map((picture) => showPicture(picture)));
    part(element, "receipt").open = !isNarrow.matches;
    const before = this.#turns.get(session.turns[session.turns.indexOf(turn) - 1]);
    if (before) part(before, "receipt").open = false; // only one receipt is open; the others show their summaries
    this.#turns.set(turn, element);
    this.#append(session, element);
    if (session === this.#session) element.scrollIntoView({ block: "end" });
    return element;
  }

  #draw(turn, box) {
    if (!turn.isRunning || turn.text.length < LONG_TEXT) {
      showMarkdown(box, turn.text);
    } else if (!this.#drawing.has(turn)) {
      this.#drawing.add(turn);
      setTimeout(() => {
        this.#drawing.delete(turn);
        keepAtEnd(() => showMarkdown(box, turn.text));
      }, DRAW_MS);
    }
  }

  // Draw the turn. remedy: {label, run} or null. tools: functions of its other buttons, {copy, edit, another}.
  update(session, turn, remedy, tools) {
    const element = this.#turns.get(turn) ?? this.#add(session, turn);
    keepAtEnd(() => {
      this.#draw(turn, part(element, "text"));
      part(element, "text").classList.toggle("growing", turn.isRunning);
      const state = stateInWords(turn);
      part(element, "state").hidden = !state;
      say(part(element, "state"), state);
      part(element, "state").className = turn.waiting ? "notice warn" : "quiet";
      part(element, "moved").hidden = !turn.moved;
      say(part(element, "moved"), turn.moved ? movedInWords(turn) : "");
      part(element, "failure").hidden = !turn.failure;
      say(part(element, "message"), turn.failure?.message ?? "");
      part(element, "buttons").hidden = !remedy;
      if (remedy) {
        say(part(element, "remedy"), remedy.label);
        part(element, "remedy").onclick = () => {
          $("question").focus();
          remedy.run();
        };
      }
      part(element, "tools").hidden = turn.isRunning;
      for (const [name, run] of Object.entries(tools)) {
        part(element, name).hidden = !run;
        part(element, name).onclick = run;
      }
      if (!turn.isRunning) showReceipt(part(element, "receipt"), turn.receipt);
      else part(element, "receipt").hidden = true;
    });
  }
}

function stateInWords(turn) {
  if (turn.isRunning && turn.wasStopped) return "Stopping…";
  if (turn.waiting) return turn.waiting;
  if (turn.state === "sending") return "Sending…";
  if (turn.state === "stopped" && turn.wasRunning) return "The answer was not complete when this page read it. Another tab may show the rest.";
  if (turn.state === "stopped") return "Stopped. The question and its answer are part of the conversation only if the answer was already complete.";
  if (!turn.isCut) return "";
  return turn.wasStopped ? "Stopped. The conversation has the part of the answer that is shown." : "The answer was cut off at its maximum length.";
}

export function movedInWords(turn) {
  return `The session moved from ${turn.moved.from} to ${turn.moved.to}, and continued there.`;
}

function showReceipt(box, receipt) {
  box.hidden = !receipt;
  if (!receipt) return;
  say(box.querySelector("summary"), receiptSummary(receipt));
  const rows = receiptRows(receipt).flatMap(([name, text]) =>
    [["dt", name], ["dd", text]].map(([tag, words]) => Object.assign(document.createElement(tag), { textContent: words }))
  );
  box.querySelector("dl").replaceChildren(...rows);
}

// Scroll to the end if the view was there before the change; else leave it where it is.
function keepAtEnd(change) {
  const page = document.documentElement;
  const isAtEnd = page.scrollHeight - innerHeight - scrollY < 120;
  change();
  if (isAtEnd) scrollTo({ top: page.scrollHeight });
}

// Draw the list of sessions.
export function showSessions(sessions, current, { onSwitch, onClose }) {
  const list = $("sessions");
  const known = new Map([...list.children].map((child) => [child.session, child]));
  sessions.forEach((session, at) => {
    let element = known.get(session);
    known.delete(session);
    if (!element) {
      element = Object.assign(copy("session-template"), { session });
      element.querySelector(".switch").onclick = () => onSwitch(session);
      part(element, "close").onclick = () => onClose(session);
    }
    if (list.children[at] !== element) list.insertBefore(element, list.children[at] ?? null);
    say(part(element, "title"), session.title);
    say(part(element, "state"), sessionInWords(session));
    element.classList.toggle("current", session === current);
    if (session === current) element.querySelector(".switch").setAttribute("aria-current", "true");
    else element.querySelector(".switch").removeAttribute("aria-current");
    part(element, "close").setAttribute("aria-label", `Close session: ${session.title}`);
  });
  for (const element of known.values()) element.remove();
}

// Scroll a session's element into view where the list is a horizontal strip.
export function reveal(session) {
  const [strip, element] = [$("sessions").parentElement, switchButtonOf(session)?.parentElement];
  if (!element) return;
  const [outer, inner] = [strip.getBoundingClientRect(), element.getBoundingClientRect()];
  if (inner.left < outer.left) strip.scrollLeft += inner.left - outer.left;
  else if (inner.right > outer.right) strip.scrollLeft += inner.right - outer.right;
}

function sessionInWords(session) {
  if (session.running) return "answering…";
  if (session.state === "ended") return "ended";
  if (session.state === "new" && !session.turns.length) return "not open yet";
  return [session.isBranch ? "branch" : "", session.instance, session.pictures.length ? plural(session.pictures.length, "picture") : ""].filter(Boolean).join(", ");
}

export function switchButtonOf(session) {
  return [...$("sessions").children].find((child) => child.session === session)?.querySelector(".switch") ?? null;
}

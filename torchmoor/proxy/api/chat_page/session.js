// One conversation, from its first question to its close. Knows nothing of the page that shows it.
//
// A session id is a credential: unless the user agrees to keep sessions (history.js), only this page's memory holds it.

import * as api from "./api.js";
import { AnswerBroken } from "./answer.js";
import { BadPicture, restorePicture } from "./pictures.js";
import { Turn } from "./turn.js";
import { shortened, span } from "./words.js";

const MAX_TRIES = 12;
const RETRY_S = 2; // if the server gives no time
const MAX_RETRY_S = 30;
const PROGRESS_AFTER_MS = 3000;
const PROGRESS_EVERY_MS = 2000;
const BODY_BYTES = 1_500_000; // of one request's pictures: a body up to 2 MiB can be sent to another instance
const WARN_S = [120, 30];
const STOP_MS = 3000; // how long a stopped answer may take to end

// state: new (not open at the server yet), open, ended (it can be opened again), closed.
// hooks: onTurn(session, turn), onSession(session), onReturned(session, turn, message), onExpiring(session, leftS),
// onEnded(session, message), needToken(message), which returns whether the user has given one.
export class Session {
  #id = null;
  #source = null; // {id, turns}: the session of which it is a branch, until the branch is open at the server
  #opening = null;
  #batch = null; // pictures that are being sent, and the request's id, until its result is known

  constructor(endpoint, limits, hooks) {
    Object.assign(this, { endpoint, hooks, capabilities: limits.capabilities[endpoint], state: "new", turns: [], instance: null, expiresAt: null });
    this.maxBodyBytes = Math.min(BODY_BYTES, limits.max_body_bytes - 4096);
    this.pictures = []; // the server has these
    this.untaken = []; // to be sent before the next question
    this.warned = new Set();
    this.draft = { text: "", pictures: [] };
    this.system = "";
    this.key = api.newInvocationId();
    this.isBranch = false;
    this.known = new Set(); // keys of the turns that it has had in this tab
    this.keptAt = 0; // usedAt of the record that it was restored from, or that was last made of it
  }

  // Returns a session with the turns before this one, and this turn's question as its draft; null if the server no
  // longer has those turns.
  branch(turn, limits) {
    if (this.state !== "open" || turn.number === null) return null;
    const branch = new Session(this.endpoint, limits, this.hooks);
    branch.turns = this.turns
      .filter((each) => each.number !== null && each.number < turn.number)
      .map((each) => Turn.restore(each.record));
    branch.pictures = branch.turns.flatMap((each) => each.pictures.map((picture) => picture.copy()));
    branch.draft = { text: turn.question, pictures: turn.pictures.map((picture) => picture.copy()) };
    branch.system = this.system;
    branch.isBranch = true;
    if (turn.number > 1) branch.#source = { id: this.#id, turns: turn.number - 1 };
    return branch;
  }

  // Return the fields that the browser keeps and `restore` reads.
  makeRecord() {
    const { key, endpoint, state, instance, expiresAt, system, isBranch } = this;
    const [pictures, untaken, turns] = [this.pictures, this.untaken, this.turns].map((each) => each.map((one) => one.record));
    const batch = this.#batch && { invocationId: this.#batch.invocationId, numPictures: this.#batch.pictures.length };
    const server = { id: this.#id, source: this.#source, batch };
    for (const turn of turns) this.known.add(turn.key);
    this.keptAt = Date.now();
    return { key, endpoint, state, instance, expiresAt, system, isBranch, pictures, untaken, turns, ...server, usedAt: this.keptAt };
  }

  // Keys of the turns that this tab has changed.
  get own() {
    return new Set(this.turns.filter((turn) => turn.isOwn).map((turn) => turn.key));
  }

  // True if another tab has changed the record that the browser keeps.
  isBehind(record) {
    return record.usedAt > this.keptAt || record.turns.some(({ key }) => key && !this.known.has(key));
  }

  static restore(record, limits, hooks) {
    const session = new Session(record.endpoint, limits, hooks);
    // A record of an earlier version has all pictures in one list, and no source and batch.
    const { id, source = null, batch = null, pictures, untaken = [], turns, usedAt, state, ...rest } = record;
    const isKnown = id !== null || source !== null;
    const hasExpired = rest.expiresAt !== null && rest.expiresAt <= Date.now();
    Object.assign(session, rest, { turns: turns.map(Turn.restore), state: hasExpired ? "ended" : state });
    session.pictures = (isKnown ? pictures : []).map(restorePicture);
    session.untaken = [...(isKnown ? [] : pictures), ...untaken].map(restorePicture);
    session.#id = id;
    session.#source = source;
    session.#batch = batch && { invocationId: batch.invocationId, pictures: session.untaken.slice(0, batch.numPictures) };
    session.known = new Set(session.turns.map((turn) => turn.key));
    session.keptAt = usedAt;
    return session;
  }

  // False if the server states that the model does not read pictures.
  get canSee() {
    return this.capabilities.can_see !== false;
  }

  // Without a limit until the server has reported it.
  get maxPictures() {
    return this.capabilities.max_images ?? Infinity;
  }

  // Release all pictures: a branch or a restored session has other copies in its turns.
  release() {
    const inTurns = this.turns.flatMap((turn) => turn.pictures);
    for (const picture of [...this.pictures, ...this.untaken, ...this.draft.pictures, ...inTurns]) picture.release();
  }

  get title() {
    return this.turns.length ? shortened(this.turns[0].question) : "New session";
  }

  get numPictures() {
    return this.pictures.length + this.untaken.length + this.draft.pictures.length;
  }

  get running() {
    return this.#opening ?? this.turns.find((turn) => turn.isRunning) ?? null;
  }

  async ask(question, pictures, parameters) {
    const turn = new Turn(question, pictures, parameters);
    this.turns.push(turn);
    this.untaken.push(...pictures);
    await this.#run(turn);
  }

  // Ask the same question again: as the same request, unless the user stopped it.
  async askAgain(turn) {
    if (this.running) return;
    this.turns.push(...this.turns.splice(this.turns.indexOf(turn), 1)); // it comes after the turns since then
    turn.begin(turn.state === "stopped" && !turn.wasRunning ? undefined : turn.invocationId);
    await this.#run(turn);
  }

  // Open another session at the server with the same pictures. If that fails, `onEnded` gets the reason.
  async reopen() {
    if (this.running) return;
    this.#forget();
    this.#opening = new Turn("", []); // waits and can be stopped like a turn, but is not shown
    this.hooks.onSession(this);
    try {
      await this.#takeIn(this.#opening);
    } catch (error) {
      if (this.state !== "closed") {
        this.state = "ended";
        this.hooks.onEnded(this, error.name === "AbortError" ? "It was not opened again." : wordsFor(error));
      }
    }
    this.#opening = null;
    this.hooks.onSession(this);
  }

  #forget() {
    Object.assign(this, { state: "new", instance: null, expiresAt: null });
    for (const turn of this.turns) Object.assign(turn, { number: null, isOwn: true });
    this.#id = null;
    this.#source = null;
    this.#batch = null;
    this.untaken = [...this.pictures, ...this.untaken];
    this.pictures = [];
    this.warned.clear();
  }

  // End the running answer. Its text so far stays in the conversation; an answer without text is cancelled.
  async stop() {
    const turn = this.running;
    if (!turn) return;
    if (!turn.text || turn.wasStopped) {
      turn.controller.abort();
      return;
    }
    turn.wasStopped = true;
    this.hooks.onTurn(this, turn);
    const { controller } = turn; // abort() has no effect after the answer's end
    setTimeout(() => controller.abort(), STOP_MS);
    try {
      await api.stopAnswer(this.endpoint, this.#id);
    } catch {
      controller.abort(); // a third-party handler, or a lost network
    }
  }

  // Stop and forget the session. The tab in which the user has closed it asks the server to close it, too.
  leave() {
    this.stop();
    this.state = "closed";
    this.#id = null;
  }

  // Close the session at the server. keepalive: also if the page is being closed.
  async close({ keepalive = false } = {}) {
    const id = this.#id;
    this.leave();
    if (id !== null) await api.closeSession(this.endpoint, id, { keepalive });
  }

  // Report that the session expires soon, or has expired. now: ms since 1970.
  tick(now) {
    if (this.state !== "open" || this.expiresAt === null) return;
    const leftS = (this.expiresAt - now) / 1000;
    if (leftS <= 0) {
      if (this.running) return; // the answer reports it
      this.state = "ended";
      this.hooks.onEnded(this, "This session has expired.");
      return;
    }
    const due = WARN_S.filter((seconds) => leftS <= seconds && !this.warned.has(seconds));
    due.forEach((seconds) => this.warned.add(seconds));
    if (due.length) this.hooks.onExpiring(this, leftS);
  }

  async #run(turn) {
    this.hooks.onTurn(this, turn);
    try {
      await this.#takeIn(turn);
      await this.#patiently(turn, () => this.#generate(turn));
      turn.state = "done";
      turn.number = turn.receipt.turn;
    } catch (error) {
      this.#settle(turn, error);
    }
    turn.waiting = "";
    if (this.turns.includes(turn)) this.hooks.onTurn(this, turn);
    else this.hooks.onSession(this);
  }

  #settle(turn, error) {
    if (error.name === "AbortError") {
      turn.state = "stopped";
      return;
    }
    turn.state = "failed";
    const isRefused = error instanceof api.Refused && !error.isBusy && !error.isDenied;
    if ((isRefused || error instanceof BadPicture) && this.untaken.length && !this.#isOver(error)) {
      this.#return(turn, error);
      return;
    }
    const canRepeat = !(error instanceof api.Refused && error.isFinal);
    turn.failure = { message: wordsFor(error), remedy: this.#isOver(error) ? "reopen" : canRepeat ? "again" : "edit" };
    if (this.#isOver(error)) this.state = "ended";
  }

  // True if the server no longer knows the session.
  #isOver(error) {
    const isKnown = this.#id !== null || this.#source !== null;
    return isKnown && error instanceof api.Refused && error.kind === "ValidationError";
  }

  // The server refused the pictures, so the question was not asked: return both to the composer.
  #return(turn, error) {
    this.turns.splice(this.turns.indexOf(turn), 1);
    turn.pictures = [...this.untaken];
    this.untaken = [];
    this.#batch = null;
    this.hooks.onReturned(this, turn, wordsFor(error));
  }

  // Open the session if it is not open, and send the pictures that the server does not have.
  async #takeIn(turn) {
    while (this.#id === null || this.untaken.length) {
      const isBranching = this.#source !== null; // a branch opens with its turns' pictures; new ones are added later
      if (!this.#batch) {
        this.#batch = { invocationId: api.newInvocationId(), pictures: isBranching ? [] : this.#nextBatch() };
        this.hooks.onSession(this); // after a reload, the same request is sent again
      }
      const { invocationId, pictures } = this.#batch;
      const urls = await Promise.all(pictures.map((picture) => picture.dataUrl()));
      const options = { signal: turn.controller.signal, invocationId };
      await this.#patiently(turn, async () => {
        if (this.#id === null) {
          const opened = await (isBranching
            ? api.branchSession(this.endpoint, this.#source, options)
            : api.openSession(this.endpoint, urls, options));
          this.#id = opened.id;
          this.#source = null;
          // An expiry in the past means that this machine's clock is wrong, so it is ignored.
          const expiresAt = opened.expiresAt > Date.now() ? opened.expiresAt : null;
          Object.assign(this, { state: "open", instance: opened.instance, expiresAt });
        } else {
          await api.addImages(this.endpoint, this.#id, urls, options);
        }
      });
      this.untaken.splice(0, pictures.length);
      this.pictures.push(...pictures);
      this.#batch = null;
      this.hooks.onSession(this);
    }
  }

  // The next pictures that fit into one request, at least one.
  #nextBatch() {
    let numBytes = 0;
    const end = this.untaken.findIndex((picture, at) => {
      numBytes += Math.ceil(picture.blob.size / 3) * 4 + 64;
      return at > 0 && numBytes > this.maxBodyBytes;
    });
    return this.untaken.slice(0, end < 0 ? undefined : end);
  }

  async #generate(turn) {
    const { invocationId, parameters } = turn;
    const options = { signal: turn.controller.signal, invocationId, parameters, system: this.system };
    const askedAt = performance.now();
    let firstAt = null;
    for await (const piece of api.ask(this.endpoint, this.#id, turn.question, options)) {
      if (piece.receipt) {
        this.#receive(turn, piece.receipt);
      } else {
        const now = performance.now();
        firstAt ??= now;
        turn.text += piece.text;
        turn.finish = piece.finish ?? turn.finish;
        const { receipt } = turn;
        receipt.ttftMs = firstAt - askedAt;
        receipt.numTokens += piece.isToken;
        const tookS = (now - firstAt) / 1000;
        receipt.tokensPerS = receipt.numTokens > 1 && tookS > 0.001 ? (receipt.numTokens - 1) / tookS : null;
      }
      turn.state = "streaming";
      turn.waiting = "";
      this.hooks.onTurn(this, turn);
    }
  }

  #receive(turn, receipt) {
    turn.receipt = receipt;
    if (this.instance && receipt.instance && receipt.instance !== this.instance) {
      turn.moved = { from: this.instance, to: receipt.instance };
    }
    this.instance = receipt.instance || this.instance;
  }

  // Repeat the action while the server is busy, and show the wait; ask the user for a token if one is required.
  async #patiently(turn, action) {
    for (let tries = 1; ; tries += 1) {
      const watching = this.#watchProgress(turn);
      try {
        await action();
        return;
      } catch (error) {
        watching.abort();
        if (!(error instanceof api.Refused)) throw error;
        if (error.isDenied) {
          if (!(await this.hooks.needToken(error.message))) throw error;
        } else if (error.isBusy && tries < MAX_TRIES) {
          await this.#wait(turn, Math.min(MAX_RETRY_S, error.retryAfterS ?? RETRY_S), error.message);
        } else {
          throw error;
        }
      } finally {
        watching.abort();
      }
    }
  }

  async #wait(turn, seconds, message) {
    const why = message.replace(/\s*Try again later\.?$/, "").replace(/[^.!?]$/, "$&.");
    const until = performance.now() + seconds * 1000;
    for (let left = seconds; left > 0; left = (until - performance.now()) / 1000) {
      this.#tellWaiting(turn, `${why} Trying again in ${span(left)}.`);
      await pause(Math.min(1000, left * 1000), turn.controller.signal);
    }
    this.#tellWaiting(turn, "Trying again.");
  }

  #tellWaiting(turn, text) {
    Object.assign(turn, { state: "waiting", waiting: text });
    if (this.turns.includes(turn)) this.hooks.onTurn(this, turn);
  }

  // While no answer arrives, show the progress of starting an instance.
  #watchProgress(turn) {
    const watching = new AbortController();
    const { signal } = watching;
    const watch = async () => {
      await pause(PROGRESS_AFTER_MS, signal);
      while (["sending", "waiting"].includes(turn.state)) {
        const progress = await api.findProgress(this.endpoint, signal);
        if (progress && !signal.aborted) this.#tellWaiting(turn, `Waiting: ${progress}.`);
        await pause(PROGRESS_EVERY_MS, signal);
      }
    };
    watch().catch(() => {}); // the request itself reports errors
    return watching;
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const gone = () => reject(new DOMException("stopped", "AbortError"));
    if (signal.aborted) return gone();
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
    const stop = () => {
      clearTimeout(timer);
      gone();
    };
    return signal.addEventListener("abort", stop, { once: true });
  });
}

function wordsFor(error) {
  if (error instanceof AnswerBroken && error.code === "StreamBroken") {
    return "The instance was lost in the middle of the answer, so the answer is incomplete.";
  }
  if (error instanceof api.NetworkGone) return `${error.message} Check the network, and whether the server is running.`;
  if (error instanceof api.Refused || error instanceof AnswerBroken || error instanceof BadPicture) return error.message;
  console.error(error); // a fault of this page
  return `This page failed: ${error.message}`;
}

// A turn of a session, with the fields that the page shows and the browser keeps.

import * as api from "./api.js";
import { restorePicture } from "./pictures.js";

// A question and its answer.
// state: sending, waiting, streaming, done, stopped (the server did not record it), failed. waiting: a text with the
// reason. moved: {from, to} or null. number: in the session at the server, or null. wasStopped: the user ended it.
// wasRunning: the page that kept it was still answering, perhaps in another tab.
// failure: {message, remedy: "again" | "reopen" | "edit"} or null. key: the same in every tab. isOwn: this page has
// changed it, so that its record replaces the one that the browser keeps. askedAt: in ms since 1970.
export class Turn {
  constructor(question, pictures, parameters = {}) {
    Object.assign(this, { question, pictures, parameters, key: api.newInvocationId() });
    this.begin();
  }

  // invocationId: of the first attempt if the question is sent again.
  begin(invocationId = api.newInvocationId()) {
    Object.assign(this, { text: "", state: "sending", waiting: "", receipt: null, moved: null, failure: null });
    Object.assign(this, { finish: null, number: null, wasStopped: false, wasRunning: false, isOwn: true, askedAt: Date.now() });
    Object.assign(this, { invocationId, controller: new AbortController() });
  }

  get isRunning() {
    return ["sending", "waiting", "streaming"].includes(this.state);
  }

  // True if the answer ended before the model had finished it.
  get isCut() {
    return this.state === "done" && (this.finish === "length" || (this.wasStopped && this.finish !== "eos_token"));
  }

  get record() {
    const { key, askedAt, question, parameters, text, receipt, moved, failure, finish, number, wasStopped, invocationId } = this;
    const state = this.isRunning ? "stopped" : this.state;
    const pictures = this.pictures.map((picture) => picture.record);
    const wasRunning = this.isRunning || this.wasRunning;
    const answer = { text, receipt, moved, failure, finish, number, wasStopped, wasRunning, invocationId, state };
    return { key, askedAt, question, parameters, pictures, ...answer };
  }

  static restore(record) {
    const turn = new Turn(record.question, record.pictures.map(restorePicture), record.parameters);
    const { question, parameters, pictures, ...rest } = record;
    return Object.assign(turn, rest, { isOwn: false });
  }
}

// Polls a list in addition to dashboard.json, with one request at a time. The pause follows from the time of a request,
// so that long lists are polled less often.

import { say } from "./dom.js";

const POLL_SHARE = 20; // a pause is this many times as long as the request before it,
const MAX_PAUSE_MS = 15000; // but at most this long
const TIMEOUT_MS = 15000;

export class Feed {
  // find(): reads the list with `get` below. facts: the element that reports that the list is out of date.
  constructor(find, show, facts) {
    this.find = find;
    this.show = show;
    this.facts = facts;
    this.isAsking = false;
    this.dueAt = 0;
  }

  // After an action or a new filter: poll now, or as soon as the running request has ended.
  hurry() {
    this.dueAt = 0;
    this.poll();
  }

  async poll() {
    if (this.isAsking || performance.now() < this.dueAt) return;
    this.isAsking = true;
    this.dueAt = Infinity;
    const began = performance.now();
    try {
      this.show(await this.find());
    } catch (error) {
      say(this.facts, `The list is out of date: ${error.message}`);
    }
    this.isAsking = false;
    if (this.dueAt === 0) this.poll();
    else this.dueAt = performance.now() + Math.min(MAX_PAUSE_MS, POLL_SHARE * (performance.now() - began));
  }
}

export async function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(given).toString();
  const answer = await fetch(text ? `${path}?${text}` : path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `status ${answer.status}`);
  return answer.json();
}

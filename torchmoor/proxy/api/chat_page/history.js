// Keeps sessions in this browser, if the user agrees: turns, pictures, and the ids with which they are continued.

const DATABASE = "torchmoor-chat";
const STORE = "sessions";
const CONSENT = "torchmoor-chat"; // in localStorage
const MAX_SESSIONS = 100; // above it, the oldest are deleted

export function isKept() {
  try {
    return localStorage.getItem(CONSENT) === "keep";
  } catch {
    return false; // the browser stores nothing for this page
  }
}

export const keep = () => localStorage.setItem(CONSENT, "keep");

// Delete all sessions, and keep none from now on.
export async function forgetAll() {
  localStorage.removeItem(CONSENT);
  const database = await opened?.catch(() => null);
  opened = null;
  database?.close();
  await finished(indexedDB.deleteDatabase(DATABASE));
}

let opened = null;

function open() {
  opened ??= (() => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "key" });
    return finished(request).then(
      (database) => {
        database.onversionchange = () => {
          database.close(); // another tab deletes it
          opened = null;
        };
        database.onclose = () => {
          opened = null; // the user has deleted what the browser stores for this page
        };
        return database;
      },
      (error) => {
        opened = null;
        throw error;
      }
    );
  })();
  return opened;
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// Return the result of a request to the store, once it is written: a full disk is only noticed then.
async function run(mode, request) {
  const transaction = (await open()).transaction(STORE, mode);
  const { result } = await new Promise((resolve, reject) => {
    const made = request(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(made);
    transaction.onabort = () => reject(transaction.error ?? new Error("it was not written."));
  });
  return result;
}

// The records of all sessions, the newest first.
export async function load() {
  const records = await run("readonly", (store) => store.getAll());
  return records.sort((a, b) => b.usedAt - a.usedAt);
}

// Keep a session's record, if the user agrees. Throws if the browser has no room for it.
// known: the keys of all turns that the session has had in this tab; own: of those that this tab has changed.
export async function save(record, known, own) {
  if (!isKept()) return;
  await run("readwrite", (store) => {
    const reading = store.get(record.key);
    reading.onsuccess = () => store.put(reading.result ? joined(record, reading.result, known, own) : record);
    return reading;
  });
  for (const { key } of (await load()).slice(MAX_SESSIONS)) await remove(key);
}

// Return a record with what other tabs have kept: their turns, and their states of turns that this tab only shows.
function joined(record, stored, known, own) {
  const kept = new Map(stored.turns.map((turn) => [turn.key, turn]));
  const others = stored.turns.filter(({ key }) => key && !known.has(key));
  const turns = record.turns.map((turn) => (own.has(turn.key) ? turn : (kept.get(turn.key) ?? turn)));
  const { untaken: unsent = [] } = stored;
  const isUnsent = (picture) => unsent.some(({ key }) => key === picture.key);
  const theirs = others.flatMap((turn) => turn.pictures);
  const pictures = [...record.pictures, ...theirs.filter((picture) => !isUnsent(picture))];
  const untaken = [...record.untaken, ...theirs.filter(isUnsent)];
  const isTheirBatch = untaken.length > 0 && !record.untaken.length && untaken.length === unsent.length;
  const batch = record.batch ?? (isTheirBatch ? stored.batch : null);
  return { ...record, pictures, untaken, batch, turns: [...turns, ...others].sort((a, b) => a.askedAt - b.askedAt) };
}

// Delete a session's record.
export async function remove(key) {
  if (isKept()) await run("readwrite", (store) => store.delete(key));
}

let closed = null; // a channel to the other tabs, for keys of sessions that the user has closed

// Report to the other tabs that the user has closed a session.
export const tellClosed = (key) => closed?.postMessage(key);

// onClosed(key): called when the user has closed a session in another tab.
export function watchClosed(onClosed) {
  try {
    closed = new BroadcastChannel("torchmoor-chat");
  } catch {
    return; // the browser stores nothing for this page, so no other tab has its sessions
  }
  closed.onmessage = ({ data }) => onClosed(data);
}

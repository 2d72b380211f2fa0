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
  const database = await opened;
  opened = null;
  database?.close();
  await finished(indexedDB.deleteDatabase(DATABASE));
}

let opened = null;

function open() {
  opened ??= (() => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "key" });
    return finished(request).then((database) => {
      database.onversionchange = () => {
        database.close(); // another tab deletes it
        opened = null;
      };
      return database;
    });
  })();
  return opened;
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function store(mode) {
  return (await open()).transaction(STORE, mode).objectStore(STORE);
}

// The records of all sessions, the newest first.
export async function load() {
  const records = await finished((await store("readonly")).getAll());
  return records.sort((a, b) => b.usedAt - a.usedAt);
}

// Keep a session's record, if the user agrees. Throws if the browser has no room for it.
export async function save(record) {
  if (!isKept()) return;
  await finished((await store("readwrite")).put(record));
  for (const { key } of (await load()).slice(MAX_SESSIONS)) await remove(key);
}

export async function remove(key) {
  if (isKept()) await finished((await store("readwrite")).delete(key));
}

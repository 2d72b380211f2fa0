"""Tables of the SQLite queue. An index answers every frequent query without a scan.

`wake_at` is the end of a lease or a retry's delay, `set_at` its beginning and `span_s` its length; if `wake_at` is NULL
the request can be claimed (or has ended). `reserved` has the locations of requests that have not ended. Bodies have
their own tables, so that updating a request does not write 128 KB again. Triggers maintain `totals`, so that counting
needs no scan, and in `callers` the number of each caller's pending requests.
"""

from __future__ import annotations

import sqlite3

from torchmoor.async_inference.request import CallerShare
from torchmoor.errors import ConfigError

VERSION = 1
UNDECIDED = "state IN ('WAITING', 'RUNNING')"
ENDED = "state IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')"
TAKEABLE = f"wake_at IS NULL AND {UNDECIDED}"

_SCHEMA = f"""
CREATE TABLE requests (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, -- order of arrival, independent of the clock; never used again
    inference_id TEXT NOT NULL UNIQUE,
    endpoint TEXT NOT NULL,
    invocation TEXT UNIQUE, -- makes a submit idempotent; NULL: not known
    request TEXT NOT NULL,
    expires_at REAL NOT NULL,
    body_bytes INTEGER NOT NULL, -- of the inline body
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    token TEXT, -- of the current claim
    wake_at REAL,
    set_at REAL,
    span_s REAL,
    updated_at REAL NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    instance TEXT NOT NULL DEFAULT '',
    outcome TEXT
);
CREATE TABLE inputs (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE outputs (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE reserved (location TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE totals (
    endpoint TEXT NOT NULL, state TEXT NOT NULL, requests INTEGER NOT NULL, body_bytes INTEGER NOT NULL,
    PRIMARY KEY (endpoint, state)
) WITHOUT ROWID;

CREATE INDEX by_state ON requests (endpoint, state, seq);
CREATE INDEX takeable ON requests (endpoint, seq) WHERE {TAKEABLE};
CREATE INDEX expiring ON requests (endpoint, expires_at) WHERE {TAKEABLE};
CREATE INDEX decided ON requests (endpoint, seq) WHERE wake_at IS NULL AND state = 'DECIDED';
CREATE INDEX sleeping ON requests (endpoint, wake_at) WHERE wake_at IS NOT NULL;
CREATE INDEX slept ON requests (endpoint, set_at) WHERE wake_at IS NOT NULL;
CREATE INDEX ended ON requests (updated_at) WHERE {ENDED};

CREATE TRIGGER arrives AFTER INSERT ON requests BEGIN
    INSERT INTO totals VALUES (new.endpoint, new.state, 1, new.body_bytes) ON CONFLICT DO
    UPDATE SET requests = requests + 1, body_bytes = body_bytes + new.body_bytes;
END;
CREATE TRIGGER moves AFTER UPDATE OF state ON requests WHEN old.state != new.state BEGIN
    UPDATE totals SET requests = requests - 1, body_bytes = body_bytes - old.body_bytes
    WHERE endpoint = old.endpoint AND state = old.state;
    INSERT INTO totals VALUES (new.endpoint, new.state, 1, new.body_bytes) ON CONFLICT DO
    UPDATE SET requests = requests + 1, body_bytes = body_bytes + new.body_bytes;
END;
CREATE TRIGGER leaves AFTER DELETE ON requests BEGIN
    UPDATE totals SET requests = requests - 1, body_bytes = body_bytes - old.body_bytes
    WHERE endpoint = old.endpoint AND state = old.state;
END;

CREATE TABLE shares (seq INTEGER PRIMARY KEY, caller TEXT NOT NULL, body_bytes INTEGER NOT NULL);
CREATE TABLE callers (
    caller TEXT PRIMARY KEY, requests INTEGER NOT NULL, body_bytes INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TRIGGER share_begins AFTER INSERT ON shares BEGIN
    INSERT INTO callers VALUES (new.caller, 1, new.body_bytes) ON CONFLICT DO
    UPDATE SET requests = requests + 1, body_bytes = body_bytes + new.body_bytes;
END;
CREATE TRIGGER share_ends AFTER DELETE ON shares BEGIN
    UPDATE callers SET requests = requests - 1, body_bytes = body_bytes - old.body_bytes
    WHERE caller = old.caller;
    DELETE FROM callers WHERE caller = old.caller AND requests = 0;
END;
CREATE TRIGGER request_ends AFTER UPDATE OF state ON requests WHEN new.{ENDED} BEGIN
    DELETE FROM shares WHERE seq = new.seq;
END;
"""


def prepare(connection: sqlite3.Connection) -> None:
    """Create the tables if they are missing. Raises ConfigError for another program's or version's file."""
    connection.execute("BEGIN IMMEDIATE")  # one process creates them, the others find them
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and connection.execute("SELECT 1 FROM sqlite_schema").fetchone() is None:
            for statement in _statements(_SCHEMA):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise ConfigError(
                f"the file of the asynchronous queue has version {version}, not {VERSION}: it is another version's or "
                "another program's; name another file, or empty the queue with the version that made it"
            )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements(schema: str) -> list[str]:
    """Split a schema into statements: executescript would end the transaction."""
    statements, rest = [], ""
    for line in schema.splitlines(keepends=True):
        rest += line
        if sqlite3.complete_statement(rest):
            statements.append(rest)
            rest = ""
    return statements


def check_share(db: sqlite3.Connection, share: CallerShare, body_bytes: int) -> None:
    """Raise CallerLimited if another request with such a body exceeds its caller's share."""
    row = db.execute("SELECT requests, body_bytes FROM callers WHERE caller = ?", (share.caller,)).fetchone()
    num_requests, num_bytes = row or (0, 0)
    share.check(num_requests, num_bytes, body_bytes)


def take_share(db: sqlite3.Connection, share: CallerShare, seq: int | None, body_bytes: int) -> None:
    """Count a request for its caller until it ends."""
    db.execute("INSERT INTO shares VALUES (?, ?, ?)", (seq, share.caller, body_bytes))

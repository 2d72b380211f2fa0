"""Tables of the SQLite queue that count each caller's pending requests. Triggers maintain them, in every process."""

from __future__ import annotations

import sqlite3

from torchmoor.async_inference.request import CallerShare

SCHEMA = """
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
CREATE TRIGGER request_ends AFTER UPDATE OF state ON requests
WHEN new.state IN ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') BEGIN
    DELETE FROM shares WHERE seq = new.seq;
END;
"""


def check_share(db: sqlite3.Connection, share: CallerShare, body_bytes: int) -> None:
    """Raise CallerLimited if another request with such a body exceeds its caller's share."""
    row = db.execute("SELECT requests, body_bytes FROM callers WHERE caller = ?", (share.caller,)).fetchone()
    num_requests, num_bytes = row or (0, 0)
    share.check(num_requests, num_bytes, body_bytes)


def take_share(db: sqlite3.Connection, share: CallerShare, seq: int | None, body_bytes: int) -> None:
    """Count a request for its caller until it ends."""
    db.execute("INSERT INTO shares VALUES (?, ?, ?)", (seq, share.caller, body_bytes))

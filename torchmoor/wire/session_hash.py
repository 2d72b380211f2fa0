"""The hash that names a session to operators: in logs, in the admin API and in the dashboard."""

import re
from hashlib import blake2b

SESSION_HASH = re.compile("[0-9a-f]{16}")
SESSION_HASH_PREFIX = re.compile("[0-9a-f]{0,16}")


def session_hash(session_id: str | bytes) -> str:
    """Hash a session id. An id is a credential and must not appear in logs; its hash may."""
    data = session_id if isinstance(session_id, bytes) else session_id.encode()
    return blake2b(data, digest_size=8).hexdigest()

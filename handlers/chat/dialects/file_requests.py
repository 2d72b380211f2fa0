"""OpenAI's form that uploads a file."""

import json
import re
from typing import Any
from urllib.parse import unquote

from handlers.chat.commands import OpenFile, OpenSession
from handlers.chat.dialects.responses import missing_field
from handlers.chat.dialects.turns import check_session_limit
from handlers.errors import InvalidRequest
from handlers.requests.incoming import Incoming
from torchmoor.wire import headers as wire

UNNAMED_FILE = "picture"
MAX_FILENAME_CHARS = 255
LIFETIMES_S = range(3600, 2_592_001)  # of files: OpenAI's limits


def parse_file(incoming: Incoming, form: dict[str, Any], now: float) -> OpenFile:
    """Read a form with an image."""
    content, purpose = form.get("file"), form.get("purpose")
    if not isinstance(content, bytes) or not content:
        raise missing_field("file")
    if purpose not in (b"vision", b"user_data"):
        raise InvalidRequest("'purpose' must be vision or user_data: files are images here", param="purpose")
    check_session_limit(incoming)
    fields = {
        "object": "file",
        "bytes": len(content),
        "created_at": int(now),
        "filename": _read_filename(incoming) or UNNAMED_FILE,
        "purpose": purpose.decode(),
        "status": "processed",
    }
    opening = OpenSession(
        caller=incoming.caller,
        images=(content,),
        ttl_s=_read_lifetime(form),
        invocation_id=incoming.invocation_id,
        resource=json.dumps(fields),
    )
    return OpenFile(opening=opening)


def _read_lifetime(form: dict[str, Any]) -> int | None:
    """Return the seconds of `expires_after`, as OpenAI's clients send it; None without it. Raises InvalidRequest."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != b"created_at":
        raise InvalidRequest("'expires_after[anchor]' must be created_at", param="expires_after[anchor]")
    lifetime_s = int(seconds) if isinstance(seconds, bytes) and re.fullmatch(rb"[0-9]{1,9}", seconds) else 0
    if lifetime_s not in LIFETIMES_S:
        wanted = f"a whole number of seconds from {LIFETIMES_S[0]} to {LIFETIMES_S[-1]}"
        raise InvalidRequest(f"'expires_after[seconds]' must be {wanted}", param="expires_after[seconds]")
    return lifetime_s


def _read_filename(incoming: Incoming) -> str:
    """Return the uploaded file's name without path and unprintable characters; empty if the proxy has sent none."""
    name = unquote(incoming.headers.get(wire.FORM_FILENAME, ""), errors="ignore")
    printable = "".join(each for each in re.split(r"[/\\]", name)[-1] if each.isprintable())
    return printable.strip()[:MAX_FILENAME_CHARS]

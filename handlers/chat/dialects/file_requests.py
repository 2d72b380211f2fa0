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
        invocation_id=incoming.invocation_id,
        resource=json.dumps(fields),
    )
    return OpenFile(opening=opening)


def _read_filename(incoming: Incoming) -> str:
    """Return the uploaded file's name without path and unprintable characters; empty if the proxy has sent none."""
    name = unquote(incoming.headers.get(wire.FORM_FILENAME, ""), errors="ignore")
    printable = "".join(each for each in re.split(r"[/\\]", name)[-1] if each.isprintable())
    return printable.strip()[:MAX_FILENAME_CHARS]

"""Texts that identify requests, so that retries are recognised."""

import hashlib
from collections.abc import Sequence

from handlers.chat.messages import ImageReference
from handlers.errors import InvalidRequest


def identify(*parts: object) -> str:
    """Return a text that identifies parts of a request's content: equal only for equal parts. Raises InvalidRequest."""
    content = hashlib.sha256()
    for part in parts:
        data = _bytes_of(part)
        content.update(f"{type(part).__name__} {len(data)} ".encode())
        content.update(data)
    return content.hexdigest()


def _bytes_of(part: object) -> bytes:
    """Return a part's bytes; of an image, its own: its `repr` would take several times their memory."""
    if isinstance(part, bytes):
        return part
    try:
        return part.encode(errors="surrogatepass") if isinstance(part, str) else repr(part).encode()
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply") from None


def name_request(invocation_id: str, images: Sequence[ImageReference]) -> str:
    """Return what a question is recorded under, so that a retry is recognised: the client's id, and its images.

    Other images make another question, because a client may use one id for all its requests. Empty without an id.
    """
    return f"{invocation_id} {identify(*images)}" if invocation_id and images else invocation_id

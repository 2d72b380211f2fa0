"""Texts that identify requests, so that retries are recognised."""

import hashlib
from collections.abc import Sequence

from handlers.chat.messages import ImageReference


def identify(*parts: object) -> str:
    """Return a text that identifies parts of a request's content: equal only for equal parts."""
    content = hashlib.sha256()
    for part in parts:
        content.update(repr(part).encode())
    return content.hexdigest()


def name_request(invocation_id: str, images: Sequence[ImageReference]) -> str:
    """Return what a question is recorded under, so that a retry is recognised: the client's id, and its images.

    Other images make another question, because a client may use one id for all its requests. Empty without an id.
    """
    return f"{invocation_id} {identify(*images)}" if invocation_id and images else invocation_id

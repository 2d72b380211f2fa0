"""The paths of OpenAI's API: which ones they are, and the endpoint and the path below /v1/ that each names.

Ids in them are hidden from logs by dispatch/record.py.
"""

from __future__ import annotations

_PREFIX = b"/v1/"
_OF_ENDPOINT, _INFIX = b"/endpoints/", b"/openai/v1/"
_UNPREFIXED = frozenset((b"/tokenize", b"/detokenize"))  # vLLM's paths; OpenAI has no such operations


def is_openai(path: bytes) -> bool:
    """Return whether a path is one of OpenAI's API, of an endpoint or of all."""
    return path.startswith(_PREFIX) or path in _UNPREFIXED or (path.startswith(_OF_ENDPOINT) and _INFIX in path)


def split_path(path: bytes) -> tuple[str | None, bytes]:
    """Return the endpoint that a path names, if it names one, and the rest, below /v1/."""
    if path in _UNPREFIXED:
        return None, path[1:]
    if path.startswith(_PREFIX):
        return None, path[len(_PREFIX) :]
    prefix, _, subpath = path.partition(_INFIX)
    return prefix[len(_OF_ENDPOINT) :].decode("latin-1"), subpath

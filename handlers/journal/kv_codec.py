"""Encodes and decodes the parts of KV caches in a journal.

As for an event (handlers/journal/event_codec.py), a signature proves that a worker of this fleet wrote the part for
this position of this session. Its name identifies the model, and all tokens and images up to its end.
"""

import hashlib
import hmac
from collections.abc import Mapping

from handlers.journal.event import DamagedRecord
from torchmoor.wire.session_ids import find_key

NAME_BYTES = SIGNATURE_BYTES = 32
HEAD_BYTES = NAME_BYTES + SIGNATURE_BYTES
_CONTEXT = "torchmoor-kv-v1"  # no message that a fleet signs for another purpose begins so


class KvCodec:
    """Encodes and decodes parts: name, signature, content.

    keys: of the fleet's session ids, by key id. Without that of the session's id, the signature is a checksum only.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = keys

    def encode(self, session_id: str, number: int, name: bytes, content: bytes) -> bytes:
        return b"".join((name, self._sign(session_id, number, name, content), content))

    def decode(self, data: bytes, session_id: str, number: int) -> tuple[bytes, memoryview]:
        """Return a part's name and content. Raises DamagedRecord."""
        if len(data) < HEAD_BYTES:
            raise DamagedRecord("a part of a KV cache is too short")
        name, signature, content = data[:NAME_BYTES], data[NAME_BYTES:HEAD_BYTES], memoryview(data)[HEAD_BYTES:]
        if not hmac.compare_digest(signature, self._sign(session_id, number, name, content)):
            raise DamagedRecord("a part of a KV cache is not signed by this fleet for its place")
        return name, content

    def _sign(self, session_id: str, number: int, name: bytes, content: bytes | memoryview) -> bytes:
        key = find_key(session_id, self._keys)
        head = f"{_CONTEXT}\n{session_id}\n{number}\n".encode() + name
        digest = hashlib.sha256(head) if key is None else hmac.new(key, head, "sha256")
        digest.update(content)
        return digest.digest()

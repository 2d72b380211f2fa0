"""Sessions of handlers that use TorchServe's sequenceBatching, such as that of AWS's LLaVA sample.

TorchServe groups their requests by a header field, and accepts any id there. It does not know NEW_SESSION, and the ids
that it creates name no instance. So the proxy creates the id of a new session, signed like torchmoor's handlers sign
theirs: any proxy with the key finds the session's instance. The fields have the names that the sample configures.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import time

from torchmoor.proxy.http.field_names import SEQUENCE_START, SESSION_ID
from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import headers
from torchmoor.wire.session_ids import SessionId, mint

# in lower case; never forwarded from clients
SEQUENCE_FIELDS = frozenset((SESSION_ID, SEQUENCE_START))
_ID_LINE = f"{headers.SEQUENCE_ID}: ".encode()  # TorchServe compares the names of fields with their case
_START_LINE = f"{headers.SEQUENCE_START}: true\r\n".encode()


class Sequences:
    """Renders a session's header lines for an instance that batches sequences.

    ttl_s: of new ids; the handler tells the client when its session expires.
    """

    def __init__(self, keys: Mapping[str, bytes], ttl_s: int) -> None:
        self._keys = keys
        self._ttl_s = ttl_s

    def begin(self, instance: Instance, principal: str) -> bytes:
        """Return the lines of a new session. Without a key there are none, and TorchServe creates the id."""
        if not self._keys:
            return b""
        expires_at = int(time()) + self._ttl_s
        opened = mint(
            self._keys, instance=instance.name, expires_at=expires_at, endpoint=instance.endpoint, principal=principal
        )
        return self.go_on(opened) + _START_LINE

    def go_on(self, session: SessionId) -> bytes:
        """Return the line of an open session."""
        return b"%b%b\r\n" % (_ID_LINE, session.text.encode())

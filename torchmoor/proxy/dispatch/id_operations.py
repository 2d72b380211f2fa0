"""Operations of handlers that name ids: requests whose clients have left, and sessions that were closed elsewhere.

TorchServe notices a closed connection only when it answers the request in a step, and a request without output yet is
not answered. So the proxy sends the handler an operation of its own (docs/instance-protocol.md).
"""

from __future__ import annotations

import json
import logging

from torchmoor.proxy.http.subrequest import Subrequests
from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import headers

logger = logging.getLogger(__name__)

MAX_IDS = 500  # per operation
MAX_WAITING = 5_000  # ids for one instance while an operation runs
MAX_UNDER_WAY = 256  # running operations over all instances


class IdOperations:
    """Sends an instance one operation at a time; ids that arrive meanwhile are sent together with the next.

    So an instance has at most one such request, however many clients leave at once.
    """

    def __init__(self, subrequests: Subrequests, operation: str, key: str) -> None:
        """key: names the ids in the operation's body."""
        self._subrequests = subrequests
        self._operation = operation
        self._operation_line = f"{headers.OPERATION}: {operation}\r\n".encode()
        self._key = key
        self._waiting: dict[tuple[Instance, bytes], list[str]] = {}  # by the instance and path of a running operation

    def send(self, instance: Instance, path: bytes, text: str) -> None:
        """Send an id soon, without a guarantee: its request or session also ends by itself."""
        if not instance.can_be_operated:
            return
        key = (instance, path)  # not its name, which its replacement has, too
        waiting = self._waiting.get(key)
        if waiting is not None:
            if len(waiting) < MAX_WAITING:
                waiting.append(text)
            else:
                logger.warning("%s dropped instance=%s waiting=%d", self._operation, instance.name, len(waiting))
        elif len(self._waiting) < MAX_UNDER_WAY:
            self._waiting[key] = [text]
            self._send_next(instance, path)
        else:
            under_way = len(self._waiting)
            logger.warning("%s dropped instance=%s under_way=%d", self._operation, instance.name, under_way)

    def _send_next(self, instance: Instance, path: bytes) -> None:
        """Send the gathered ids; forget the instance if there are none."""
        key = (instance, path)
        ids = self._waiting[key]
        if not ids:
            del self._waiting[key]
            return
        self._waiting[key] = ids[MAX_IDS:]
        body = json.dumps({self._key: ids[:MAX_IDS]}).encode()
        head = (b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n") % (
            path,
            instance.authority().encode(),
            self._operation_line,
            len(body),
        )
        self._subrequests.send(instance, head + body, lambda: self._send_next(instance, path))

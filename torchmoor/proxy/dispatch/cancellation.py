"""Tells instances which of their requests nobody waits for any more.

TorchServe notices a closed connection only when it answers the request in a step, and a request whose answer is not
known yet is not answered. So the handler is told by an operation of its own (docs/runtime-api.md).
"""

from __future__ import annotations

import json
import logging

from torchmoor.proxy.http.subrequest import Errands
from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import headers, operations

logger = logging.getLogger(__name__)

MAX_IDS = 500  # in one operation
MAX_WAITING = 5_000  # ids for one instance, while an operation is under way
MAX_UNDER_WAY = 256  # operations, of all instances
_OPERATION_LINE = f"{headers.OPERATION}: {operations.CANCEL}\r\n".encode()


class Cancellations:
    """One operation at a time goes to an instance; ids that come meanwhile go together with the next.

    So a thousand clients that leave at once cost an instance a handful of small requests, and never its last rows.
    """

    def __init__(self, errands: Errands) -> None:
        self._errands = errands
        self._waiting: dict[tuple[str, bytes], list[str]] = {}  # by instance and path, where one is under way

    def cancel(self, instance: Instance, path: bytes, request_id: bytes) -> None:
        """Tell the instance soon; nothing is promised, since every turn has its deadline too."""
        key = (instance.name, path)
        waiting = self._waiting.get(key)
        if waiting is not None:
            if len(waiting) < MAX_WAITING:
                waiting.append(request_id.decode())
            else:
                logger.warning("cancellation dropped instance=%s waiting=%d", instance.name, len(waiting))
        elif len(self._waiting) < MAX_UNDER_WAY:
            self._waiting[key] = [request_id.decode()]
            self._send_next(instance, path)
        else:
            logger.warning("cancellation dropped instance=%s under_way=%d", instance.name, len(self._waiting))

    def _send_next(self, instance: Instance, path: bytes) -> None:
        """What has gathered goes out, or there is nothing and the instance is forgotten."""
        key = (instance.name, path)
        ids = self._waiting[key]
        if not ids:
            del self._waiting[key]
            return
        self._waiting[key] = ids[MAX_IDS:]
        body = json.dumps({operations.REQUEST_IDS: ids[:MAX_IDS]}).encode()
        head = (
            b"POST %b HTTP/1.1\r\nhost: %b:%d\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
        ) % (path, instance.host.encode(), instance.port, _OPERATION_LINE, len(body))
        self._errands.send(instance, head + body, lambda: self._send_next(instance, path))

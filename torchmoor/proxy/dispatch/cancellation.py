"""Cancellation of requests whose clients have left.

TorchServe notices a closed connection only when it answers the request in a step, and a request without output yet is
not answered. So the proxy sends the handler an operation of its own (docs/instance-protocol.md).
"""

from __future__ import annotations

import json
import logging

from torchmoor.proxy.http.subrequest import Subrequests
from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import headers, operations

logger = logging.getLogger(__name__)

MAX_IDS = 500  # per operation
MAX_WAITING = 5_000  # ids for one instance while an operation runs
MAX_UNDER_WAY = 256  # running operations over all instances
_OPERATION_LINE = f"{headers.OPERATION}: {operations.CANCEL}\r\n".encode()


class Cancellations:
    """Sends an instance one operation at a time; ids that arrive meanwhile are sent together with the next.

    A thousand clients that leave at once cost an instance a few small requests, and never its last rows.
    """

    def __init__(self, subrequests: Subrequests) -> None:
        self._subrequests = subrequests
        self._waiting: dict[tuple[str, bytes], list[str]] = {}  # by instance and path, where one is under way

    def cancel(self, instance: Instance, path: bytes, request_id: bytes) -> None:
        """Send the id soon, without a guarantee: every turn has a deadline too."""
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
        """Send the gathered ids; forget the instance if there are none."""
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
        self._subrequests.send(instance, head + body, lambda: self._send_next(instance, path))

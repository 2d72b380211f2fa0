"""Status of the endpoint while an answer is late: whether an instance is starting."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError
from botocore.httpsession import URLLib3Session

from torchmoor.clients.runtime import proxies_for
from torchmoor.clients.signing import Signer

PATIENCE_S = 2.0  # before the first query; most answers begin earlier
INTERVAL_S = 2.0
TIMEOUT_S = 5.0


class EndpointWatch:
    """Queries the endpoint's status in a thread while a call waits."""

    def __init__(
        self,
        endpoint_url: str,
        endpoint: str,
        signer: Signer,
        show: Callable[[str], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """show: called with each status message, never for a proxy without this API."""
        self._url = f"{endpoint_url.rstrip('/')}/endpoints/{endpoint}"
        self._signer = signer
        self._show = show
        self._patience_s = patience_s

    @contextmanager
    def waiting(self) -> Iterator[Callable[[], None]]:
        """Watch until the block ends, or until it calls the yielded function."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="progress", daemon=True)
        thread.start()
        try:
            yield over.set
        finally:
            over.set()

    def _watch(self, over: threading.Event) -> None:
        interval_s = self._patience_s
        while not over.wait(interval_s):
            interval_s = INTERVAL_S
            for message in self.progress():
                if not over.is_set():
                    self._show(message)

    def progress(self) -> list[str]:
        """Return a message for each instance that is starting; none if the endpoint does not answer."""
        verify = os.environ.get("AWS_CA_BUNDLE") or True
        session = URLLib3Session(verify=verify, proxies=proxies_for(self._url), timeout=TIMEOUT_S)
        try:
            request = AWSRequest("GET", self._url, headers=self._signer.sign("GET", self._url, {}))
            answer = session.send(request.prepare())
            content: Any = json.loads(answer.content) if answer.status_code == 200 else {}
            return [
                str(status["StatusMessage"])
                for variant in content.get("ProductionVariants", ())
                for status in variant.get("VariantStatus", ())
            ]
        except (BotoCoreError, ValueError, AttributeError, KeyError, TypeError):
            return []
        finally:
            session.close()

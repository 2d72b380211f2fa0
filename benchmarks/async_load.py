"""Clients of benchmarks/async_inference.py: submit until accepted, and count each request's outcome."""

import hashlib
import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

BODY = json.dumps({"inputs": "What?", "parameters": {"max_new_tokens": 1}}).encode()
HEADERS = {"X-Amzn-SageMaker-Content-Type": "application/json"}
TIMEOUT_S = 30.0


def path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


class Client:
    """Submits over one connection, which is made again when it breaks."""

    def __init__(self, port: int, endpoint: str) -> None:
        self._port = port
        self._path = f"/endpoints/{endpoint}/async-invocations"
        self._connection: http.client.HTTPConnection | None = None

    def submit(self, invocation: str, body: bytes = BODY, **headers: str) -> tuple[str, Path, Path]:
        """The inference id, and where the result or the failure will be; sent again until it is accepted."""
        fields = {**HEADERS, **headers, "amz-sdk-invocation-id": invocation}
        while True:
            try:
                if self._connection is None:
                    self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
                self._connection.request("POST", self._path, body=body, headers=fields)
                answer = self._connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):
                self._connection = None
                time.sleep(0.05)
                continue
            if answer.status == 202:
                found = answer.headers
                return (
                    json.loads(content)["InferenceId"],
                    path_of(found["X-Amzn-SageMaker-OutputLocation"]),
                    path_of(found["X-Amzn-SageMaker-FailureLocation"]),
                )
            if answer.status < 500:
                raise RuntimeError(f"refused with {answer.status}: {content!r}")
            time.sleep(0.05)


@dataclass
class Account:
    """What was accepted, and what there is of it. seen: the first bytes that a result had, as a digest."""

    results: dict[str, Path] = field(default_factory=dict)
    failures: dict[str, Path] = field(default_factory=dict)
    seen: dict[str, bytes] = field(default_factory=dict)

    def look(self) -> int:
        """How many results there are; remembers what each was when it was first there."""
        for name, path in list(self.results.items()):
            if name not in self.seen and path.exists():
                self.seen[name] = hashlib.sha256(path.read_bytes()).digest()
        return len(self.seen) + sum(path.exists() for path in list(self.failures.values()))

    def missing(self) -> int:
        """Return the number of accepted requests without a result; failures count."""
        return sum(not path.exists() for path in self.results.values())

    def duplicated(self) -> int:
        """Return the number of requests with a result and a failure, of changed results, and of unknown objects."""
        both = sum(self.results[name].exists() and self.failures[name].exists() for name in self.results)
        changed = sum(
            hashlib.sha256(path.read_bytes()).digest() != self.seen.get(name)
            for name, path in self.results.items()
            if path.exists()
        )
        folder = next(iter(self.results.values())).parent
        return both + changed + len(set(folder.glob("*.out")) - set(self.results.values()))


class Submitter(threading.Thread):
    """Submits its share of the requests, one after the other, with pauses so that kills come among them."""

    def __init__(self, account: Account, port: int, endpoint: str, names: list[str], pause_s: float) -> None:
        super().__init__(daemon=True)
        self._account, self._names, self._pause_s = account, names, pause_s
        self._client = Client(port, endpoint)

    def run(self) -> None:
        for name in self._names:
            inference_id, result, failure = self._client.submit(name)
            self._account.failures[inference_id] = failure
            self._account.results[inference_id] = result
            time.sleep(random.uniform(0, 2 * self._pause_s))

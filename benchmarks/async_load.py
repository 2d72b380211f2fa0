"""Provides clients that submit asynchronous requests until they are accepted, and counts the outcomes."""

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
    """Submits over one connection, which it opens again after an error."""

    def __init__(self, port: int, endpoint: str) -> None:
        self._port = port
        self._path = f"/endpoints/{endpoint}/async-invocations"
        self._connection: http.client.HTTPConnection | None = None

    def submit(self, invocation: str, body: bytes = BODY, **headers: str) -> tuple[str, Path, Path]:
        """Submit a request, repeatedly until it is accepted.

        Return the inference id, and the paths of the future result and of a failure. Raises RuntimeError if the proxy
        refuses the request itself.
        """
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
class AcceptedRequests:
    """The accepted requests and their outcomes.

    results, failures: paths by inference id. first_digests: the hash of each result when it was first read.
    """

    results: dict[str, Path] = field(default_factory=dict)
    failures: dict[str, Path] = field(default_factory=dict)
    first_digests: dict[str, bytes] = field(default_factory=dict)

    def record(self) -> int:
        """Record the hashes of new results. Return the number of requests with an outcome."""
        for name, path in list(self.results.items()):
            if name not in self.first_digests and path.exists():
                self.first_digests[name] = hashlib.sha256(path.read_bytes()).digest()
        return len(self.first_digests) + sum(path.exists() for path in list(self.failures.values()))

    def missing(self) -> int:
        """Return the number of accepted requests without a result, including those with a failure."""
        return sum(not path.exists() for path in self.results.values())

    def duplicated(self) -> int:
        """Return the number of requests with a result and a failure, changed results, and results of no request."""
        both = sum(self.results[name].exists() and self.failures[name].exists() for name in self.results)
        changed = sum(
            hashlib.sha256(path.read_bytes()).digest() != self.first_digests.get(name)
            for name, path in self.results.items()
            if path.exists()
        )
        folder = next(iter(self.results.values())).parent
        return both + changed + len(set(folder.glob("*.out")) - set(self.results.values()))


class Submitter(threading.Thread):
    """Submits its share of the requests, one after the other, with pauses so that kills happen between them."""

    def __init__(self, accepted: AcceptedRequests, port: int, endpoint: str, names: list[str], pause_s: float) -> None:
        super().__init__(daemon=True)
        self._accepted, self._names, self._pause_s = accepted, names, pause_s
        self._client = Client(port, endpoint)

    def run(self) -> None:
        for name in self._names:
            inference_id, result, failure = self._client.submit(name)
            self._accepted.failures[inference_id] = failure
            self._accepted.results[inference_id] = result
            time.sleep(random.uniform(0, 2 * self._pause_s))

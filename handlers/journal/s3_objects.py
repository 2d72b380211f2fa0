"""Objects of a journal in S3: requests with conditions, several at once, and errors as OSError.

Relies on S3's consistency of reads, listings and conditional writes.
"""

import base64
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from typing import Any, TypeVar

from handlers.journal.event import check_size
from handlers.s3 import S3Error, list_objects, make_client, translated
from handlers.settings.journal import JournalSettings

PARALLEL = 8  # requests of one operation at once, and of all operations together that make several
PAGE = 1000  # keys of a listing, and the most that S3 deletes at once
MAX_CONFLICTS = 5  # retries of a conditional write while another is undecided
ATTEMPTS = 2  # of a request; an operation has a time-out of its own
T = TypeVar("T")
R = TypeVar("R")


class S3Objects:
    """The objects of one bucket. Any thread. The rights that it needs: KeepSessions in deploy/sagemaker/*.yaml."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket
        self._parallel = ThreadPoolExecutor(PARALLEL, "journal-s3")  # starts threads as they are needed

    def get(self, key: str, max_bytes: int) -> bytes | None:
        """Read an object; None if there is none. Raises DamagedRecord if it is larger than max_bytes."""
        try:
            with _translated():
                found = self._client.get_object(Bucket=self._bucket, Key=key)
                with closing(found["Body"]) as body:
                    check_size(found["ContentLength"], max_bytes)
                    data: bytes = body.read()
                    return data
        except S3Error as exc:
            if exc.is_missing:
                return None
            raise

    def put(self, key: str, data: bytes, **conditions: str) -> None:
        # A store knows a body that was cut off by its MD5; SeaweedFS would keep an empty object without one.
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        with _translated():
            self._client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentMD5=md5, **conditions)

    def create(self, key: str, data: bytes) -> bool:
        """Return False if the object exists, perhaps by an earlier attempt of this very request."""
        for num_conflicts in itertools.count():
            try:
                self.put(key, data, IfNoneMatch="*")
                return True
            except S3Error as exc:
                if exc.is_precondition:
                    return False
                if exc.status != 409 or num_conflicts == MAX_CONFLICTS:  # 409: another write, which may fail yet
                    raise
            time.sleep(random.uniform(0, 0.05 * 2**num_conflicts))
        raise AssertionError("unreachable")

    def delete(self, keys: Sequence[str]) -> None:
        for page in (keys[start : start + PAGE] for start in range(0, len(keys), PAGE)):
            objects = [{"Key": key} for key in page]
            with _translated():
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise OSError(f"the journal's store did not delete an object ({error.get('Code')})")

    def page(self, folder: str, after: str = "", most: int | None = None) -> list[Any]:
        """List up to PAGE objects, or `most`, below this prefix, in order."""
        page = PAGE if most is None else most
        with _translated():
            return list(
                itertools.islice(list_objects(self._client, self._bucket, folder, after=after, page=page), page)
            )

    def pages(self, folder: str) -> Iterator[list[Any]]:
        """List all objects below this prefix, in order, a page at a time."""
        after, is_last = "", False
        while not is_last:
            page = self.page(folder, after)
            is_last = len(page) < PAGE
            after = "" if is_last else page[-1]["Key"]
            yield page

    def find_all(self, folder: str) -> list[Any]:
        """List all objects below this prefix, in order."""
        with _translated():
            return list(list_objects(self._client, self._bucket, folder, page=PAGE))

    def each(self, action: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Run the action on several items at once. Raises what any of them raised."""
        items = list(items)
        if len(items) == 1:
            return [action(items[0])]
        return list(self._parallel.map(action, items))


def connect(limits: JournalSettings) -> Any:
    """Make a client, without a request. Raises SettingsError."""
    client = make_client(
        "handler.journal.url names S3, which cannot be used",
        limits.connect_timeout_s,
        limits.timeout_s,
        attempts=ATTEMPTS,
        connections=limits.max_in_flight + 2 * PARALLEL,  # a sweep makes several requests at once, too
    )
    client.meta.events.register_last("before-call.s3", _send_at_once)
    return client


def _send_at_once(params: Any, **kwargs: Any) -> None:
    """Send the body without waiting for "100 Continue", which would cost a round trip per write."""
    params["headers"].pop("Expect", None)


def _translated() -> AbstractContextManager[None]:
    return translated("the journal's store")

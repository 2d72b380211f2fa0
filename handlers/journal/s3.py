"""Journals in S3, or a store that speaks it: an object an event, created only if there is none (If-None-Match).

    {prefix}sessions/{expiry}/{session id}/events/{number}      {prefix}sessions/.../images/{hash}
    {prefix}claims/{hash}

A turn costs two requests: a GET of the next event, which is usually not there, and in the end the PUT of its own.
For that, closing is an event too: it takes the next number, so that it and a turn cannot both win, and afterwards
the same event stands in the place of every earlier one, so that whoever comes, with however much seen, finds it first.
The expiry stands in front of the id, so a sweep finds what is over at the beginning of one listing.
Relies on what S3 promises: strong consistency of reads and listings, and of conditional writes.
"""

import base64
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError, ReadTimeoutError

from handlers.journal.event import CLOSE, Event, image_hash
from handlers.journal.journal import EventTaken, JournalClosed, check_image, check_image_name, claim_key, expiry
from handlers.settings import JournalSettings

PARALLEL = 8  # requests of one operation at once
PAGE = 1000  # keys of a listing, and the most that S3 deletes at once
MAX_SWEPT_PAGES = 10  # of sessions and of claims, a sweep
MAX_CONFLICTS = 5  # tries of a conditional write that another one is in the way of
T = TypeVar("T")
R = TypeVar("R")


class S3Journal:
    """prefix: empty, or with a slash at its end. claim_s: how long a claim is kept at least."""

    def __init__(self, client: Any, bucket: str, prefix: str, claim_s: int) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._claim_s = claim_s
        self._swept_claims = ""  # where the last sweep ended
        self._parallel = ThreadPoolExecutor(PARALLEL, "journal-s3")

    def append(self, session_id: str, number: int, event: Event) -> None:
        data = event.encode()
        if self._create(self._event(session_id, number), data):
            return
        found = self._get(self._event(session_id, number))
        if found is not None and Event.decode(found).kind == CLOSE.kind:
            raise JournalClosed("this session was closed")
        if found != data:
            raise EventTaken(f"event {number} of this session has been written already")

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        """One request if there is nothing new; then several at once."""
        events: list[Event] = []
        num_asked = 1
        is_end = False
        while not is_end and (max_events is None or len(events) < max_events):
            if max_events is not None:
                num_asked = min(num_asked, max_events - len(events))
            first = start + len(events)
            keys = [self._event(session_id, number) for number in range(first, first + num_asked)]
            for data in self._each(self._get, keys):
                if data is None:  # what follows was written after this was asked for
                    is_end = True
                    break
                events.append(Event.decode(data))
            num_asked = PARALLEL
        return [CLOSE] if any(event.kind == CLOSE.kind for event in events) else events

    def put_image(self, session_id: str, data: bytes) -> str:
        name = image_hash(data)
        key = self._image(session_id, name)
        self._put(key, data)
        if self.read(session_id, 0, 1) == [CLOSE]:  # after the write: whoever closes later finds the image
            self._delete([key])
            raise JournalClosed("this session was closed")
        return name

    def get_image(self, session_id: str, image: str) -> bytes:
        check_image_name(image)
        return check_image(image, self._get(self._image(session_id, image)))

    def close(self, session_id: str) -> None:
        folder = self._session(session_id)
        numbers = [int(key.rpartition("/")[2]) for key in self._list(f"{folder}events/")]
        last = max(numbers, default=-1)
        if last < 0 or self.read(session_id, last, 1) != [CLOSE]:
            last += 1
            while not self._create(self._event(session_id, last), CLOSE.encode()):
                last += 1  # a turn was faster
        self._each(lambda number: self._put(self._event(session_id, number), CLOSE.encode()), range(last))
        self._delete(self._list(f"{folder}images/"))

    def delete(self, session_id: str) -> None:
        self._delete(self._list(self._session(session_id)))

    def claim(self, name: str, value: str) -> str:
        key = f"{self._prefix}claims/{claim_key(name)}"
        if self._create(key, value.encode()):
            return value
        first = self._get(key)
        if first is None:
            raise OSError("a claim was swept away while it was read")
        return first.decode()

    def sweep(self, expired_before: int) -> None:
        folder = f"{self._prefix}sessions/"
        for _ in range(MAX_SWEPT_PAGES):
            expired = [item["Key"] for item in self._page(folder) if item["Key"] < f"{folder}{expired_before:08x}"]
            self._delete(expired)
            if len(expired) < PAGE:
                break
        for _ in range(MAX_SWEPT_PAGES):
            page = self._page(f"{self._prefix}claims/", self._swept_claims)
            self._swept_claims = page[-1]["Key"] if len(page) == PAGE else ""
            too_old = expired_before - self._claim_s
            self._delete([item["Key"] for item in page if item["LastModified"].timestamp() < too_old])
            if not self._swept_claims:
                break

    def _session(self, session_id: str) -> str:
        return f"{self._prefix}sessions/{expiry(session_id):08x}/{session_id}/"

    def _event(self, session_id: str, number: int) -> str:
        return f"{self._session(session_id)}events/{number:08d}"

    def _image(self, session_id: str, name: str) -> str:
        return f"{self._session(session_id)}images/{name}"

    def _each(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The action's results, several requests at once. Raises what any of them raised."""
        if len(items) == 1:
            return [action(items[0])]
        return list(self._parallel.map(action, items))

    def _get(self, key: str) -> bytes | None:
        """The object's bytes, None if there is none."""
        try:
            with _translated():
                data: bytes = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
                return data
        except FileNotFoundError:
            return None

    def _put(self, key: str, data: bytes) -> None:
        with _translated():
            self._client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentMD5=_md5(data))

    def _create(self, key: str, data: bytes) -> bool:
        """False if there is an object of this key, which is also said to one whose first try did succeed."""
        for num_conflicts in itertools.count():
            try:
                with _translated():
                    md5 = _md5(data)
                    self._client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentMD5=md5, IfNoneMatch="*")
                return True
            except FileExistsError:
                return False
            except BlockingIOError:  # another writer is at it and may fail yet
                if num_conflicts == MAX_CONFLICTS:
                    raise
                time.sleep(random.uniform(0, 0.05 * 2**num_conflicts))
        raise AssertionError("unreachable")

    def _page(self, folder: str, after: str = "") -> list[Any]:
        """Up to PAGE objects below this prefix, in order."""
        with _translated():
            said = self._client.list_objects_v2(Bucket=self._bucket, Prefix=folder, StartAfter=after, MaxKeys=PAGE)
        return list(said.get("Contents", ()))

    def _list(self, folder: str) -> list[str]:
        """All keys below this prefix."""
        keys: list[str] = []
        while True:
            page = self._page(folder, keys[-1] if keys else "")
            keys += [item["Key"] for item in page]
            if len(page) < PAGE:
                return keys

    def _delete(self, keys: Sequence[str]) -> None:
        for page in (keys[start : start + PAGE] for start in range(0, len(keys), PAGE)):
            objects = [{"Key": key} for key in page]
            with _translated():
                said = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            for error in said.get("Errors", ()):
                raise OSError(f"the journal's store did not delete an object ({error.get('Code')})")


def connect(limits: JournalSettings) -> Any:
    """A client by the usual AWS environment and files; makes no request. Raises OSError if they make no sense."""
    with _translated():
        client = boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=limits.connect_timeout_s,
                read_timeout=limits.timeout_s,
                retries={"mode": "standard", "total_max_attempts": 2},
                max_pool_connections=limits.max_in_flight + PARALLEL,
                request_checksum_calculation="when_required",  # others that speak S3 do not all know the new ones
                response_checksum_validation="when_required",
            ),
        )
    client.meta.events.register_last("before-call.s3", _send_at_once)
    return client


def _send_at_once(params: Any, **kwargs: Any) -> None:
    """Without asking first whether the body is welcome, as botocore would: that is one more round trip a write."""
    params["headers"].pop("Expect", None)


def _md5(data: bytes) -> str:
    """By which a store knows a body that was cut off: SeaweedFS would keep an empty object otherwise."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


_KINDS: dict[int, type[OSError]] = {404: FileNotFoundError, 409: BlockingIOError, 412: FileExistsError}


@contextmanager
def _translated() -> Iterator[None]:
    """The library's errors as OSError, of a kind that tells those apart that matter here."""
    try:
        yield
    except ClientError as exc:
        code = exc.response.get("Error", {}).get("Code", "unknown")
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = OSError if code == "NoSuchBucket" else _KINDS.get(status, OSError)
        raise kind(f"the journal's store refused {exc.operation_name} ({code})") from exc
    except (ConnectTimeoutError, ReadTimeoutError) as exc:
        raise TimeoutError("the journal's store did not answer in time") from exc
    except BotoCoreError as exc:
        raise OSError(f"the journal's store cannot be reached ({type(exc).__name__})") from exc

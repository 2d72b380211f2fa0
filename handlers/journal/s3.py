"""Journals in S3: an object per event, created only if there is none (If-None-Match).

    {prefix}sessions/{expiry}/{session id}/events/{number}      {prefix}sessions/.../images/{hash}
    {prefix}claims/{hash}

A turn costs two requests: a GET of the next event, which usually does not exist, and the PUT of its own. So closing is
an event, too: it takes the next number, so that it and a turn cannot both succeed, and then replaces every earlier
event, so that a reader finds it first wherever it starts. The expiry precedes the id, so that a sweep finds expired
sessions at the beginning of one listing. Relies on S3's consistency of reads, listings and conditional writes.
"""

import base64
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any, TypeVar

from handlers.journal.event import Event, check_size, image_hash
from handlers.journal.journal import (
    MAX_CLAIM_BYTES,
    EventTaken,
    JournalClosed,
    check_image,
    check_image_name,
    claim_key,
    expiry,
    is_session_id,
)
from handlers.s3 import S3Error, list_objects, make_client, translated
from handlers.settings import JournalSettings

PARALLEL = 8  # requests of one operation at once
PAGE = 1000  # keys of a listing, and the most that S3 deletes at once
MAX_SWEPT_PAGES = 10  # of sessions and of claims, in one sweep
MAX_CONFLICTS = 5  # retries of a conditional write while another is undecided
ATTEMPTS = 2  # of a request; an operation has a time-out of its own
T = TypeVar("T")
R = TypeVar("R")


class S3Journal:
    """prefix: empty, or with a slash at its end."""

    used_bytes = 0

    def __init__(self, client: Any, bucket: str, prefix: str, settings: JournalSettings) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._settings = settings
        self._swept_claims = ""  # where the last sweep ended
        self._parallel = ThreadPoolExecutor(PARALLEL, "journal-s3")

    def check_room(self) -> None:
        """Do nothing: the store has no end."""

    def append(self, session_id: str, number: int, event: Event) -> None:
        data = event.encode(session_id, self._settings.max_event_bytes)
        if self._create(self._event(session_id, number), data):
            return
        found = self._get(self._event(session_id, number), self._settings.max_event_bytes)
        if found is not None and Event.decode(found, session_id).kind == "close":
            raise JournalClosed("this session was closed")
        if found != data:
            raise EventTaken(f"event {number} of this session has been written already")

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        """Read one event first, since there is usually none; then several at once."""
        events: list[Event] = []
        num_asked = 1
        is_end = False
        while not is_end and (max_events is None or len(events) < max_events):
            if max_events is not None:
                num_asked = min(num_asked, max_events - len(events))
            first = start + len(events)
            for event in self._each(partial(self._read_one, session_id), range(first, first + num_asked)):
                if event is None:  # later ones were written after this request
                    is_end = True
                    break
                events.append(event)
            num_asked = PARALLEL
        return [event for event in events if event.kind == "close"][:1] or events

    def put_image(self, session_id: str, data: bytes) -> str:
        name = image_hash(data)
        key = self._image(session_id, name)
        self._put(key, data)
        if self._find_close(session_id, 0) is not None:  # after the write: a later close finds the image
            self._delete([key])
            raise JournalClosed("this session was closed")
        return name

    def get_image(self, session_id: str, image: str) -> bytes:
        check_image_name(image)
        return check_image(image, self._get(self._image(session_id, image), self._settings.max_image_bytes))

    def close(self, session_id: str, event: Event) -> Event:
        folder, max_bytes = self._session(session_id), self._settings.max_event_bytes
        last = max((int(key.rpartition("/")[2]) for key in self._list(f"{folder}events/")), default=-1)
        first = self._find_close(session_id, last) if last >= 0 else None
        while first is None:
            last += 1
            if self._create(self._event(session_id, last), event.encode(session_id, max_bytes)):
                first = event
            else:  # a turn or another close was faster
                first = self._find_close(session_id, last)
        data = first.encode(session_id, max_bytes)
        self._each(lambda number: self._put(self._event(session_id, number), data), range(last))
        self._delete(self._list(f"{folder}images/"))
        return first

    def delete(self, session_id: str) -> None:
        self._delete(self._list(self._session(session_id)))

    def claim(self, name: str, value: str) -> str:
        key = f"{self._prefix}claims/{claim_key(name)}"
        if self._create(key, value.encode()):
            return value
        first = self._get(key, MAX_CLAIM_BYTES)
        if first is None:
            raise OSError("a claim was swept away while it was read")
        return first.decode(errors="replace")

    def list_ids(self, cursor: str = "") -> tuple[list[str], str]:
        folder = f"{self._prefix}sessions/"
        page = [item["Key"] for item in self._page(folder, cursor)]
        names = dict.fromkeys(key.removeprefix(folder).split("/")[1] for key in page)
        return [name for name in names if is_session_id(name)], page[-1] if len(page) == PAGE else ""

    def sweep(self, expired_before: int, *, is_full: bool = True) -> None:
        folder = f"{self._prefix}sessions/"
        for _ in range(MAX_SWEPT_PAGES):
            expired = [item["Key"] for item in self._page(folder) if item["Key"] < f"{folder}{expired_before:08x}"]
            self._delete(expired)
            if len(expired) < PAGE:
                break
        if not is_full:
            return
        for _ in range(MAX_SWEPT_PAGES):
            page = self._page(f"{self._prefix}claims/", self._swept_claims)
            self._swept_claims = page[-1]["Key"] if len(page) == PAGE else ""
            too_old = expired_before - self._settings.claim_s
            self._delete([item["Key"] for item in page if item["LastModified"].timestamp() < too_old])
            if not self._swept_claims:
                break

    def _session(self, session_id: str) -> str:
        return f"{self._prefix}sessions/{expiry(session_id):08x}/{session_id}/"

    def _event(self, session_id: str, number: int) -> str:
        return f"{self._session(session_id)}events/{number:08d}"

    def _image(self, session_id: str, name: str) -> str:
        return f"{self._session(session_id)}images/{name}"

    def _find_close(self, session_id: str, number: int) -> Event | None:
        """Return the event of this number if it is a "close"."""
        event = self._read_one(session_id, number)
        return event if event is not None and event.kind == "close" else None

    def _read_one(self, session_id: str, number: int) -> Event | None:
        data = self._get(self._event(session_id, number), self._settings.max_event_bytes)
        return None if data is None else Event.decode(data, session_id)

    def _each(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Run the action on several items at once. Raises what any of them raised."""
        if len(items) == 1:
            return [action(items[0])]
        return list(self._parallel.map(action, items))

    def _get(self, key: str, max_bytes: int) -> bytes | None:
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

    def _put(self, key: str, data: bytes, **conditions: str) -> None:
        # A store knows a body that was cut off by its MD5; SeaweedFS would keep an empty object without one.
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        with _translated():
            self._client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentMD5=md5, **conditions)

    def _create(self, key: str, data: bytes) -> bool:
        """Return False if the object exists, perhaps by an earlier attempt of this very request."""
        for num_conflicts in itertools.count():
            try:
                self._put(key, data, IfNoneMatch="*")
                return True
            except S3Error as exc:
                if exc.is_precondition:
                    return False
                if exc.status != 409 or num_conflicts == MAX_CONFLICTS:  # 409: another write, which may fail yet
                    raise
            time.sleep(random.uniform(0, 0.05 * 2**num_conflicts))
        raise AssertionError("unreachable")

    def _page(self, folder: str, after: str = "") -> list[Any]:
        """List up to PAGE objects below this prefix, in order."""
        with _translated():
            found = list_objects(self._client, self._bucket, folder, after=after, page=PAGE)
            return list(itertools.islice(found, PAGE))

    def _list(self, folder: str) -> list[str]:
        with _translated():
            return [item["Key"] for item in list_objects(self._client, self._bucket, folder, page=PAGE)]

    def _delete(self, keys: Sequence[str]) -> None:
        for page in (keys[start : start + PAGE] for start in range(0, len(keys), PAGE)):
            objects = [{"Key": key} for key in page]
            with _translated():
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise OSError(f"the journal's store did not delete an object ({error.get('Code')})")


def connect(limits: JournalSettings) -> Any:
    """Make a client, without a request. Raises SettingsError."""
    client = make_client(
        "handler.journal.url names S3, which cannot be used",
        limits.connect_timeout_s,
        limits.timeout_s,
        attempts=ATTEMPTS,
        connections=limits.max_in_flight + PARALLEL,
    )
    client.meta.events.register_last("before-call.s3", _send_at_once)
    return client


def _send_at_once(params: Any, **kwargs: Any) -> None:
    """Send the body without waiting for "100 Continue", which would cost a round trip per write."""
    params["headers"].pop("Expect", None)


def _translated() -> AbstractContextManager[None]:
    return translated("the journal's store")

"""Journals in S3: an object per event, created only if there is none (If-None-Match).

    {prefix}sessions/{expiry}/{session id}/events/{number}
    {prefix}sessions/{expiry}/{session id}/owner/{owner}
    {prefix}sessions/{expiry}/{session id}/closed
    {prefix}sessions/{expiry}/{session id}/kv/{number}
    {prefix}claims/{hash}
    {prefix}listed/{owner}/{the later the smaller}/{session id}.{label}
    and images, see handlers/journal/s3_images.py

A turn costs two requests: a GET of the next event, which usually does not exist, and the PUT of its own. So closing is
an event, too. It takes the next number, so a close and a turn cannot both succeed. Then it replaces every earlier
event, and a reader finds it wherever it starts. The expiry precedes the id, so a sweep finds expired sessions at the
beginning of one listing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, groupby, islice, takewhile
from typing import Any

from handlers.journal import s3_objects
from handlers.journal.event import Event, image_hash
from handlers.journal.journal import (
    ANYONE,
    MAX_CLAIM_BYTES,
    MAX_LISTED,
    NO_KEYS,
    EventTaken,
    JournalClosed,
    Listed,
    check_image,
    check_image_name,
    check_owner,
    claim_key,
    expiry,
    is_owner,
    is_session_id,
    make_listed,
    read_listed,
)
from handlers.journal.s3_images import S3SharedImages
from handlers.journal.s3_objects import S3Objects
from handlers.journal.stored_journal import StoredJournal
from handlers.settings.journal import JournalSettings

CLOSED, KV = "closed", "kv"
_LAST = 0xFFFFFFFF  # the last expiry that an id can have: a list's keys count down from it
MAX_SWEPT_PAGES = 10  # of sessions, of claims and of lists, in one sweep
MAX_MEASURED = 50 * s3_objects.PAGE  # the cost of what one sweep measures: a request has that of a page


class S3Journal(StoredJournal):
    """prefix: empty, or with a slash at its end. keys: see EventCodec."""

    def __init__(
        self, client: Any, bucket: str, prefix: str, settings: JournalSettings, keys: Mapping[str, bytes] = NO_KEYS
    ) -> None:
        super().__init__(settings, keys)
        self._objects = S3Objects(client, bucket)
        self._images = S3SharedImages(self._objects, prefix)
        self._swept_objects = S3Objects(client, bucket)  # with threads of its own: clients do not wait for a sweep
        self._swept_images = S3SharedImages(self._swept_objects, prefix)
        self._prefix = prefix
        self._swept = {"claims": "", "listed": ""}  # where the last sweep ended
        self._measuring: Iterator[int] | None = None  # the measurement that is not complete yet

    def append(self, session_id: str, number: int, event: Event, owner: str) -> None:
        data = self._codec.encode(event, session_id)
        key = self._event(session_id, number)
        if number == 0 and check_owner(owner) != ANYONE:
            self._objects.put(f"{self._session(session_id)}owner/{owner}", b"")
        if self._objects.create(key, data):
            self._budget.add(owner, expiry(session_id), len(data), int(number == 0))
            return
        found = self._objects.get(key, self._settings.max_event_bytes)
        if found is not None and self._codec.decode(found, session_id).kind == "close":
            raise JournalClosed()
        if found != data:
            raise EventTaken(number)

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        """Read one event first, since there is usually none; then several at once."""
        events: list[Event] = []
        num_asked = 1
        is_end = False
        while not is_end and (max_events is None or len(events) < max_events):
            if max_events is not None:
                num_asked = min(num_asked, max_events - len(events))
            first = start + len(events)
            for event in self._objects.each(partial(self._read_one, session_id), range(first, first + num_asked)):
                if event is None:  # later ones were written after this request
                    is_end = True
                    break
                events.append(event)
            num_asked = s3_objects.PARALLEL
        return [event for event in events if event.kind == "close"][:1] or events

    def put_image(self, session_id: str, data: bytes, owner: str) -> str:
        folder = self._session(session_id)
        pointer, num_bytes = self._images.share(folder, session_id, owner, data)
        if self._find_close(session_id, 0) is not None:  # after the write: a later close finds the image
            self._images.release(session_id, [pointer])
            raise JournalClosed()
        self._budget.add(owner, expiry(session_id), num_bytes)
        return image_hash(data)

    def get_image(self, session_id: str, image: str) -> bytes:
        check_image_name(image)
        folder, max_bytes = self._session(session_id), self._settings.max_image_bytes
        return check_image(image, self._images.get(folder, image, max_bytes))

    def put_kv(self, session_id: str, number: int, data: bytes, owner: str) -> bool:
        """Write a part. If it replaces another part, both count until the next measurement."""
        self._budget.check_kv(owner, len(data))
        key = self._kv(session_id, number)
        self._objects.put(key, data)
        if self._find_close(session_id, 0) is not None:  # after the write: a later close finds the part
            self._objects.delete([key])
            return False
        self._budget.add(owner, expiry(session_id), kv_bytes=len(data))
        return True

    def read_kv(self, session_id: str, first: int, count: int, max_bytes: int) -> list[bytes]:
        keys = [self._kv(session_id, number) for number in range(first, first + count)]
        parts = self._objects.each(lambda key: self._objects.get(key, max_bytes), keys)
        return [part for part in takewhile(lambda part: part is not None, parts) if part is not None]

    def close(self, session_id: str, event: Event) -> Event:
        folder = self._session(session_id)
        found = self._objects.find_all(folder)
        sizes = {int(_name(item["Key"])): item["Size"] for item in found if self._kind(item["Key"]) == "events"}
        last = max(sizes, default=-1)
        first = self._find_close(session_id, last) if last >= 0 else None
        num_sessions = int(first is None and last >= 0)
        while first is None:
            last += 1
            if self._objects.create(self._event(session_id, last), self._codec.encode(event, session_id)):
                first = event
            else:  # a turn or another close was faster
                first = self._find_close(session_id, last)
        data = self._codec.encode(first, session_id)
        copies = [*(self._event(session_id, number) for number in range(last)), f"{folder}{CLOSED}"]
        self._objects.each(lambda key: self._objects.put(key, data), copies)
        owner = self._owner(item["Key"] for item in found)
        keys = [item["Key"] for item in self._objects.find_all(folder)]
        num_bytes = sum(sizes.values()) - (last + 2) * len(data) + self._release(session_id, keys)
        self._budget.add(owner, expiry(session_id), -num_bytes, -num_sessions, -self._kv_bytes(found))
        return first

    def delete(self, session_id: str) -> None:
        found = self._objects.find_all(self._session(session_id))
        keys = [item["Key"] for item in found]
        owner = self._owner(keys)
        num_bytes = self._release(session_id, keys)
        self._budget.add(owner, expiry(session_id), -num_bytes, -self._count_open(keys), -self._kv_bytes(found))
        self._objects.delete([key for key in keys if self._kind(key) in ("events", "owner", CLOSED)])

    def _release(self, session_id: str, keys: list[str]) -> int:
        """Delete a session's images and its KV cache. keys: the session's objects. Return the images' bytes."""
        self._objects.delete([key for key in keys if self._kind(key) == KV])
        return self._images.release(session_id, [key for key in keys if self._kind(key) == "pictures"])

    def claim(self, name: str, value: str) -> str:
        key = f"{self._prefix}claims/{claim_key(name)}"
        if self._objects.create(key, value.encode()):
            return value
        first = self._objects.get(key, MAX_CLAIM_BYTES)
        if first is None:
            raise OSError("a claim was swept away while it was read")
        return first.decode(errors="replace")

    def enlist(self, session_id: str, label: str, owner: str) -> None:
        self._objects.put(self._listed(owner, make_listed(session_id, label)), b"")

    def delist(self, session_id: str, label: str, owner: str) -> None:
        self._objects.delete([self._listed(owner, make_listed(session_id, label))])

    def list_owned(self, owner: str) -> list[Listed]:
        items = chain.from_iterable(self._objects.pages(f"{self._prefix}listed/{check_owner(owner)}/"))
        found = (read_listed(_name(item["Key"])) for item in islice(items, MAX_LISTED))
        return [listed for listed in found if listed is not None]

    def list_ids(self, cursor: str = "") -> tuple[list[str], str]:
        folder = f"{self._prefix}sessions/"
        page = [item["Key"] for item in self._objects.page(folder, cursor)]
        names = dict.fromkeys(map(self._session_id, page))
        return [name for name in names if is_session_id(name)], page[-1] if len(page) == s3_objects.PAGE else ""

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        if is_full and self._measuring is None:
            self._measuring = self._measure(expired_before)
        try:
            self._sweep_sessions(expired_before)
            if is_full:
                claimed_before = expired_before - self._settings.claim_s
                self._sweep_folder("claims", lambda item: item["LastModified"].timestamp() < claimed_before)
                self._sweep_folder("listed", lambda item: _is_expired(item, expired_before))
        finally:  # also if the store keeps an object against deletion, such as by a lock
            self._budget.expire(expired_before)
            self._continue_measuring()

    def _continue_measuring(self) -> None:
        measuring, self._measuring = self._measuring, None  # an error ends it
        left = MAX_MEASURED
        for cost in measuring or ():
            left -= cost
            if left <= 0:
                self._measuring = measuring
                break

    def _sweep_sessions(self, expired_before: int) -> None:
        folder = f"{self._prefix}sessions/"
        for _ in range(MAX_SWEPT_PAGES):
            page = self._swept_objects.page(folder)
            keys = [item["Key"] for item in page if item["Key"] < f"{folder}{expired_before:08x}"]
            pointers = [(self._session_id(key), key) for key in keys if self._kind(key) == "pictures"]
            self._swept_images.release_all(pointers)
            self._swept_objects.delete(keys)
            if len(keys) < s3_objects.PAGE:
                break

    def _sweep_folder(self, name: str, is_old: Callable[[Any], bool]) -> None:
        """Delete the old objects of a folder, from where the last sweep ended."""
        for _ in range(MAX_SWEPT_PAGES):
            page = self._swept_objects.page(f"{self._prefix}{name}/", self._swept[name])
            self._swept[name] = page[-1]["Key"] if len(page) == s3_objects.PAGE else ""
            self._swept_objects.delete([item["Key"] for item in page if is_old(item)])
            if not self._swept[name]:
                break

    def _measure(self, expired_before: int) -> Iterator[int]:
        """Measure the store. Yield the cost of each step."""
        found = self._budget.begin_measurement()
        items = chain.from_iterable(self._swept_objects.pages(f"{self._prefix}sessions/"))
        for session_id, of_session in groupby(items, lambda item: self._session_id(item["Key"])):
            items_of_session = list(of_session)
            sizes = {item["Key"]: item["Size"] for item in items_of_session}
            if is_session_id(session_id):
                kv_bytes = self._kv_bytes(items_of_session)
                owner, num_bytes = self._owner(sizes), sum(sizes.values()) - kv_bytes
                found.add(owner, expiry(session_id), num_bytes, self._count_open(sizes), kv_bytes)
            yield len(sizes)
        released_before = expired_before - self._settings.claim_s
        yield from self._swept_images.measure(found, expired_before, released_before)
        self._budget.replace(found)

    def _session(self, session_id: str) -> str:
        return f"{self._prefix}sessions/{expiry(session_id):08x}/{session_id}/"

    def _listed(self, owner: str, listed: Listed) -> str:
        return f"{self._prefix}listed/{check_owner(owner)}/{_LAST - listed.expires_at:08x}/{listed.name}"

    def _event(self, session_id: str, number: int) -> str:
        return f"{self._session(session_id)}events/{number:08d}"

    def _kv(self, session_id: str, number: int) -> str:
        return f"{self._session(session_id)}{KV}/{number:06d}"

    def _kv_bytes(self, items: Iterable[Any]) -> int:
        """Return the bytes of KV caches among these objects."""
        return sum(item["Size"] for item in items if self._kind(item["Key"]) == KV)

    def _parts(self, key: str) -> list[str]:
        """Split the key of a session's object: expiry, session id, its kind (the next folder, or "closed"), rest."""
        return [*key.removeprefix(f"{self._prefix}sessions/").split("/", 3), "", ""]

    def _session_id(self, key: str) -> str:
        return self._parts(key)[1]

    def _kind(self, key: str) -> str:
        return self._parts(key)[2]

    def _owner(self, keys: Iterable[str]) -> str:
        """Return the owner of a session from the keys of its objects."""
        owners = (_name(key) for key in keys if self._kind(key) == "owner")
        return next((owner for owner in owners if is_owner(owner)), ANYONE)

    def _count_open(self, keys: Iterable[str]) -> int:
        """Return 1 for the objects of an open session, else 0."""
        kinds = set(map(self._kind, keys))
        return int("events" in kinds and CLOSED not in kinds)

    def _find_close(self, session_id: str, number: int) -> Event | None:
        """Return the event of this number if it is a "close"."""
        event = self._read_one(session_id, number)
        return event if event is not None and event.kind == "close" else None

    def _read_one(self, session_id: str, number: int) -> Event | None:
        data = self._objects.get(self._event(session_id, number), self._settings.max_event_bytes)
        return None if data is None else self._codec.decode(data, session_id)


def _is_expired(item: Any, before: int) -> bool:
    """Return whether the session of a list's object has expired, or another program has written the object."""
    listed = read_listed(_name(item["Key"]))
    return listed is None or listed.expires_at < before


def _name(key: str) -> str:
    return key.rpartition("/")[2]

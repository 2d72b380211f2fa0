"""Images of journals in S3: one object for all sessions of an owner.

    {prefix}pictures/{owner}/{hash}/{number}              the image
    {prefix}pictures/{owner}/{hash}/{number}.released     it gets no further sessions
    {prefix}uses/{owner}/{hash}/{number}/{session id}     a session has it
    {session's folder}pictures/{hash}/{owner}/{number}    the same, for the session

A session names an image before it checks whether the image is released; a deletion releases the image before it
checks whether a session has it. So one of two concurrent operations sees the other, and no image of a session is
deleted. A session that finds its image released stores it under the next number. Numbers count down, so that a listing
begins with the latest one, however many marks there are. The mark of a release outlives the image by the setting
journal.claim_s.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from handlers.journal.budget import JournalUsage
from handlers.journal.event import image_hash
from handlers.journal.journal import check_owner, expiry, is_session_id
from handlers.journal.s3_objects import PAGE, PARALLEL, S3Objects

MAX_ATTEMPTS = 5  # to store an image that is released at the same moment
FIRST_NUMBER = "99999999"
RELEASED = ".released"


class StoredImage(NamedTuple):
    """One object with an image. number: distinguishes successive objects of the same image."""

    owner: str
    name: str
    number: str

    @property
    def place(self) -> str:
        return "/".join(self)


class S3SharedImages:
    """Safe for all threads, and for all processes that share the bucket."""

    def __init__(self, objects: S3Objects, prefix: str) -> None:
        self._objects = objects
        self._prefix = prefix

    def share(self, folder: str, session_id: str, owner: str, data: bytes) -> tuple[str, int]:
        """Give a session an image. Return its pointer and the bytes that were written, 0 if the owner has the image.

        folder: the session's.
        """
        name = image_hash(data)
        for _ in range(MAX_ATTEMPTS):
            number, is_stored = self._choose(check_owner(owner), name, len(data))
            image = StoredImage(owner, name, number)
            pointer = f"{folder}pictures/{name}/{owner}/{number}"
            self._objects.each(lambda key: self._objects.put(key, b""), (pointer, self._use(image, session_id)))
            is_new = not is_stored and self._objects.create(self._key(image), data)
            if self._objects.get(self._key(image) + RELEASED, 0) is None:
                return pointer, len(data) if is_new else 0
            self.release(session_id, [pointer])
        raise OSError("an image of the journal cannot be stored: other workers release it each time")

    def _choose(self, owner: str, name: str, num_bytes: int) -> tuple[str, bool]:
        """Return the number of an image that sessions may use, and True; else a new number."""
        latest = self._objects.page(f"{self._prefix}pictures/{owner}/{name}/", most=2)  # with its mark
        if not latest:
            return FIRST_NUMBER, False
        image = self._read_key(latest[0])
        is_released = self._key(image) + RELEASED in [item["Key"] for item in latest]
        if not is_released and latest[0]["Size"] == num_bytes:
            return image.number, True
        if not int(image.number):
            raise OSError("an image of the journal cannot be stored: it has no numbers left")
        return f"{int(image.number) - 1:0{len(FIRST_NUMBER)}d}", False

    def get(self, folder: str, name: str, max_bytes: int) -> bytes | None:
        """Read a session's image; None if it has none of this name. Raises DamagedRecord."""
        start = f"{folder}pictures/{name}/"
        for item in self._objects.page(start):  # an upload that failed half way may have left one without an image
            owner, _, number = item["Key"].removeprefix(start).partition("/")
            found = self._objects.get(self._key(StoredImage(owner, name, number)), max_bytes)
            if found is not None:
                return found
        return None

    def release(self, session_id: str, pointers: Iterable[str]) -> int:
        """Take these images from a session. Return the bytes of those that no other session has."""
        return self.release_all([(session_id, key) for key in pointers])

    def release_all(self, pointers: Sequence[tuple[str, str]]) -> int:
        """Take images from several sessions. pointers: session ids and keys."""
        uses = {(session_id, _read_pointer(key)) for session_id, key in pointers}
        self._objects.delete([self._use(image, session_id) for session_id, image in uses])
        images, num_bytes = list({image for _, image in uses}), 0
        for start in range(0, len(images), PARALLEL):  # in parts, so that clients' operations are not behind all
            num_bytes += sum(self._objects.each(self._delete_unused, images[start : start + PARALLEL]))
        self._objects.delete(
            [key for _, key in pointers]
        )  # at the end, so that a later sweep finds and repeats an interrupted release
        return num_bytes

    def _delete_unused(self, image: StoredImage) -> int:
        """Delete an image that no session has. Return its bytes if this was done."""
        key = self._key(image)
        found = [item for item in self._objects.page(key, most=1) if item["Key"] == key]
        if not found or self._is_used(image):
            return 0
        self._objects.put(key + RELEASED, b"")
        if self._is_used(image):
            return 0
        self._objects.delete([key])
        return int(found[0]["Size"])

    def _is_used(self, image: StoredImage) -> bool:
        return bool(self._objects.page(self._use(image, ""), most=1))

    def measure(self, found: JournalUsage, expired_before: float, released_before: float) -> Iterator[int]:
        """Count the bytes of each image by its owner and the expiry of the last session that has it.

        Delete what killed workers have left: uses by sessions that expired before this time, and images that no
        session has. Delete marks of releases, too. Both times are in seconds since 1970. Yield the cost of each step:
        1 for a listed object, PAGE for an image that is looked at or deleted.
        """
        uses = _Uses(self._uses(expired_before))
        stored = None
        for page in self._objects.pages(f"{self._prefix}pictures/"):
            old_marks = []
            for item in page:
                yield 1
                image = self._read_key(item)
                if item["Key"].endswith(RELEASED):
                    if image != stored and item["LastModified"].timestamp() < released_before:
                        old_marks.append(item["Key"])
                    continue
                stored = image
                last_expiry = yield from uses.find_last_expiry(image)
                if last_expiry:
                    found.add(image.owner, last_expiry, item["Size"])
                else:
                    self._delete_unused(image)
                    yield PAGE
            self._objects.delete(old_marks)
        yield from uses.skip_rest()

    def _uses(self, expired_before: float) -> Iterator[tuple[StoredImage, int]]:
        """Yield each use's image and its session's expiry. Uses by expired sessions are deleted; their expiry is 0."""
        for page in self._objects.pages(f"{self._prefix}uses/"):
            uses = [(item["Key"], *self._read_use(item["Key"])) for item in page]
            self._objects.delete([key for key, _, expires_at in uses if expires_at < expired_before])
            for _, image, expires_at in uses:
                yield image, expires_at if expires_at >= expired_before else 0

    def _read_use(self, key: str) -> tuple[StoredImage, int]:
        place, _, session_id = key.removeprefix(f"{self._prefix}uses/").rpartition("/")
        return _read_place(place), expiry(session_id) if is_session_id(session_id) else 0

    def _key(self, image: StoredImage) -> str:
        return f"{self._prefix}pictures/{image.place}"

    def _use(self, image: StoredImage, session_id: str) -> str:
        return f"{self._prefix}uses/{image.place}/{session_id}"

    def _read_key(self, item: Any) -> StoredImage:
        return _read_place(item["Key"].removeprefix(f"{self._prefix}pictures/").removesuffix(RELEASED))


class _Uses:
    """Reads uses along with a list of images, both in the order of their keys. Its iterators yield 1 for each use.

    uses: each with its session's expiry.
    """

    def __init__(self, uses: Iterator[tuple[StoredImage, int]]) -> None:
        self._uses = uses
        self._next = next(uses, None)

    def find_last_expiry(self, image: StoredImage) -> Generator[int, None, int]:
        """Return the latest expiry of the image's uses; 0 without one."""
        last = 0
        while self._next is not None and self._next[0].place <= image.place:
            yield 1
            used, expires_at = self._next
            if used == image:
                last = max(last, expires_at)
            self._next = next(self._uses, None)
        return last

    def skip_rest(self) -> Iterator[int]:
        for _ in self._uses:
            yield 1


def _read_place(place: str) -> StoredImage:
    owner, name, number = [*place.split("/", 2), "", ""][:3]
    return StoredImage(owner, name, number)


def _read_pointer(key: str) -> StoredImage:
    name, owner, number = key.split("/")[-3:]
    return StoredImage(owner, name, number)

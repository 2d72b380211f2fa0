"""Interface of the object stores, and their errors.

    s3://bucket/key         S3, or a compatible store
    file:///a/path          a file of this machine, below one of the configured directories
    https://host/path       read only, such as a presigned URL, from one of the configured hosts

A reader sees a whole object or none: an object appears under its name only when its last byte is stored.

ObjectError
|-- LocationRefused      the URL is malformed or not allowed here; permanent
|-- ObjectMissing        the object, bucket or directory does not exist; permanent
|-- ObjectDenied         the store denies access; permanent
|-- ObjectTooLarge       the object exceeds the limit; permanent
|-- ObjectTooSlow        an input does not arrive in time, although its store answers; permanent
|-- ObjectConflict       the name belongs to another object; permanent
`-- ObjectUnavailable    the store is down, slow or full, or there are no credentials for it; try again later
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from torchmoor.errors import TorchmoorError


class ObjectError(TorchmoorError):
    """Raised when an object cannot be read or written. Clients see the message; it holds no credentials."""

    is_permanent = True  # another try cannot succeed


class LocationRefused(ObjectError):
    """Raised when a URL is malformed, or must not be read or written here."""


class ObjectMissing(ObjectError):
    """Raised when the object, bucket or directory does not exist."""


class ObjectDenied(ObjectError):
    """Raised when the store denies access."""


class ObjectTooLarge(ObjectError):
    """Raised when an object has more bytes than the limit."""


class ObjectTooSlow(ObjectError):
    """Raised when an input does not arrive in time, although its store answers."""


class ObjectConflict(ObjectError):
    """Raised when another object has the name. It is never written over."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{url} is taken: another request or program wrote this object, which is never overwritten")


class ObjectUnavailable(ObjectError):
    """Raised when the store cannot be reached, does not answer in time, or is full."""

    is_permanent = False


@dataclass(frozen=True, slots=True)
class ObjectMetadata:
    """An object's properties besides its bytes. content_type: "" if it is not known."""

    content_type: str = ""


NO_METADATA = ObjectMetadata()


@dataclass(slots=True, eq=False)
class Download:
    """An open input. Leave its context or call `close` once, whether or not it was read to its end.

    size: bytes, known before the first is read. metadata: what the store knows of it.
    chunks: never empty, at most 1 MiB each, read only as fast as the caller takes them. They add up to `size`;
    otherwise the iterator raises ObjectUnavailable. release: frees what the store holds for the download.
    """

    size: int
    metadata: ObjectMetadata
    chunks: AsyncIterator[bytes]
    release: Callable[[], object]
    is_closed: bool = False

    async def __aenter__(self) -> Download:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection or the file, also during a read. Later calls do nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.release()


def check_output_bytes(num_bytes: int, max_bytes: int) -> None:
    """Raise ObjectTooLarge if a result or failure has more bytes than the limit."""
    if num_bytes > max_bytes:
        raise ObjectTooLarge(f"the result has more than {max_bytes} bytes")


async def join_chunks(chunks: AsyncIterator[bytes], size: int, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield blocks of at least `size` bytes, and at the end a shorter one, which may be empty.

    Raises ObjectTooLarge before the block that exceeds the limit.
    """
    block: list[bytes] = []
    num_bytes = num_waiting = 0
    async for chunk in chunks:
        block.append(chunk)
        num_bytes += len(chunk)
        num_waiting += len(chunk)
        check_output_bytes(num_bytes, max_bytes)
        if num_waiting >= size:
            joined = b"".join(block)
            block.clear()  # so that the data is in memory once
            num_waiting = 0
            yield joined
    yield b"".join(block)


class InputStore(Protocol):
    """Reads inputs by their URLs. Every method may raise ObjectError and may be called again."""

    def check_input(self, url: str) -> None:
        """Raise LocationRefused unless this URL may be read here. Does no I/O."""

    async def open(self, url: str) -> Download:
        """Open an input. Raises ObjectTooLarge before the first byte."""

    async def close(self) -> None:
        """Finish the clean-up of aborted uploads within the time-outs; then release connections and threads."""


class ObjectStore(InputStore, Protocol):
    """Reads inputs and writes results by their URLs."""

    def check_output(self, url: str) -> None:
        """Raise LocationRefused unless this URL may be written here. Does no I/O."""

    async def is_taken(self, url: str) -> bool:
        """Return whether an object has this name, or the name is a folder or below a file."""

    async def find_shortage(self, url: str) -> str | None:
        """Return the setting that allows no more results here; None if there is room."""

    async def sweep(self) -> int:
        """Remove what killed processes left, and return the bytes that the results take; 0 if that is not known."""

    async def upload(self, url: str, chunks: AsyncIterator[bytes], metadata: ObjectMetadata = NO_METADATA) -> str:
        """Stage an object of unknown length, under a name that no other object has.

        Returns its tag: its identity, kept under its final name; another upload of the same bytes has another. If the
        chunks raise or exceed the limit, or the caller is cancelled, the upload is aborted and its object removed.
        """

    async def put(self, url: str, body: bytes, metadata: ObjectMetadata = NO_METADATA) -> None:
        """Write a small object from memory, unless the name is taken.

        An object of exactly these bytes counts as written, so that a repeat succeeds. Raises ObjectConflict,
        ObjectTooLarge.
        """

    async def publish(self, staged: str, tag: str, final: str) -> None:
        """Give a staged object its final name, too, unless that is taken. The staged name stays until `delete`.

        Both names must be in one bucket or file system. A final object with this tag counts as published, so that a
        repeat succeeds. Raises ObjectConflict for any other one, and ObjectMissing if neither object exists.
        """

    async def delete(self, url: str) -> None:
        """Remove an object, if it exists."""

    async def delete_all(self, prefix: str) -> None:
        """Remove the objects of one folder whose URLs begin like this."""

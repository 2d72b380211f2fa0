"""Where asynchronous inputs are read from and results are written to: one interface, a class for each kind of location.

    s3://bucket/key         S3, or a store that speaks it
    file:///a/path          a directory of this machine, below the configured ones
    https://host/path       read only, presigned URLs for instance, from the configured hosts

Whoever uses it sees a whole object or none: under its own name an object appears at once, with its last byte.

ObjectError
|-- LocationRefused      no URL that may be read or written here; permanent
|-- ObjectMissing        no such object, bucket or directory; permanent
|-- ObjectDenied         the store does not let us; permanent
|-- TooLarge             more bytes than the limit; permanent
`-- ObjectUnavailable    the store is down, slow or full; try again later
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from torchmoor.errors import TorchmoorError


class ObjectError(TorchmoorError):
    """An object could not be read or written. The message is for the client: it has no credentials in it."""

    is_permanent = True  # trying again will not help


class LocationRefused(ObjectError):
    """The URL is malformed, or none of those that may be read or written here."""


class ObjectMissing(ObjectError):
    """There is no such object, bucket or directory."""


class ObjectDenied(ObjectError):
    """The store does not let us read or write this."""


class TooLarge(ObjectError):
    """The object has more bytes than may be read or written."""


class ObjectUnavailable(ObjectError):
    """The store cannot be reached, did not answer in time, or has no room left."""

    is_permanent = False


@dataclass(slots=True, eq=False)
class Download:
    """An object that is being read. Leave its context, or `close` it, however far it was read.

    size: bytes, known before the first one is read. content_type: "" if the store does not know it.
    chunks: never empty, at most 1 MiB each, read only as fast as they are taken; they add up to `size`, or iterating
    raises ObjectUnavailable. release: gives back what the store holds for it.
    """

    size: int
    content_type: str
    chunks: AsyncIterator[bytes]
    release: Callable[[], object]
    is_closed: bool = False

    async def __aenter__(self) -> Download:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection or the file, also under a read that is going on. May be called twice."""
        if not self.is_closed:
            self.is_closed = True
            self.release()


class ObjectStore(ABC):
    """Reads and writes objects by their URLs. Every method may raise ObjectError; each is safe to call again."""

    @abstractmethod
    def check_input(self, url: str) -> None:
        """Raise LocationRefused unless this URL may be read here. Asks nobody; the rest is seen when it is opened."""

    @abstractmethod
    def check_output(self, url: str) -> None:
        """Raise LocationRefused unless this URL may be written here. Asks nobody."""

    @abstractmethod
    async def open(self, url: str) -> Download:
        """Begin to read an input. Raises TooLarge before the first byte."""

    @abstractmethod
    async def upload(
        self,
        url: str,
        chunks: AsyncIterator[bytes],
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Write an object of unknown length; the number of its bytes.

        If the chunks raise, are too many, or the caller is cancelled, no object comes into being (unless the last
        request is on its way already), and what was sent is taken back. metadata: kept by S3 only, ASCII.
        """

    @abstractmethod
    async def put(self, url: str, body: bytes, content_type: str = "") -> None:
        """Write a small object that is in memory."""

    @abstractmethod
    async def publish(self, staged: str, final: str) -> None:
        """Give a staged object its final name, whole and at once; whatever had that name before is replaced.

        Both lie in the same store: one bucket, or one file system. Done already counts as done: if nothing is
        staged and there is an object of the final name, all is well. Raises ObjectMissing if there is neither.
        """

    @abstractmethod
    async def delete(self, url: str) -> None:
        """Remove an object; none there is no error."""

    @abstractmethod
    async def close(self) -> None:
        """Wait, within the stores' time-outs, for what must be taken back; then let go of connections and threads."""

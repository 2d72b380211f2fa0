"""Long bodies in files without names, which disappear with the process, and their way from there to an instance.

A body whose beginning suffices to place its request is written here once it is longer than what is kept in memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from io import FileIO
from tempfile import TemporaryFile, gettempdir

from torchmoor.config.limits import LimitSettings

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 << 10  # read and written at a time


class SpoolFull(Exception):
    """Raised when a body's next bytes would leave too little free space, the disk refuses them, or files are too many.

    setting: the limit that the body has reached.
    """

    def __init__(self, message: str, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


class SpooledBody:
    """A body in a file; closed once, by its owner."""

    __slots__ = ("num_bytes", "_file", "_spool", "_is_closed")

    def __init__(self, spool: Spool, file: FileIO) -> None:
        self.num_bytes = 0
        self._is_closed = False
        self._file = file
        self._spool = spool

    def append(self, data: bytes | bytearray) -> None:
        """Write more of the body. Raises SpoolFull."""
        left = memoryview(data)
        try:
            self._spool.check_space(self._file.fileno(), len(left))
            while left:
                written = self._file.write(left)
                left = left[written:]
        except OSError as error:
            raise SpoolFull(str(error), "min_spool_free_bytes") from error
        self.num_bytes += len(data)
        self._spool.num_bytes += len(data)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes of the body. Raises OSError."""
        return os.pread(self._file.fileno(), num_bytes, start)

    def close(self) -> None:
        """Delete the file, in a thread: for 100 MB that takes 15 ms. Further calls do nothing.

        The file counts until then, because it has its descriptor.
        """
        if not self._is_closed:
            self._is_closed = True
            self._spool.num_bytes -= self.num_bytes
            closing = asyncio.get_running_loop().run_in_executor(None, self._file.close)
            closing.add_done_callback(self._spool.on_deleted)


class Spool:
    """Makes the files, in a folder. num_bytes: total size. num_files: files that are open or being deleted.

    max_kept_bytes: shorter bodies stay in memory.
    """

    def __init__(self, limits: LimitSettings, *, max_files: float = float("inf")) -> None:
        """max_files: number of files that the limit of open files allows."""
        self.num_bytes = self.num_files = 0
        self.max_files = max_files
        self.max_kept_bytes = limits.max_replay_body_bytes
        self.folder = limits.spool_folder or gettempdir()
        self.min_free_bytes = limits.min_spool_free_bytes
        self._has_failed = False

    def try_open(self) -> SpooledBody | None:
        """Return an empty body; None if there is too little space, or no file can be made.

        Raises SpoolFull at the limit of files.
        """
        if self.num_files >= self.max_files:
            raise SpoolFull(f"{self.num_files} long bodies are in files", "reserved_descriptors")
        try:
            file = TemporaryFile(buffering=0, prefix="torchmoor-body-", dir=self.folder)  # noqa: SIM115
            try:
                self.check_space(file.fileno(), self.max_kept_bytes)
            except OSError:
                file.close()
                raise
        except OSError as error:
            if not self._has_failed:
                logger.warning("long bodies stay in memory folder=%s error=%s", self.folder, error)
            self._has_failed = True
            return None
        self._has_failed = False
        self.num_files += 1
        return SpooledBody(self, file)

    def on_deleted(self, closing: asyncio.Future[None]) -> None:
        """Stop counting a file. closing: is done, perhaps with an error, after which it has no descriptor either."""
        self.num_files -= 1
        if not closing.cancelled() and (error := closing.exception()) is not None:
            logger.error("the file of a long body was not closed cleanly error=%s", error)

    def check_space(self, descriptor: int, num_bytes: int) -> None:
        """Raise OSError if the file system would have too little free space after this number of bytes."""
        found = os.fstatvfs(descriptor)
        free = found.f_bavail * found.f_frsize
        if free - num_bytes < self.min_free_bytes:
            raise OSError(f"{free} bytes are free, and limits.min_spool_free_bytes keeps {self.min_free_bytes}")


class SpoolSender:
    """Writes a body to a connection, as fast as that takes it."""

    def __init__(self, transport: asyncio.Transport, body: SpooledBody, on_sent: Callable[[], None]) -> None:
        """on_sent: called once the last byte was written."""
        self._transport = transport
        self._body = body
        self._on_sent = on_sent
        self.num_written = 0
        self.is_paused = False

    def go_on(self) -> None:
        """Write the next piece, then the others, one per iteration of the event loop; stop when paused."""
        if self.is_paused or self._transport.is_closing():
            return
        try:
            piece = self._body.read(self.num_written, PIECE_BYTES)
        except OSError as error:
            logger.error("a long body could not be read back error=%s", error)
            self._transport.abort()
            return
        self.num_written += len(piece)
        self._transport.write(piece)
        if self.num_written >= self._body.num_bytes:
            self._on_sent()
        elif not self.is_paused:
            asyncio.get_running_loop().call_soon(self.go_on)

"""Objects as files of this machine: written beside their place, made durable, then renamed, so whole or not there.

A URL is judged twice: as text, and as the path that links lead to, which must lie below a configured directory too.
A file's content type is not kept.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from torchmoor.async_inference.objects.object_store import (
    Download,
    LocationRefused,
    ObjectDenied,
    ObjectError,
    ObjectMissing,
    ObjectStore,
    ObjectUnavailable,
    TooLarge,
)
from torchmoor.async_inference.objects.threads import Threads
from torchmoor.config.group import MIB
from torchmoor.config.objects import ObjectSettings

logger = logging.getLogger(__name__)

PIECE_BYTES = MIB


class DirectoryStore(ObjectStore):
    """file:// URLs below the configured directories."""

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._threads = Threads("objects-file", settings.max_in_flight)

    def check_input(self, url: str) -> None:
        _parse(url, self._settings.input_directories, "read")

    def check_output(self, url: str) -> None:
        _parse(url, self._settings.output_directories, "written")

    async def open(self, url: str) -> Download:
        path, root = _parse(url, self._settings.input_directories, "read")
        file = await self._threads.run(_open_file, url, path, root, self._settings.max_input_bytes)
        return Download(file.size, "", self._read(file), lambda: self._threads.submit(file.close))

    async def _read(self, file: _File) -> AsyncIterator[bytes]:
        while file.num_left:
            yield await self._threads.run(file.read)

    async def upload(
        self,
        url: str,
        chunks: AsyncIterator[bytes],
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        path, root = _parse(url, self._settings.output_directories, "written")
        writer = _Writer(url, path, root, self._settings.max_output_bytes)
        try:
            waiting: list[bytes] = []
            num_waiting = 0
            async for chunk in chunks:
                waiting.append(chunk)
                num_waiting += len(chunk)
                if num_waiting >= PIECE_BYTES:
                    await self._threads.run(writer.write, b"".join(waiting))
                    waiting.clear()
                    num_waiting = 0
            await self._threads.run(writer.write, b"".join(waiting))
            return await self._threads.run(writer.commit)
        finally:
            self._threads.submit(writer.discard)

    async def put(self, url: str, body: bytes, content_type: str = "") -> None:
        path, root = _parse(url, self._settings.output_directories, "written")
        await self._threads.run(_write_whole, _Writer(url, path, root, self._settings.max_output_bytes), body)

    async def publish(self, staged: str, final: str) -> None:
        source, source_root = _parse(staged, self._settings.output_directories, "written")
        target, root = _parse(final, self._settings.output_directories, "written")
        await self._threads.run(_publish, staged, (source, source_root), final, (target, root))

    async def delete(self, url: str) -> None:
        path, root = _parse(url, self._settings.output_directories, "written")
        await self._threads.run(_delete, url, path, root)

    async def close(self) -> None:
        await self._threads.close()


def _parse(url: str, roots: tuple[str, ...], verb: str) -> tuple[Path, Path]:
    """The path that a URL names, and the configured directory that it lies below; as text, links not followed."""
    parts = urlsplit(url)  # which takes a line's end away unasked
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise LocationRefused("a file's location must be file:///a/path, without a host, ? or #; quote those in names")
    if (
        not url.isprintable()
        or not path.isprintable()
        or any(part in (".", "..") for part in path.split("/"))
        or path.endswith("/")
    ):
        raise LocationRefused("a file's location must name a file, without /../ or unprintable characters")
    for root in roots:
        if Path(path).is_relative_to(root) and Path(path) != Path(root):
            return Path(path), Path(root)
    raise LocationRefused(
        f"file:// locations are {verb} only below the directories that an operator names "
        f"(objects.{'input' if verb == 'read' else 'output'}_directories)"
    )


def _resolve(path: Path, root: Path) -> Path:
    """Where links lead to. The last part is not followed: it is opened without, or replaced."""
    folder = Path(os.path.realpath(path.parent))
    if not folder.is_relative_to(os.path.realpath(root)):
        raise LocationRefused("the file's location leads out of its directory by a link")
    return folder / path.name


class _File:
    """An open file, read from a thread."""

    def __init__(self, url: str, fd: int, size: int) -> None:
        self.size = size
        self.num_left = size
        self._url = url
        self._fd = fd
        self._lock = threading.Lock()

    def read(self) -> bytes:
        with self._lock, _translated(self._url):
            data = os.read(self._fd, min(PIECE_BYTES, self.num_left))
        if not data:
            raise ObjectUnavailable(f"{self._url} became shorter while it was read")
        self.num_left -= len(data)
        return data

    def close(self) -> None:
        """Waits for a read that is going on; one that comes later fails, whoever has got the number by then."""
        with self._lock:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _open_file(url: str, path: Path, root: Path, max_bytes: int) -> _File:
    with _translated(url):
        real = _resolve(path, root)
        # O_NONBLOCK: a named pipe would hold the thread until somebody writes.
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise LocationRefused(f"{url} is not a file")
        if found.st_size > max_bytes:
            raise TooLarge(f"{url} has {found.st_size} bytes, more than {max_bytes}")
        return _File(url, fd, found.st_size)
    except BaseException:
        os.close(fd)
        raise


class _Writer:
    """A file on its way. Ends by `commit` or `discard`, whichever is first; then nothing more is written."""

    def __init__(self, url: str, path: Path, root: Path, max_bytes: int) -> None:
        self._url = url
        self._path = path
        self._root = root
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._temporary: Path | None = None
        self._is_over = False
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        with self._lock, _translated(self._url):
            if self._is_over:
                return
            self._num_bytes += len(data)
            if self._num_bytes > self._max_bytes:
                raise TooLarge(f"the result has more than {self._max_bytes} bytes")
            if self._fd is None:
                real = _make_folder(self._path, self._root)
                self._temporary = real.with_name(f".{uuid4().hex}.part")
                self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]

    def commit(self) -> int:
        """Durable, then whole under its name; the number of bytes."""
        with self._lock, _translated(self._url):
            if self._is_over or self._fd is None or self._temporary is None:
                raise ObjectUnavailable(f"{self._url} was given up before it was whole")
            os.fsync(self._fd)
            os.replace(self._temporary, self._temporary.with_name(self._path.name))
            self._is_over = True
            _sync_folder(self._temporary.parent)
            return self._num_bytes

    def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            if not self._is_over and self._temporary is not None:
                with suppress(FileNotFoundError):
                    self._temporary.unlink()
            self._is_over = True


def _write_whole(writer: _Writer, body: bytes) -> None:
    try:
        writer.write(body)
        writer.commit()
    finally:
        writer.discard()


def _publish(staged: str, source: tuple[Path, Path], final: str, target: tuple[Path, Path]) -> None:
    with _translated(final):
        real_source, real_target = _resolve(*source), _make_folder(*target)
        try:
            os.replace(real_source, real_target)
        except OSError as exc:
            if not os.path.lexists(real_source):
                if real_target.exists():  # somebody else was faster, or we were, before a crash
                    return
                raise ObjectMissing(f"neither {staged} nor {final} is there") from None
            if exc.errno == errno.EXDEV:
                raise LocationRefused(f"{staged} and {final} must be on one file system") from exc
            raise
        _sync_folder(real_target.parent)
        _sync_folder(real_source.parent)


def _delete(url: str, path: Path, root: Path) -> None:
    with _translated(url), suppress(FileNotFoundError):
        _resolve(path, root).unlink()


def _make_folder(path: Path, root: Path) -> Path:
    """The path with its folders there, durably; links followed and judged before anything is made."""
    real = _resolve(path, root)
    missing = [folder for folder in (real.parent, *real.parent.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)
    return real


def _sync_folder(folder: Path) -> None:
    """A new name is durable only when its folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """The system's errors as ours."""
    try:
        yield
    except ObjectError:
        raise
    except FileNotFoundError as exc:
        raise ObjectMissing(f"there is no {url}") from exc
    except OSError as exc:
        if exc.errno in _DENIED:
            raise ObjectDenied(f"{url} may not be read or written by this process") from exc
        if exc.errno in _NO_FILE:
            raise LocationRefused(f"{url} cannot be a file here ({exc.strerror})") from exc
        words = "there is no room left" if exc.errno in _FULL else str(exc.strerror)
        logger.warning("object store failed url=%s error=%s", url, exc.strerror)
        raise ObjectUnavailable(f"{url} cannot be read or written now: {words}") from exc

"""Objects as files of this machine.

An object is written to a temporary file in its directory, synced, then linked to its name, so that readers see it whole
or not at all. A link, unlike a rename, never replaces another file. A URL is checked as text, and again after symbolic
links are resolved: both paths must be below a configured directory. Metadata is not kept.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from torchmoor.async_inference.objects.object_store import (
    NO_METADATA,
    Download,
    LocationRefused,
    ObjectConflict,
    ObjectDenied,
    ObjectError,
    ObjectMetadata,
    ObjectMissing,
    ObjectStore,
    ObjectTooLarge,
    ObjectUnavailable,
    check_output_bytes,
    join_chunks,
)
from torchmoor.async_inference.objects.results_budget import ResultsBudget, unfinished_name
from torchmoor.async_inference.objects.threads import Threads
from torchmoor.config.group import MIB
from torchmoor.config.objects import ObjectSettings
from torchmoor.wire.disk_sync import sync_to_disk

MAX_NAME_BYTES = 255  # of Linux's file systems
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
NOT_A_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EOPNOTSUPP)  # the last: no hard links


class DirectoryStore(ObjectStore):
    """Serves file:// URLs below the configured directories."""

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._budget = ResultsBudget(settings)
        self._threads = Threads("objects-file", settings.max_in_flight)

    def check_input(self, url: str) -> None:
        self._input(url)

    def check_output(self, url: str) -> None:
        self._output(url)

    def _input(self, url: str) -> _Location:
        return _parse(url, self._settings.input_directories, "read")

    def _output(self, url: str) -> _Location:
        return _parse(url, self._settings.output_directories, "written")

    async def open(self, url: str) -> Download:
        opening = self._threads.submit(_open_file, self._input(url), self._settings.max_input_bytes)
        try:
            file = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        return Download(file.size, NO_METADATA, self._read(file), lambda: self._threads.submit(file.close))

    async def _read(self, file: _OpenFile) -> AsyncIterator[bytes]:
        while file.num_left:
            yield await self._threads.run(file.read)

    async def is_taken(self, url: str) -> bool:
        return await self._threads.run(_is_taken, self._output(url))

    async def find_shortage(self, url: str) -> str | None:
        return await self._threads.run(self._budget.find_shortage, self._output(url).root)

    async def sweep(self) -> int:
        await self._threads.run(self._budget.sweep)
        return self._budget.used_bytes

    async def upload(self, url: str, chunks: AsyncIterator[bytes], metadata: ObjectMetadata = NO_METADATA) -> str:
        location, num_bytes = self._output(url), 0
        writer = _FileWriter(location)
        try:
            async for block in join_chunks(chunks, MIB, self._settings.max_output_bytes):
                await self._threads.run(writer.write, block)
                num_bytes += len(block)
            tag = await self._threads.run(writer.commit)
            if tag is None:
                raise ObjectConflict(url)
            self._budget.add(location.root, num_bytes)
            return tag
        except Exception:
            await self._threads.run(writer.abort)  # so that its room is free when the caller learns of the failure
            raise
        except asyncio.CancelledError:
            self._threads.submit(writer.abort)
            raise
        finally:
            self._threads.submit(writer.discard)

    async def put(self, url: str, body: bytes, metadata: ObjectMetadata = NO_METADATA) -> None:
        location = self._output(url)
        check_output_bytes(len(body), self._settings.max_output_bytes)
        await self._threads.run(_put, location, body)
        self._budget.add(location.root, len(body))

    async def publish(self, staged: str, tag: str, final: str) -> None:
        await self._threads.run(_publish, self._output(staged), tag, self._output(final))

    async def delete(self, url: str) -> None:
        await self._threads.run(_delete, self._output(url))

    async def delete_all(self, prefix: str) -> None:
        await self._threads.run(_delete_all, self._output(prefix))

    async def close(self) -> None:
        self._budget.stop()
        await self._threads.close()


@dataclass(frozen=True, slots=True)
class _Location:
    """A checked URL: its path as text, and the configured directory that contains it."""

    url: str
    path: Path
    root: Path

    def resolve(self) -> Path:
        """Follow symbolic links, except in the path's last part, which is opened with O_NOFOLLOW, or created."""
        folder = Path(os.path.realpath(self.path.parent))
        if not folder.is_relative_to(os.path.realpath(self.root)):
            raise LocationRefused("the file's location leads out of its directory by a link")
        return folder / self.path.name

    def make_folder(self) -> Path:
        """Create the missing folders durably, and return the resolved path. The path is checked first."""
        path = self.resolve()
        missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            sync_to_disk(folder.parent)
        return path

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise the system's errors as ObjectError."""
        try:
            yield
        except ObjectError:
            raise
        except FileNotFoundError as exc:
            raise ObjectMissing(f"there is no {self.url}") from exc
        except OSError as exc:
            if exc.errno in DENIED:
                raise ObjectDenied(f"{self.url} may not be read or written by this process") from exc
            if exc.errno in NOT_A_FILE:
                raise LocationRefused(f"{self.url} cannot be used as a file ({exc.strerror})") from exc
            words = "there is no room left" if exc.errno in FULL else str(exc.strerror)
            raise ObjectUnavailable(f"{self.url} cannot be read or written now: {words}") from exc


def _parse(url: str, roots: tuple[str, ...], verb: str) -> _Location:
    """Check a URL as text, without resolving links. Raises LocationRefused."""
    parts = urlsplit(url)  # strips a line break silently, so `url` itself is checked below
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
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.split("/")):
        raise LocationRefused(f"each name in a file's location may have {MAX_NAME_BYTES} bytes at most")
    for root in roots:
        if Path(path).is_relative_to(root) and Path(path) != Path(root):
            return _Location(url, Path(path), Path(root))
    raise LocationRefused(
        f"file:// locations are {verb} only below the directories that an operator names "
        f"(objects.{'input' if verb == 'read' else 'output'}_directories)"
    )


class _OpenFile:
    """A file that threads read."""

    def __init__(self, location: _Location, fd: int, size: int) -> None:
        self.size = size
        self.num_left = size
        self._location = location
        self._fd = fd
        self._lock = threading.Lock()

    def read(self) -> bytes:
        with self._lock, self._location.translated():
            data = os.read(self._fd, min(MIB, self.num_left))
        if not data:
            raise ObjectUnavailable(f"{self._location.url} became shorter while it was read")
        self.num_left -= len(data)
        return data

    def close(self) -> None:
        """Close the file after a running read. A later read fails, even if the descriptor is in use again."""
        with self._lock:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _open_file(location: _Location, max_bytes: int) -> _OpenFile:
    with location.translated():
        # O_NONBLOCK: opening a named pipe would block the thread until a writer comes.
        fd = os.open(location.resolve(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise LocationRefused(f"{location.url} is not a file")
        if found.st_size > max_bytes:
            raise ObjectTooLarge(f"{location.url} has {found.st_size} bytes, more than {max_bytes}")
        return _OpenFile(location, fd, found.st_size)
    except BaseException:
        os.close(fd)
        raise


def _close_opened(opening: Future[_OpenFile]) -> None:
    """Close a file that was opened after its caller was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class _FileWriter:
    """A temporary file, until `discard`. Later writes do nothing."""

    def __init__(self, location: _Location) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._temporary: Path | None = None
        self._final: Path | None = None
        self._is_over = False

    def write(self, data: bytes) -> None:
        with self._lock, self._location.translated():
            if self._is_over:
                return
            if self._fd is None:
                temporary = self._location.make_folder().with_name(unfinished_name())
                self._fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                self._temporary = temporary
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]

    def commit(self) -> str | None:
        """Sync the file and give it its name. Returns its tag; None if the name is taken."""
        with self._lock, self._location.translated():
            fd, temporary = self._fd, self._temporary
            if fd is None or temporary is None:
                raise ObjectUnavailable(f"{self._location.url}: the upload was aborted")
            os.fsync(fd)
            final = temporary.with_name(self._location.path.name)
            try:
                os.link(temporary, final, follow_symlinks=False)
            except FileExistsError:
                return None
            self._final = final
            temporary.unlink()
            self._temporary = None
            sync_to_disk(temporary.parent)
            return _tag(os.fstat(fd))

    def discard(self) -> None:
        """Remove the temporary name. Later calls do nothing."""
        with self._lock:
            self._is_over = True
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            if self._temporary is not None:
                with suppress(FileNotFoundError):
                    self._temporary.unlink()
                self._temporary = None

    def abort(self) -> None:
        """Remove the file, also by the name that `commit` has given it; a file that had the name before stays."""
        self.discard()
        if self._final is not None:
            with suppress(FileNotFoundError):
                self._final.unlink()


def _put(location: _Location, body: bytes) -> None:
    writer = _FileWriter(location)
    try:
        writer.write(body)
        if writer.commit() is None:
            with location.translated():
                _check_written(location, body)
    finally:
        writer.discard()


def _find_file(path: Path) -> os.stat_result:
    """Return the status of anything but a directory. Raises OSError."""
    found = os.lstat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return found


def _check_written(location: _Location, body: bytes) -> None:
    """Raise ObjectConflict unless the file has these bytes."""
    path = location.resolve()
    found = _find_file(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size != len(body) or path.read_bytes() != body:
        raise ObjectConflict(location.url)


def _publish(staged: _Location, tag: str, final: _Location) -> None:
    with final.translated():
        source, target = staged.resolve(), final.make_folder()
        try:
            os.link(source, target, follow_symlinks=False)
        except FileNotFoundError:
            if not os.path.lexists(target):
                raise ObjectMissing(f"neither {staged.url} nor {final.url} is there") from None
            _check_published(final, target, tag)
            return
        except FileExistsError:
            _check_published(final, target, tag)
        except OSError as exc:
            if exc.errno == errno.EXDEV:
                raise LocationRefused(f"{staged.url} and {final.url} must be on one file system") from exc
            raise
        sync_to_disk(target.parent)


def _check_published(final: _Location, target: Path, tag: str) -> None:
    """Raise ObjectConflict unless the file is the one that was staged."""
    found = _find_file(target)
    if _tag(found) != tag:
        raise ObjectConflict(final.url)


def _tag(found: os.stat_result) -> str:
    """Return a file's identity. A later file may get its inode number, but not its time of modification as well."""
    return f"{found.st_ino}.{found.st_mtime_ns}"


def _is_taken(location: _Location) -> bool:
    with location.translated():
        path = location.resolve()
        return os.path.lexists(path) or any(folder.exists() and not folder.is_dir() for folder in path.parents)


def _delete(location: _Location) -> None:
    with location.translated(), suppress(FileNotFoundError):
        location.resolve().unlink()


def _delete_all(prefix: _Location) -> None:
    with prefix.translated(), suppress(FileNotFoundError):
        beginning = prefix.resolve()
        for file in beginning.parent.iterdir():
            if file.name.startswith(beginning.name):
                file.unlink(missing_ok=True)

"""Images of a directory of journals: one file for all sessions of an owner.

    {root}/pictures/{owner}/{hash}

A session's image is a hard link to this file, so the session keeps it even if the file is deleted, and the number of
links shows whether another session has the image. The worker that ends the last session deletes the file; after a
killed worker, the next full sweep does.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from handlers.journal import directory_files as files
from handlers.journal.event import DamagedRecord
from handlers.journal.journal import check_owner, is_image_name

PICTURES = "pictures"
MAX_ATTEMPTS = 5  # attempts to link an image whose file is deleted at the same moment


class DirectorySharedImages:
    """Safe for all threads, and for all processes that share the directory. root: the journals' directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / PICTURES

    def link(self, owner: str, path: Path, data: bytes) -> int:
        """Create an image of its owner at this path. Return the bytes written; 0 if the owner already has the image.

        Sync the path's folder afterwards. Raises FileNotFoundError if that is gone.
        """
        shared = self._folder / check_owner(owner) / path.name
        num_written = 0
        for _ in range(MAX_ATTEMPTS):
            write = files.replace
            try:
                if _is_equal(shared, data):
                    os.link(shared, path, follow_symlinks=False)
                    return num_written
            except FileExistsError:  # another request for this session was faster
                return num_written
            except FileNotFoundError:
                if not path.parent.is_dir():
                    raise
                write = files.create
            except OSError as exc:
                if exc.errno != errno.EMLINK:  # a file system limits the links to one file
                    raise
            files.make_folder(shared.parent, parents=True)
            with suppress(FileNotFoundError, FileExistsError):  # swept, or damaged, at this moment
                if write(shared, data):
                    num_written = files.size_of_new(len(data))
        raise OSError("an image of the journal cannot be linked: other workers delete it each time")

    def release(self, owner: str, name: str) -> int:
        """Delete the owner's image if no session has it. Return the freed bytes."""
        shared = self._folder / owner / name
        with suppress(FileNotFoundError):
            if shared.lstat().st_nlink == 1:
                return files.remove(shared)
        return 0

    def sweep(self) -> None:
        """Delete the images that no session has, temporary files whose writers are gone, and empty folders."""
        for folder in _entries(self._folder):
            for file in _entries(Path(folder)):
                with suppress(FileNotFoundError):  # another worker sweeps, too
                    info = file.stat(follow_symlinks=False)
                    if is_image_name(file.name) and info.st_nlink == 1:
                        os.unlink(file)
                    else:
                        files.remove_abandoned(self._root, file, info)
            with suppress(OSError):  # not empty
                os.rmdir(folder)


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries


def _is_equal(path: Path, data: bytes) -> bool:
    """Return True if the file has this content. Raises FileNotFoundError."""
    try:
        return files.read_beginning(path, len(data) + 1) == data
    except DamagedRecord:
        return False

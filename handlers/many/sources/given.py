"""Models loaded by name and URL, as SageMaker's platform loads them, in addition to another source."""

from collections.abc import Sequence
from pathlib import Path

from handlers.errors import ModelUnknown
from handlers.many.sources.directory import find_in
from handlers.many.sources.source import Find, SourceModel

MAX_GIVEN = 10_000
FILE_URL = "file://"


class GivenSource:
    """find: looks up every other model. roots: directories; only paths below one of them can be given."""

    def __init__(self, find: Find, roots: Sequence[str], max_files: int) -> None:
        self._find = find
        self._roots = [Path(root).resolve() for root in roots]
        self._max_files = max_files
        self._given: dict[str, Path] = {}

    def give(self, name: str, url: str) -> None:
        """Register a name for the URL's content. Raises ModelUnknown if the URL is not allowed."""
        try:
            path = Path(url.removeprefix(FILE_URL)).resolve()
            if not any(path.is_relative_to(root) for root in self._roots):
                raise ModelUnknown("the url must be a path below one of the directories in handler.many.url_roots")
            if not path.exists():
                raise ModelUnknown("there is nothing at the url")
        except (OSError, ValueError, RuntimeError) as exc:  # no file's name, an unreadable folder, a link to itself
            raise ModelUnknown("the url is not a path that can be read") from exc
        if len(self._given) >= MAX_GIVEN and name not in self._given:
            raise ModelUnknown(f"{MAX_GIVEN} models have been given by url; unload some")
        self._given[name] = path

    def forget(self, name: str) -> None:
        self._given.pop(name, None)

    def find(self, name: str) -> SourceModel:
        path = self._given.get(name)
        return self._find(name) if path is None else find_in(path, name, self._max_files)

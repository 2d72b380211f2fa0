"""Where `torchmoor up` keeps asynchronous requests, their inputs and their results: one folder, and no service."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from torchmoor.config.asynchronous import AsyncInferenceSettings
from torchmoor.config.objects import ObjectSettings


class AsyncFolder:
    """queue.db, inputs/ that clients may name as file://, and results/."""

    def __init__(self, path: Path, report: Callable[[str], None], *, more_inputs: Sequence[Path] = ()) -> None:
        self.path = path
        self._report = report
        self._inputs, self._results = path / "inputs", path / "results"
        self._more_inputs = more_inputs

    @property
    def inference(self) -> AsyncInferenceSettings:
        """The queue, and the place of results."""
        return AsyncInferenceSettings(
            queue=f"sqlite://{quote(str(self.path / 'queue.db'))}", output_root=self._results.as_uri()
        )

    @property
    def objects(self) -> ObjectSettings:
        """What may be read and written."""
        return ObjectSettings(
            input_directories=tuple(str(folder) for folder in (self._inputs, *self._more_inputs)),
            output_directories=(str(self._results),),
        )

    async def __aenter__(self) -> AsyncFolder:
        self._inputs.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)  # for nobody but this user
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What holds something stays; else it goes, with the folder around it if nothing else is there."""
        if self._results.exists() or any(self._inputs.iterdir()) or self._has_requests():
            self._report(f"asynchronous requests and results stay in {self.path}")
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def _has_requests(self) -> bool:
        database = self.path / "queue.db"
        if not database.exists():
            return False
        with closing(sqlite3.connect(database)) as connection:
            try:
                return connection.execute("SELECT 1 FROM requests LIMIT 1").fetchone() is not None
            except sqlite3.Error:  # whatever it is, it is not ours to remove
                return True

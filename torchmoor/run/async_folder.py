"""The folder in which `torchmoor up` keeps asynchronous requests, their inputs and their results."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from torchmoor.config.async_inference import AsyncInferenceSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.errors import ConfigError


class AsyncFolder:
    """A folder with queue.db, inputs/ that clients may name as file://, and results/ unless output_root is set."""

    def __init__(
        self,
        path: Path,
        report: Callable[[str], None],
        *,
        more_inputs: Sequence[Path | str] = (),
        output_root: str = "",
    ) -> None:
        self.path = path
        self._output_root = output_root
        self._report = report
        self._inputs, self._results = path / "inputs", path / "results"
        self._more_inputs = [Path(folder).resolve() for folder in more_inputs]

    @property
    def inference(self) -> AsyncInferenceSettings:
        """The queue, and where results are stored."""
        return AsyncInferenceSettings(
            queue=f"sqlite://{quote(str(self.path / 'queue.db'))}",
            output_root=self._output_root or self._results.as_uri(),
        )

    @property
    def objects(self) -> ObjectSettings:
        """The directories that inputs are read from and results are written to."""
        return ObjectSettings(
            input_directories=tuple(str(folder) for folder in (self._inputs, *self._more_inputs)),
            output_directories=(str(self._results),),
        )

    async def __aenter__(self) -> AsyncFolder:
        try:
            self._inputs.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"cannot write to the directory {self.path}: {error.strerror or error}") from error
        return self

    async def __aexit__(self, *error: object) -> None:
        """Keep the folder if it holds requests or results; else remove it, and its parent if that is empty."""
        has_inputs = self._inputs.is_dir() and any(self._inputs.iterdir())
        if self._results.exists() or has_inputs or self._has_requests():
            self._report(f"asynchronous requests and results stay in {self.path}")
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def _has_requests(self) -> bool:
        database = self.path / "queue.db"
        if not database.exists():
            return False
        try:
            with closing(sqlite3.connect(database)) as connection:
                return connection.execute("SELECT 1 FROM requests LIMIT 1").fetchone() is not None
        except sqlite3.Error:  # an unknown file stays
            return True

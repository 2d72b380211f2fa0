"""The entry file of the archive of many models. TorchServe requires exactly one class here."""

from collections.abc import Callable
from typing import Any

from handlers.torchserve.entry import WorkerEntry


class ManyHandler(WorkerEntry):
    """Serves many models."""

    def import_start(self) -> Callable[..., Any]:
        from handlers.torchserve.start_many import start_many

        return start_many

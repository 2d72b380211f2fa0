"""The entry file of the chat archives. TorchServe requires exactly one class here."""

from collections.abc import Callable
from typing import Any

from handlers.torchserve.entry import WorkerEntry


class ChatHandler(WorkerEntry):
    """Serves one checkpoint."""

    def import_start(self) -> Callable[..., Any]:
        from handlers.torchserve.start_chat import start_chat

        return start_chat

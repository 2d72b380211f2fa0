"""Adapters in the form that vLLM reads: requests that name a folder."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm.lora.request import LoRARequest

from handlers.models.lora import CONFIG, WEIGHTS, AdapterFiles


class VllmAdapter:
    """Implements `Adapter`. vLLM may read the files again at any time, so they lie in a folder of their own.

    number: distinguishes it from all others of the engine. on_drop: called with the request.
    """

    def __init__(self, files: AdapterFiles, number: int, on_drop: Callable[[LoRARequest], None]) -> None:
        self.version = files.version
        self.num_bytes = len(files.weights)
        self._folder = TemporaryDirectory(prefix="torchmoor-adapter-")
        (Path(self._folder.name) / CONFIG).write_bytes(files.config)
        (Path(self._folder.name) / WEIGHTS).write_bytes(files.weights)
        self.request = LoRARequest(f"{self.version}-{number}", number, self._folder.name)
        self._on_drop = on_drop

    def drop(self) -> None:
        self._on_drop(self.request)
        self.forget()

    def forget(self) -> None:
        """Delete the files."""
        self.num_bytes = 0
        self._folder.cleanup()

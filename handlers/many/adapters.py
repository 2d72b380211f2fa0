"""The adapters of a chat worker: found, loaded and evicted as the models of a worker of many models are."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from handlers.chat.adapters import AdapterLease
from handlers.engine.contract import Adapter, ChatEngine
from handlers.errors import HandlerError
from handlers.many.metrics import count_memory
from handlers.many.model import Cancel, LoadProgress, ModelLease
from handlers.many.operations import manage_models
from handlers.many.residency.registry import ModelRegistry, open_registry
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from handlers.settings.handler import HandlerSettings
from torchmoor.wire import headers as wire
from torchmoor.wire import operations

Start = Callable[[Incoming, PendingReply], None]
SOURCE = "handler.adapters.source"


class ResidentAdapter:
    """Implements `ResidentModel`. An adapter that leaves the device is dropped, not moved to the host: it is small."""

    host_bytes = mapped_bytes = 0

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    @property
    def device_bytes(self) -> int:
        return self.adapter.num_bytes

    def to_host(self) -> None: ...

    def to_device(self) -> None: ...

    def close(self) -> None:
        self.adapter.drop()


class LeasedAdapter:
    """Implements `AdapterLease`."""

    def __init__(self, lease: ModelLease) -> None:
        self._lease = lease
        self.adapter = cast(ResidentAdapter, lease.model).adapter  # the store loads no others
        self.found = lease.found
        self.load_s = lease.load_s

    def release(self) -> None:
        self._lease.release()


class AdapterStore:
    """Implements `Adapters`."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self.counters = registry.counters

    def acquire(
        self, name: str, on_ready: Callable[[AdapterLease], None], on_failed: Callable[[HandlerError], None]
    ) -> Cancel:
        return self._registry.acquire(name, lambda lease: on_ready(LeasedAdapter(lease)), on_failed)

    def status(self) -> Mapping[str, Any]:
        return self._registry.status()

    def numbers(self) -> Mapping[str, Any]:
        """Return the numbers of the metrics. Any thread."""
        return count_memory(self.counters, self._registry.status())

    def before(self, start: Start) -> Start:
        """Answer the operation `models`, and pass all other requests to the chat service's `start`."""

        def begin(incoming: Incoming, reply: PendingReply) -> None:
            if incoming.headers.get(wire.OPERATION) != operations.MODELS:
                start(incoming, reply)
                return
            with reply.guarded():
                manage_models(self._registry, incoming, reply)

        return begin

    def close(self) -> None:
        self._registry.close()


def open_adapters(settings: HandlerSettings, worker_dir: Path, engine: ChatEngine) -> AdapterStore | None:
    """Make the store that the settings name, if they name one. Raises SettingsError."""
    if not settings.adapters.source:
        return None
    own = {"source": settings.adapters.source, "device_bytes": settings.adapters.max_bytes}
    many = settings.many.model_copy(update=own)

    def load(folder: Path, progress: LoadProgress) -> ResidentAdapter:
        return ResidentAdapter(engine.load_adapter(folder))

    one_memory = torch.device("cpu")  # so that adapters never move to the host
    return AdapterStore(open_registry(many, worker_dir, load, one_memory, SOURCE))

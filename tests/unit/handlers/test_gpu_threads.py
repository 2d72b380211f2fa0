"""Threads that share a GPU, with stand-ins for torch's calls: each uses its own GPU, and one at a time captures."""

import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handlers.engine.builtin.row_steps import RowSteps
from handlers.errors import HandlerError
from handlers.many.compute import Compute, RowQueue, TaskRow
from handlers.many.model import LoadProgress, ModelLease
from handlers.many.residency.registry import open_registry
from handlers.settings.many import ManySettings
from handlers.settings.tasks import TaskSettings
from handlers.worker.device import capture_lock
from handlers.worker.process_memory import release_memory

GPU = torch.device("cuda:1")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.device]:
    """Return the GPU that each thread has chosen."""
    found: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.__setitem__(threading.get_ident(), device))
    return found


def test_models_are_loaded_and_closed_on_the_workers_gpu(tmp_path: Path, chosen: dict[int, torch.device]) -> None:
    """A thread's current GPU is the first one unless it chooses another: kernels of a load would be launched there."""
    used: list[torch.device | None] = []

    class GpuModel:
        device_bytes, host_bytes, mapped_bytes = 10, 0, 0

        def __init__(self, folder: Path, progress: LoadProgress) -> None:
            used.append(chosen.get(threading.get_ident()))

        def close(self) -> None:
            used.append(chosen.get(threading.get_ident()))

    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "models" / "a" / "config.json").write_text("{}")
    settings = ManySettings(source=str(tmp_path / "models"), cache_dir=str(tmp_path / "cache"), device_bytes=100)
    load: Any = GpuModel
    registry = open_registry(settings, tmp_path, load, GPU)
    heard: SimpleQueue[ModelLease | HandlerError] = SimpleQueue()
    registry.acquire("a", heard.put, heard.put)
    lease = heard.get(timeout=60)

    lease.release()
    registry.close()

    assert used == [GPU, GPU]


def test_batches_are_computed_on_the_workers_gpu(chosen: dict[int, torch.device]) -> None:
    used: SimpleQueue[torch.device | None] = SimpleQueue()
    compute = Compute(TaskSettings(), GPU)

    def run(rows: Any) -> list[int]:
        used.put(chosen.get(threading.get_ident()))
        return [1]

    compute.put(RowQueue(run), [TaskRow("a", 1, None, lambda: True, lambda outcome: None)])
    compute.start()

    assert used.get(timeout=60) == GPU
    compute.stop()


def test_one_thread_at_a_time_captures_graphs_or_frees_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that load at the same time would break each other's capture, and so would one that is closed."""
    held: list[tuple[str, bool]] = []

    def note(name: str) -> None:
        held.append((name, capture_lock.locked()))

    def refuse(*streams: Any) -> None:
        raise RuntimeError("the model waits for the device")

    pool: Any = SimpleNamespace(shape=SimpleNamespace(device=GPU))
    model: Any = SimpleNamespace(max_context=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *args, **options: None)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: note("capture"))
        patch.setattr(torch.cuda, "current_stream", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=refuse))
        patch.setattr(torch.cuda, "set_stream", lambda stream: None)
        patch.setattr(torch.cuda, "synchronize", lambda: note("wait"))
        patch.setattr("handlers.engine.builtin.row_steps.BlockTable", lambda *args: None)
        RowSteps(model, pool, 1, has_graphs=True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: note("free"))
    release_memory(GPU)

    assert held == [("capture", True), ("wait", True), ("free", True)]
    assert not capture_lock.locked()

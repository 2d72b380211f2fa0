"""The registry with threads, real files and a tiny model: concurrency, replaced models, measured memory."""

import gc
import io
import json
import random
import subprocess
import sys
import tarfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from handlers.errors import (
    HandlerError,
    LoadTimedOut,
    ModelBroken,
    ModelLoaded,
    ModelLoading,
    ModelUnknown,
    OutOfMemory,
    SourceUnavailable,
)
from handlers.many.model import LoadProgress, ModelLease, ResidentModel
from handlers.many.residency.registry import ModelRegistry, open_registry
from handlers.settings.many import ManySettings
from tests.waiting import PROGRAM_S, wait_until

MIB = 1 << 20
CPU = torch.device("cpu")
Open = Callable[..., ModelRegistry]


class TinyModel:
    """A model that returns its file's content and allocates a requested amount of memory."""

    host_bytes = 0
    mapped_bytes = 0

    def __init__(self, folder: Path) -> None:
        self.text = (folder / "model.safetensors").read_text()
        self.device_bytes = len(self.text)
        self.is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def start(self, incoming: Any, reply: Any) -> None:
        raise NotImplementedError

    def to_host(self) -> None:
        raise NotImplementedError

    def to_device(self) -> None:
        raise NotImplementedError


def load_tiny(folder: Path, progress: LoadProgress) -> ResidentModel:
    progress.begin("load", 1)
    if (folder / "config.json").read_text() != "{}":
        raise ValueError("its config.json is of no use")
    return TinyModel(folder)


def put(root: Path, name: str, text: str, config: str = "{}") -> None:
    """Move an archive into the models' directory in one step."""
    with tarfile.open(root / ".new", "w:gz", compresslevel=1) as tar:
        for path, content in (("config.json", config), ("model.safetensors", text)):
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    (root / ".new").rename(root / name)


def ask(registry: ModelRegistry, name: str) -> ModelLease:
    """Wait for a lease. Raises the request's error."""
    heard: SimpleQueue[ModelLease | HandlerError] = SimpleQueue()
    registry.acquire(name, heard.put, heard.put)
    answer = heard.get(timeout=60)
    if isinstance(answer, HandlerError):
        raise answer
    return answer


def text_of(lease: ModelLease) -> str:
    assert not lease.model.is_closed
    return lease.model.text


def done(operation: Callable[..., None], *arguments: Any) -> None:
    """Wait for an operation. Raises its error."""
    heard: SimpleQueue[HandlerError | None] = SimpleQueue()
    operation(*arguments, heard.put)
    error = heard.get(timeout=60)
    if error is not None:
        raise error


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Iterator[Open]:
    """Start registries over the directory; at the end their counts are right and no model is in memory."""
    opened: list[ModelRegistry] = []

    def start(load: Callable[[Path, LoadProgress], ResidentModel] = load_tiny, **limits: Any) -> ModelRegistry:
        defaults = {"device_bytes": 1000, "refresh_s": 1000.0, "cache_dir": str(tmp_path / "cache")}
        settings = ManySettings(**{"source": str(root), **defaults, **limits})
        opened.append(open_registry(settings, tmp_path, load, CPU))
        return opened[-1]

    yield start
    for registry in opened:
        registry.close()
        registry.check_integrity()
        status = registry.status()
        assert [each["name"] for each in status["models"] if each["tier"] != "disk" and each["tier"] != "broken"] == []
        assert status["budgets"]["device"]["used"] == 0


def test_many_clients_of_many_models_each_get_the_right_one(root: Path, start: Open) -> None:
    """Zipf traffic with memory for a few models gets right answers, with replaced, missing and broken models."""
    for number in range(24):
        put(root, f"m{number}.tar.gz", f"m{number} v0".ljust(100))
    (root / "cut.tar.gz").write_bytes((root / "m0.tar.gz").read_bytes()[:60])
    put(root, "bad.tar.gz", "bad", config="[]")
    registry = start(device_bytes=700, disk_bytes=2000, refresh_s=0.02, broken_s=0.01)
    versions = [0] * 24
    names = [f"m{number}.tar.gz" for number in range(24)]

    def client(seed: int) -> int:
        chance = random.Random(seed)
        num_right = 0
        for _ in range(150):
            if chance.random() < 0.1:
                with pytest.raises((ModelUnknown, ModelBroken)):
                    ask(registry, chance.choice(["cut.tar.gz", "bad.tar.gz", "none.tar.gz"]))
                continue
            number = min(int(chance.paretovariate(0.7)) - 1, 23)
            if chance.random() < 0.05:
                cancel = registry.acquire(names[number], lambda lease: lease.release(), lambda error: None)
                cancel()
            lease = ask(registry, names[number])
            assert text_of(lease).split()[0] == f"m{number}"
            lease.release()
            num_right += 1
        return num_right

    stop = threading.Event()

    def operator() -> None:
        chance = random.Random(99)
        while not stop.is_set():
            number = chance.randrange(24)
            put(root, names[number], f"m{number} v{versions[number] + 1}".ljust(100))
            versions[number] += 1
            with suppress(ModelUnknown):
                done(registry.unload, names[chance.randrange(24)])
            registry.check_integrity()
            used = registry.status()["budgets"]
            assert used["device"]["used"] <= 700
            assert used["disk"]["used"] <= 2000

    with ThreadPoolExecutor(9) as pool:
        operating = pool.submit(operator)
        clients = [pool.submit(client, seed) for seed in range(8)]
        try:
            results = [each.result() for each in clients]
        finally:
            stop.set()
        operating.result()

    assert all(num_right > 100 for num_right in results)
    registry.refresh()
    for number, version in enumerate(versions):
        lease = ask(registry, names[number])
        assert text_of(lease).split() == [f"m{number}", f"v{version}"]
        lease.release()
    assert registry.status()["counters"]["evictions"] > 0
    assert registry.status()["waiting"] == 0


def test_a_replaced_model_is_picked_up_and_a_repaired_one_forgiven(root: Path, start: Open) -> None:
    """Comparing with the source finds new versions; running requests end on the old version."""
    put(root, "m.tar.gz", "old")
    put(root, "bad.tar.gz", "bad", config="[]")
    registry = start()
    old = ask(registry, "m.tar.gz")
    with pytest.raises(ModelBroken, match=r"model 'bad\.tar\.gz' cannot be used: its config\.json is of no use"):
        ask(registry, "bad.tar.gz")

    put(root, "m.tar.gz", "new")
    put(root, "bad.tar.gz", "good")
    registry.refresh()
    new, good = ask(registry, "m.tar.gz"), ask(registry, "bad.tar.gz")

    assert (text_of(old), text_of(new), text_of(good)) == ("old", "new", "good")
    for lease in (old, new, good):
        lease.release()


def test_a_model_that_was_removed_is_unknown_after_the_next_look(root: Path, start: Open) -> None:
    """A removed model also leaves memory."""
    put(root, "m.tar.gz", "old")
    registry = start()
    ask(registry, "m.tar.gz").release()

    (root / "m.tar.gz").unlink()
    registry.refresh()

    with pytest.raises(ModelUnknown):
        ask(registry, "m.tar.gz")


@pytest.mark.parametrize("is_missing", [True, False])
def test_models_stay_while_their_directory_is_unmounted(root: Path, start: Open, is_missing: bool) -> None:
    """Models in memory are served, and others may be asked for again. A model that is then removed is unknown."""
    for name in ("m.tar.gz", "removed.tar.gz"):
        put(root, name, "text")
    registry = start()
    for name in ("m.tar.gz", "removed.tar.gz"):
        ask(registry, name).release()

    mounted = root.rename(root.with_name("mounted"))
    if not is_missing:
        root.symlink_to("/proc")  # as the mount point, a folder of another file system without the models
    registry.refresh()

    lease = ask(registry, "m.tar.gz")
    assert (lease.found, text_of(lease)) == ("hit", "text")
    lease.release()
    with pytest.raises(SourceUnavailable, match="unmounted"):
        ask(registry, "other.tar.gz")

    root.unlink(missing_ok=True)
    mounted.rename(root)
    (root / "removed.tar.gz").unlink()
    registry.refresh()

    ask(registry, "m.tar.gz").release()
    with pytest.raises(ModelUnknown):
        ask(registry, "removed.tar.gz")


def test_a_broken_model_is_not_read_for_each_request(root: Path, start: Open) -> None:
    """A broken model is loaded once; later requests get the remembered reason."""
    put(root, "bad.tar.gz", "bad")
    loads: list[Path] = []

    def load(folder: Path, progress: LoadProgress) -> ResidentModel:
        loads.append(folder)
        raise RuntimeError("something unexpected, with details")

    registry = start(load)
    for _ in range(3):
        with pytest.raises(ModelBroken, match="RuntimeError; the worker's log has more") as caught:
            ask(registry, "bad.tar.gz")

    assert len(loads) == 1
    assert "details" not in str(caught.value)
    assert [each["tier"] for each in registry.status()["models"] if "reason" in each] == ["broken"]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_a_model_without_memory_is_not_broken(error: Exception, root: Path, start: Open) -> None:
    """The next request may load it. torch has no class for a failed allocation on a CPU."""
    put(root, "large.tar.gz", "large")
    errors = [error]

    def load(folder: Path, progress: LoadProgress) -> ResidentModel:
        if errors:
            raise errors.pop()
        return load_tiny(folder, progress)

    registry = start(load)
    with pytest.raises(OutOfMemory, match="there is no memory for it"):
        ask(registry, "large.tar.gz")

    ask(registry, "large.tar.gz").release()


@pytest.mark.parametrize(
    ("make_error", "reason"),
    [
        (lambda folder: ModelBroken(f"no tokenizer in {folder}"), "no tokenizer in its folder"),
        (lambda folder: ValueError(f"{folder}/config.json has no type"), "config.json has no type"),
        (lambda folder: PermissionError(13, "Permission denied", f"{folder}/spiece.model"), "Permission denied"),
    ],
)
def test_reasons_do_not_show_the_worker_s_folders(
    make_error: Callable[[Path], Exception], reason: str, root: Path, start: Open
) -> None:
    """A client sees which file is wrong, not where the worker keeps it."""
    put(root, "bad.tar.gz", "bad")

    def load(folder: Path, progress: LoadProgress) -> ResidentModel:
        raise make_error(folder)

    registry = start(load)
    with pytest.raises(ModelBroken) as caught:
        ask(registry, "bad.tar.gz")

    assert str(caught.value) == f"model 'bad.tar.gz' cannot be used: {reason}"


class Weights:
    """Stands for what a load has read before it fails."""


@pytest.mark.parametrize("error", [ModelBroken("its shapes do not fit"), OutOfMemory("no memory"), ValueError("no")])
def test_a_failed_load_keeps_nothing_in_memory(error: Exception, root: Path, start: Open) -> None:
    """A failed load frees its memory at once, not only at the next garbage collection."""
    put(root, "bad.tar.gz", "bad")
    read: list[weakref.ref[Weights]] = []

    def load(folder: Path, progress: LoadProgress) -> ResidentModel:
        weights = Weights()
        read.append(weakref.ref(weights))
        try:
            raise KeyError("shape")
        except KeyError as exc:
            raise type(error)(*error.args) from exc

    registry = start(load)
    gc.disable()
    try:
        with pytest.raises(HandlerError):
            ask(registry, "bad.tar.gz")
        wait_until(lambda: read[0]() is None, "the failed load's memory is free")
    finally:
        gc.enable()


def test_a_load_that_fails_after_its_download_keeps_no_room_on_the_disk(
    root: Path, start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a load fails after its download, for example at its time limit, its folder can be evicted."""
    put(root, "a.tar.gz", "a" * 100)
    put(root, "b.tar.gz", "b" * 100)
    registry = start(disk_bytes=150)

    def is_over(progress: LoadProgress, stage: str, total: int) -> None:
        if stage == "room":
            raise LoadTimedOut("it takes too long")

    with monkeypatch.context() as patch:
        patch.setattr(LoadProgress, "begin", is_over)
        with pytest.raises(LoadTimedOut):
            ask(registry, "a.tar.gz")

    ask(registry, "b.tar.gz").release()


def test_a_slow_load_answers_its_requests_and_goes_on(root: Path, start: Open) -> None:
    """A request gets ModelLoading at its time limit, and a later one finds the model."""
    put(root, "m.tar.gz", "slow")
    gate = threading.Event()

    def load(folder: Path, progress: LoadProgress) -> ResidentModel:
        assert gate.wait(60)
        return load_tiny(folder, progress)

    registry = start(load, hold_s=0.05)
    with pytest.raises(ModelLoading):
        ask(registry, "m.tar.gz")
    assert registry.status()["loading"] == ["m.tar.gz"]

    gate.set()
    wait_until(lambda: registry.status()["next_to_go"] == ["m.tar.gz"], "the load is done")

    lease = ask(registry, "m.tar.gz")
    assert (lease.found, text_of(lease)) == ("hit", "slow")
    lease.release()


def test_a_link_to_nothing_among_the_weights_is_no_weight(root: Path, start: Open) -> None:
    """A link without a target counts no bytes, and the model is loaded."""
    (root / "m").mkdir()
    (root / "m" / "config.json").write_text("{}")
    (root / "m" / "model.safetensors").write_text("weights")
    (root / "m" / "old.safetensors").symlink_to("nowhere")
    lease = ask(start(), "m")

    assert text_of(lease) == "weights"
    lease.release()


def test_an_operator_loads_pins_and_unloads(root: Path, start: Open, tmp_path: Path) -> None:
    """Each of the container's operations has its own error."""
    for name in ("a", "b"):
        put(root, f"{name}.tar.gz", name * 600)
    given = tmp_path / "given" / "0a1b"
    given.mkdir(parents=True)
    (given / "config.json").write_text("{}")
    (given / "model.safetensors").write_text("given")
    registry = start(url_roots=(str(tmp_path / "given"),), pinned=("a.tar.gz",), room_timeout_s=0.1)
    wait_until(lambda: "pinned" in str(registry.status()) and _is_ready(registry, "a.tar.gz"), "a is pinned")

    with pytest.raises(OutOfMemory):
        done(registry.load, "b.tar.gz", None)
    with pytest.raises(ModelLoaded):
        done(registry.load, "a.tar.gz", None)
    with pytest.raises(ModelUnknown):
        done(registry.load, "x", "/etc")
    with pytest.raises(ModelUnknown):
        done(registry.unload, "b.tar.gz")
    done(registry.load, "0a1b", str(given))
    registry.unpin("a.tar.gz")

    def load_b() -> bool:
        try:
            done(registry.load, "b.tar.gz", None)
        except OutOfMemory:  # on a busy machine, a takes longer to leave than a load waits
            return False
        return True

    wait_until(load_b, "b is loaded in the place of a")
    lease = ask(registry, "0a1b")
    text = text_of(lease)
    lease.release()
    done(registry.unload, "0a1b")

    assert text == "given"
    assert [each["name"] for each in registry.status()["models"] if each["tier"] == "device"] == ["b.tar.gz"]
    with pytest.raises(ModelUnknown):
        ask(registry, "0a1b")


def test_without_a_source_there_are_only_given_models(start: Open, tmp_path: Path) -> None:
    """With an empty source, no directory needs to exist, as on platforms that load models themselves."""
    given = tmp_path / "given" / "0a1b"
    given.mkdir(parents=True)
    (given / "config.json").write_text("{}")
    (given / "model.safetensors").write_text("given")
    registry = start(source="", url_roots=(str(tmp_path / "given"),))

    with pytest.raises(ModelUnknown, match="has been loaded"):
        ask(registry, "m.tar.gz")
    done(registry.load, "0a1b", str(given))
    lease = ask(registry, "0a1b")
    text = text_of(lease)
    lease.release()

    assert text == "given"


def _is_ready(registry: ModelRegistry, name: str) -> bool:
    return any(each["name"] == name and each["tier"] == "device" for each in registry.status()["models"])


def test_a_restarted_worker_finds_what_it_unpacked(root: Path, start: Open) -> None:
    """The first load is cold; after a restart it comes from disk."""
    put(root, "m.tar.gz", "text")
    first = start()
    lease = ask(first, "m.tar.gz")
    cold = lease.found
    lease.release()
    first.close()

    lease = ask(start(), "m.tar.gz")
    assert (cold, lease.found) == ("cold", "disk")
    lease.release()


def test_a_worker_that_stops_tells_everybody(root: Path, start: Open) -> None:
    """Waiting requests get an error, leases stay valid, and the model is closed after its last lease."""
    put(root, "m.tar.gz", "text")
    registry = start()
    lease = ask(registry, "m.tar.gz")

    registry.close()
    text = text_of(lease)
    lease.release()

    assert text == "text"
    assert lease.model.is_closed
    with pytest.raises(HandlerError):
        ask(registry, "m.tar.gz")


def test_a_model_that_cannot_be_measured_is_closed(root: Path, start: Open) -> None:
    """It is broken, and what it holds besides memory is released."""
    put(root, "a.tar.gz", "a")
    loaded: list[TinyModel] = []

    class Unmeasured(TinyModel):
        def __getattribute__(self, name: str) -> Any:
            if name == "device_bytes":
                raise ZeroDivisionError
            return super().__getattribute__(name)

    def load(folder: Path, progress: LoadProgress) -> ResidentModel:
        loaded.append(Unmeasured(folder))
        return loaded[-1]

    registry = start(load)
    with pytest.raises(ModelBroken, match="ZeroDivisionError"):
        ask(registry, "a.tar.gz")
    wait_until(lambda: loaded[0].is_closed, "the model is closed")


MEASURE = """
import json, sys
from pathlib import Path
from queue import SimpleQueue
import torch
from handlers.many.residency.registry import open_registry
from handlers.settings.many import ManySettings

MIB = 1 << 20
SIZE = 24 * MIB

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))

class Heavy:
    host_bytes = mapped_bytes = 0
    def __init__(self):
        # Small pieces come from malloc's heaps, which return freed memory to the system only on request.
        self.pieces = [bytearray(b"x" * (32 << 10)) for _ in range(SIZE // (32 << 10))]
        self.kept = [bytearray(100) for _ in range(1000)]
        self.device_bytes = SIZE
    def close(self):
        self.pieces.clear()

root = Path(sys.argv[1])
for number in range(12):
    (root / f"m{number}").mkdir()
    (root / f"m{number}" / "config.json").write_text("{}")
settings = ManySettings(source=str(root), cache_dir=sys.argv[2], device_bytes=3 * SIZE, refresh_s=1000.0)
registry = open_registry(settings, root, lambda folder, progress: Heavy(), torch.device("cpu"))

def ask(name):
    heard = SimpleQueue()
    registry.acquire(name, lambda lease: heard.put((lease, private())), heard.put)
    lease, taken = heard.get(timeout=60)
    lease.release()
    return taken

def unload(name):
    heard = SimpleQueue()
    registry.unload(name, lambda error: heard.put((error, private())))
    error, taken = heard.get(timeout=60)
    assert error is None, error
    return taken

ask("m0")
unload("m0")
base = private()
peaks = [ask(f"m{number}") - base for number in range(12)]
after = [unload(name) - base for name in registry.status()["next_to_go"]]
registry.close()
print(json.dumps({"size": SIZE, "peaks": peaks, "after": after}))
"""


def test_evicted_memory_is_free_when_it_is_said_to_be_free(tmp_path: Path) -> None:
    """In a separate process, private bytes stay within the budget, and an unload frees them at once."""
    (tmp_path / "models").mkdir()

    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "models"), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )

    assert measured.returncode == 0, measured.stderr[-2000:]
    said = json.loads(measured.stdout)
    slack = said["size"] // 4
    assert max(said["peaks"]) <= 3 * said["size"] + slack
    assert said["peaks"][2] >= 3 * said["size"] - slack
    assert [round(taken / said["size"]) for taken in said["after"]] == [2, 1, 0]
    assert said["after"][-1] <= slack

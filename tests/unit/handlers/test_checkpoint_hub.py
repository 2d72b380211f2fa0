"""A checkpoint of the Hugging Face hub: huggingface_hub's real client against a small fake hub."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.http_servers import QuietHandler, serve_http

ROOT = Path(__file__).parents[3]
NAME = "someone/tiny"
LIMIT = 1000
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import logging, os, sys
from pathlib import Path
from handlers.errors import SettingsError
from handlers.models.checkpoint import find_checkpoint
from handlers.settings.model import ModelSettings
logging.basicConfig(level="INFO", stream=sys.stderr, format="%(message)s")
for name, max_bytes in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        settings = ModelSettings(path="hf://" + name, max_download_bytes=int(max_bytes))
        print(find_checkpoint(settings, Path("."), os.environ))
    except SettingsError as error:
        print("SettingsError:", error)
"""


@dataclass
class Hub:
    """A fake hub's files and its recorded requests."""

    files: dict[str, bytes]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    gate: threading.Event | None = None  # the second half of each file waits for it


class Handler(QuietHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer(is_head=True)

    def do_GET(self) -> None:
        self.answer(is_head=False)

    def answer(self, *, is_head: bool) -> None:
        path = urlsplit(self.path).path
        if NAME in path:  # the library requests some files of its own
            self.hub.asked.append(path)
            self.hub.tokens.add(self.headers["Authorization"])
        if path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main", f"/api/models/{NAME}/revision/v2"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.hub.files.items()]
            body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.hub.files.items()
            ]
            body = json.dumps(tree).encode()
        else:
            name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
            if name not in self.hub.files:
                self.reply(404, headers={"X-Error-Code": "RepoNotFound"})
                return
            body = self.hub.files[name]
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            half = len(body) // 2
            self.wfile.write(body[:half])
            if self.hub.gate is not None and "resolve" in path:
                self.hub.gate.wait(60)
            self.wfile.write(body[half:])


@pytest.fixture
def hub() -> Iterator[Hub]:
    needed = {"config.json": b"{}", "model.safetensors": b"w" * 100}
    made = Hub({**needed, "pytorch_model.bin": b"a pickle", "onnx/model.json": b"{}"})
    with serve_http(type("Bound", (Handler,), {"hub": made})) as made.url:
        yield made


def find(hub: Hub, home: Path, *searches: tuple[str, int], **environment: str) -> list[str]:
    """Find checkpoints in a new process, because huggingface_hub reads its environment when it is imported.

    searches: names and the limits of their bytes. Returns a line for each: its folder or error.
    """
    process = start(hub, home, *searches, **environment)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    lines = output.splitlines()
    assert len(lines) == len(searches)
    return lines


def start(hub: Hub, home: Path, *searches: tuple[str, int], **environment: str) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    arguments = [str(each) for search in searches for each in search]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **environment},
    )


def test_only_what_a_model_needs_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    """The download uses the operator's token; afterwards the checkpoint is found without a network."""
    found = Path(*find(hub, tmp_path, (NAME, LIMIT), HF_TOKEN="hf_secret"))

    assert {path.name: path.read_bytes() for path in found.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"w" * 100,
    }
    assert hub.tokens == {"Bearer hf_secret"}
    hub.asked.clear()
    assert find(hub, tmp_path, (NAME, LIMIT), HF_HUB_OFFLINE="1") == [str(found)]
    assert hub.asked == []


def test_the_revision_of_the_path_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    """The revision in the path is requested from the hub, and only this one is in the cache afterwards."""
    [found] = find(hub, tmp_path, (f"{NAME}@v2", LIMIT))

    assert (Path(found) / "config.json").read_bytes() == b"{}"
    assert f"/api/models/{NAME}/revision/v2" in hub.asked
    assert f"/api/models/{NAME}/revision/main" not in hub.asked
    again, main = find(hub, tmp_path, (f"{NAME}@v2", LIMIT), (NAME, LIMIT), HF_HUB_OFFLINE="1")
    assert again == found
    assert main.startswith(f"SettingsError: {NAME} is not in the cache, and HF_HUB_OFFLINE is set: ")
    assert main.endswith("; unset HF_HUB_OFFLINE, or download the model first")


def test_a_download_logs_its_progress(hub: Hub, tmp_path: Path) -> None:
    """The log says how much is done while the hub is slow."""
    hub.files["model.safetensors"] = b"w" * 40_000_000
    hub.gate = threading.Event()
    process = start(hub, tmp_path, (NAME, 50_000_000))

    lines = iter(process.stderr.readline, "")
    line = next(line for line in lines if line.startswith("progress: ") and " 0.0 of" not in line)

    assert line == "progress: downloading 10.5 of 40.0 MB\n"
    hub.gate.set()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert (Path(output.strip()) / "model.safetensors").stat().st_size == 40_000_000


def test_a_checkpoint_over_the_limit_is_not_downloaded(hub: Hub, tmp_path: Path) -> None:
    """A checkpoint over the limit is not downloaded; files that a model does not need do not count."""
    [refused] = find(hub, tmp_path, (NAME, 101))
    assert "more than handler.model.max_download_bytes (101)" in refused
    assert not [path for path in hub.asked if "resolve" in path]

    [found] = find(hub, tmp_path, (NAME, 102))
    assert "SettingsError" not in found


def test_a_name_that_the_hub_does_not_have_is_a_config_error(hub: Hub, tmp_path: Path) -> None:
    """The error is one line that contains the name and what to do."""
    [said] = find(hub, tmp_path, ("someone/else", LIMIT))

    assert said.startswith("SettingsError: someone/else cannot be downloaded from the Hugging Face hub")
    assert said.endswith("; check the name; a private or gated model needs HF_TOKEN")


def test_a_hub_that_cannot_be_reached_is_a_config_error(hub: Hub, tmp_path: Path) -> None:
    """The error names what decides about the hub's address."""
    [said] = find(hub, tmp_path, (NAME, LIMIT), HF_ENDPOINT="http://127.0.0.1:1")

    assert "the Hugging Face hub: ConnectError" in said
    assert said.endswith("; check the revision, the network and HF_ENDPOINT, or give a directory")

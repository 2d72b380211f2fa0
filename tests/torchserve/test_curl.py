"""curl against the proxy and an instance: the README's examples, and the container's own paths."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import draw

pytestmark = [pytest.mark.torchserve, pytest.mark.needs("curl")]
PATHS = ("/endpoints/llava/invocations", "/invocations", "/predictions/llava")


def curl(*arguments: str) -> tuple[int, dict[str, str], str]:
    """Return status, headers (lower case) and body."""
    done = subprocess.run(
        ["curl", "-sS", "-i", "--max-time", "60", *arguments], capture_output=True, text=True, check=True, timeout=90
    )
    head, _, body = done.stdout.partition("\n\n")
    if head.startswith("HTTP/1.1 100"):
        head, _, body = body.partition("\n\n")
    lines = head.splitlines()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, body


@pytest.mark.parametrize("path", PATHS)
def test_session_by_curl(fleet: Fleet, tmp_path: Path, path: str) -> None:
    """An image file opens a session on each of the proxy's paths; its id in the header continues it."""
    picture = tmp_path / "circle.jpg"
    picture.write_bytes(draw("circle", "red", form="JPEG"))
    url = fleet.runtime + path
    as_json = ("-H", "Content-Type: application/json")

    status, headers, body = curl(
        *("-H", "X-Amzn-SageMaker-Session-Id: NEW_SESSION", "-H", "Content-Type: image/jpeg"),
        *("--data-binary", f"@{picture}", url),
    )
    assert status == 200, body
    session_id = json.loads(body)["session_id"]
    assert headers["x-amzn-sagemaker-new-session-id"].startswith(session_id + "; Expires=")

    session = ("-H", f"X-Amzn-SageMaker-Session-Id: {session_id}")
    question = json.dumps({"type": "send_text_prompt", "prompt_text": "What color is the circle?"})
    status, headers, body = curl(*session, *as_json, "-d", question, url)
    assert status == 200, body
    assert "red" in json.loads(body)["response_text"]
    assert headers["x-torchmoor-instance"] in session_id

    status, headers, body = curl(*session, *as_json, "-d", '{"requestType": "CLOSE"}', url)
    assert status == 200, body
    assert headers["x-amzn-sagemaker-closed-session-id"] == session_id


def test_plain_stream_by_curl(fleet: Fleet, tmp_path: Path) -> None:
    """On the container's path a stream is plain chunked text."""
    picture = tmp_path / "square.png"
    picture.write_bytes(draw("square", "blue"))
    url = fleet.runtime + "/invocations"
    _, _, body = curl(
        *("-H", "X-Amzn-SageMaker-Session-Id: NEW_SESSION", "-H", "Content-Type: image/png"),
        *("--data-binary", f"@{picture}", url),
    )
    session = ("-H", f"X-Amzn-SageMaker-Session-Id: {json.loads(body)['session_id']}")
    question = {"type": "send_text_prompt", "prompt_text": "What color is the square?", "stream": True}

    status, headers, body = curl(*session, "-H", "Content-Type: application/json", "-d", json.dumps(question), url)

    assert status == 200, body
    assert headers["transfer-encoding"] == "chunked"
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert "blue" in body


def test_container_dialect_keeps_the_handlers_own_status(fleet: Fleet) -> None:
    """On /invocations an error keeps the handler's status, as SageMaker requires of a container."""
    status, headers, body = curl(
        "-H", "Content-Type: application/json", "-d", '{"type": "start_session", "path": "file:///x"}',
        fleet.runtime + "/invocations",
    )  # fmt: skip

    assert status == 403
    assert headers["x-torchmoor-error"] == "ImageUrlForbidden"
    assert json.loads(body)["error"]["code"] == "ImageUrlForbidden"

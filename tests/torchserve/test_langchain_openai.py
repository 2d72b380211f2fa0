"""LangChain's ChatOpenAI passes LangChain's own tests, on real TorchServe instances with a scripted model.

The model writes the calls and the JSON that the suite expects; tokens, grammars and everything else are the server's.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.torchserve.conftest import SCRIPTED_NAME, Fleet
from tests.torchserve.drawings import draw
from tests.torchserve.test_sdk_clients import CLIENTS, require_clients
from tests.waiting import PROGRAM_S

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
# The reasons for which the suite may skip tests.
SKIPPED = {
    "Model does not support PDF inputs.",
    "Model does not support audio inputs.",
    "Model does not support PDF tool message.",
    "Model does not explicitly support Anthropic inputs.",
    "VCR not set up.",
}


def test_every_standard_test_passes(scripted: Fleet, tmp_path: Path) -> None:
    """Tests may be skipped only for inputs that the server does not accept, or for recordings."""
    folder = CLIENTS / "langchain_openai"
    picture = tmp_path / "circle.png"
    picture.write_bytes(draw("circle", "red"))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PYTHON", "PYTEST"))}
    own = {"BASE_URL": f"{scripted.runtime}/v1", "MODEL": SCRIPTED_NAME, "PICTURE": str(picture)}

    done = subprocess.run(
        [require_clients(), "-m", "pytest", "-c", folder / "pytest.ini", folder],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={**inherited, **own},
    )

    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    found = re.search(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert int(found[1]) >= 70
    reasons = set(re.findall(r"^SKIPPED .*?: (.*)$", done.stdout, re.MULTILINE))
    assert reasons <= SKIPPED, reasons - SKIPPED

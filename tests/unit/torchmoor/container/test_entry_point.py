"""The image's entry point, without the image."""

import json
import os
import subprocess
import sys
from pathlib import Path

DOCKERFILE = Path(__file__).parents[4] / "deploy" / "docker" / "Dockerfile"


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """An image that is built on this one may have a working directory with a file of a standard module's name."""
    [line] = [line for line in DOCKERFILE.read_text().splitlines() if line.startswith("ENTRYPOINT ")]
    command = json.loads(line.removeprefix("ENTRYPOINT "))
    arguments = command[command.index("/opt/torchmoor/bin/python") + 1 :]
    (tmp_path / "secrets.py").write_text("raise SystemExit('the wrong module')")
    own = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}  # as workers' tests set
    environment = {**own, "TORCHMOOR_MODEL_DIR": str(tmp_path / "none")}

    done = subprocess.run(
        [sys.executable, *arguments, "serve"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert f"there is no model in {tmp_path / 'none'}" in done.stderr

"""Every block of README.md runs in order, unchanged, on a separate host (a network namespace)."""

import re
import shlex
from pathlib import Path

import pytest

from tests.documented.as_user import ROOT, environment, run_shell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torchserve,
    pytest.mark.needs("unshare", "ip", "curl"),
]
MARK = "@@ block"
STOP = "{ torchmoor stop --all; torchserve --stop; } >/dev/null 2>&1 || true"  # leftovers of a failed block
TARGETS = "$ make demo"  # the block of make's targets, which run these tests


def commands_of(block: str) -> str:
    """Return a console block's commands as a script: `$ ` begins a command, `> ` is a line typed into it."""
    script, typed = [], []
    for line in [*block.splitlines(), "$ "]:
        if line.startswith("> "):
            typed.append(line[2:])
        elif line.startswith(("$ ", "    ")):
            if typed:
                script[-1] += f" <<< {shlex.quote(chr(10).join(typed))}"
                typed = []
            script.append(line.removeprefix("$ "))
    return "\n".join(script)


def output_of(block: str) -> list[str]:
    return [line for line in block.splitlines() if not line.startswith(("$ ", "> ", "    "))]


@pytest.fixture
def user(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user without state."""
    return environment(XDG_STATE_HOME=str(tmp_path))


def test_every_block_of_the_readme_runs_in_order(user: dict[str, str]) -> None:
    """Each block exits with 0 and prints what README.md shows."""
    found = re.findall(r"^```(console|python)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    blocks = [(language, text) for language, text in found if not text.startswith(TARGETS)]
    script = [f"trap {shlex.quote(STOP)} EXIT"]
    for language, text in blocks:
        script.append(f"echo '{MARK}'")
        script.append(commands_of(text) if language == "console" else f"python - <<'END'\n{text}END\necho")

    done = run_shell("\n".join(script), ROOT, user)

    outputs = done.stdout.split(f"{MARK}\n")[1:]
    missing = [
        line
        for (_, text), output in zip(blocks, outputs, strict=True)
        for line in output_of(text)
        if text.startswith("$") and line not in output
    ]
    assert missing == []
    assert "The image shows a red circle in the center." in done.stdout
    assert outputs[2].strip() == "The circle is red."

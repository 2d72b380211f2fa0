"""The shell blocks of pages in docs/ run in order, as they stand, on a host of their own (a network namespace).

Their files are in a new folder. `torchmoor up` runs in the background, and ends before the page starts another fleet.
"""

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documented.as_user import ROOT, environment, run_shell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torchserve,
    pytest.mark.needs("unshare", "ip", "curl", "openssl"),
]
STOP = "{ torchmoor stop --all; torchserve --stop; } >/dev/null 2>&1 || true"
QUESTION = "What color is the circle?"
SECRETS = """
TOKEN=$(awk '/^token alice/ {print $3}' keys.txt)
SECRET=$(awk '/^key AKIATEAMONE/ {print $3}' keys.txt)
"""
ASK_LATER = """
torchmoor up -d
submit() {
  curl --fail -sS localhost:8080/endpoints/llava/async-invocations \\
    -H 'X-Amzn-SageMaker-Content-Type: application/json' \\
    -d "{\\"inputs\\": \\"Hello\\", \\"parameters\\": $1}" |
    python -c 'import json, sys; print(json.load(sys.stdin)["InferenceId"])'
}
SHORT=$(submit '{"max_new_tokens": 2}')
until torchmoor async get $SHORT -o answer.json 2>errors; do sleep 0.2; done
torchmoor drain llava-0
LONG=$(submit '{"max_new_tokens": 1500}')  # waits until it is cancelled
"""


@dataclass(frozen=True)
class Page:
    """A page with the surroundings of its blocks.

    before, between: shell commands before all blocks and before each later one. values: replacements of placeholders.
    shown: text that the output must contain.
    """

    before: str = ""
    between: str = ""
    values: tuple[tuple[str, str], ...] = ()
    shown: tuple[str, ...] = ()


PAGES = {
    "access": Page(between=SECRETS, shown=('"id": "llava"', "The circle is red.")),
    "own-model": Page(shown=("The circle is red.", "{'found': ['the door is green']}", "notes-")),
    "command-line": Page(
        before="torchmoor up -d --endpoint llava --endpoint llm", shown=("The circle is red.", '"receipt"')
    ),
    "async-inference": Page(
        before=ASK_LATER, values=(("cancel ID", "cancel $LONG"), (" ID", " $SHORT")), shown=("COMPLETED", "CANCELLED")
    ),
    "many-models": Page(shown=(", -0.",)),
}


def shell_blocks(page: str) -> list[str]:
    """Return a page's shell blocks, its Python blocks that are whole programs, and the first column of its table of
    commands, as shell scripts."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(sh|bash|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    table = re.findall(r"^\| `(torchmoor [^`]*)` \| `", text, re.MULTILINE)
    return [
        f"python - <<'END'\n{block}END\n" if language == "python" else block
        for language, block in found
        if language != "python" or block.startswith("import boto3")
    ] + (["\n".join(table)] if table else [])


def in_background(block: str) -> str:
    """Return a block that does not wait for its fleet to end; a chat gets a question."""
    block = re.sub(r"^torchmoor up\b", f"{STOP}\ntorchmoor up -d", block, flags=re.MULTILINE)
    block = re.sub(r"^(.*torchmoor chat .*)$", rf"\1 <<< {shlex.quote(QUESTION)}", block, flags=re.MULTILINE)
    return re.sub(r"^curl\b", "curl --fail -sS", block, flags=re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the pages name, and a change for `git diff`."""
    samples = ROOT / "models" / "tiny-llava" / "samples"
    for name in ("picture.png", "before.png", "after.png"):
        shutil.copy(samples / "red_circle.png", tmp_path / name)
    for name in ("model_store", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my-llava").symlink_to(ROOT / "models" / "tiny-llava")
    (tmp_path / "minilm").symlink_to(ROOT / "models" / "minilm")
    change = "git init -q && echo one > file && git add file && echo two > file"
    subprocess.run(["bash", "-c", change], cwd=tmp_path, check=True, timeout=60)
    return tmp_path


@pytest.mark.parametrize("name", PAGES)
def test_every_shell_block_of_a_page_runs(name: str, folder: Path) -> None:
    """Each block exits with 0 and prints the page's answers."""
    page = PAGES[name]
    script = [f"trap {shlex.quote(STOP)} EXIT", page.before]
    for number, block in enumerate(shell_blocks(name)):
        for word, value in page.values:
            block = block.replace(word, value)
        script += [page.between if number else "", in_background(block)]

    done = run_shell("\n".join(script), folder, environment(XDG_STATE_HOME=str(folder / "state")))

    assert [part for part in page.shown if part not in done.stdout] == [], done.stdout[-3000:]

"""Record a command's output in a terminal as an animated SVG, in which each line appears as it did in the run.

    python scripts/record_run.py --output docs/demo.svg --title "make demo" -- .venv/bin/python scripts/demo.py --port 0

Long waits are shortened. A browser that prefers reduced motion shows the whole text at once.
"""

import argparse
import os
import pty
import re
import subprocess
import sys
import time
from html import escape
from pathlib import Path

COLUMNS = 110
LINE_HEIGHT, CHARACTER_WIDTH, MARGIN, BAR = 19, 8.43, 16, 34
MAX_WAIT_S = 1.0  # longer waits between two lines are shortened to this
HOLD_S = 6.0  # at the end, before the animation repeats
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def record(command: list[str]) -> list[tuple[float, str]]:
    """Return the command's lines, each with the seconds since the start. Raises SystemExit if the command fails."""
    master, slave = pty.openpty()
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=slave, stderr=slave, stdin=subprocess.DEVNULL, close_fds=True)
    os.close(slave)
    lines: list[tuple[float, str]] = []
    rest = b""
    while True:
        try:
            data = os.read(master, 4096)
        except OSError:  # on Linux, the other side of the terminal is closed
            data = b""
        *whole, rest = (rest + data).split(b"\n")
        if not data and rest:  # a last line without an end
            whole.append(rest)
        lines += [(time.monotonic() - began, _clean(line)) for line in whole]
        if not data:
            break
    os.close(master)
    if process.wait() != 0:
        raise SystemExit(f"the command ended with {process.returncode}")
    return lines


def _clean(line: bytes) -> str:
    """Return a line as a terminal shows it: without overwritten text, and cut at the right edge."""
    text = _ESCAPE.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2].expandtabs()
    return text if len(text) <= COLUMNS else text[: COLUMNS - 3] + "..."


def draw(lines: list[tuple[float, str]], *, title: str) -> str:
    """Return the SVG."""
    shown_at, before, now = [], 0.0, 0.4
    for at, _ in lines:
        now += min(at - before, MAX_WAIT_S)
        before = at
        shown_at.append(now)
    total = now + HOLD_S
    width, height = MARGIN * 2 + COLUMNS * CHARACTER_WIDTH, BAR + MARGIN * 2 + LINE_HEIGHT * (len(lines) + 1)
    style = [
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:#d8dee9}",
        ".p{fill:#8fbcbb}.t{fill:#7b8494}",
        f".l{{animation-duration:{total:.1f}s;animation-iteration-count:infinite}}",
    ]
    style += [
        f"@keyframes k{number}{{0%,{part:.2f}%{{opacity:0}}{part + 0.01:.2f}%,100%{{opacity:1}}}}"
        for number, part in enumerate(100 * at / total for at in shown_at)
    ]
    style.append("@media (prefers-reduced-motion:reduce){.l{animation:none}}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="A terminal: {escape(title)}">',
        f"<style>{''.join(style)}</style>",
        '<rect width="100%" height="100%" rx="8" fill="#1f2430"/>',
        f'<text class="t" x="{MARGIN}" y="22">{escape(title)}</text>',
        f'<text class="p" x="{MARGIN}" y="{BAR + MARGIN}">$ {escape(title)}</text>',
    ]
    for number, (_, text) in enumerate(lines):
        y = BAR + MARGIN + LINE_HEIGHT * (number + 1)
        parts.append(f'<text class="l" style="animation-name:k{number}" x="{MARGIN}" y="{y}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the SVG file")
    parser.add_argument("--title", required=True, help="the command that the picture shows after the prompt")
    parser.add_argument("command", nargs="+", help="the command to run")
    options = parser.parse_args()
    lines = record(options.command)
    options.output.write_text(draw(lines, title=options.title))
    print(f"{options.output}: {len(lines)} lines", file=sys.stderr)


if __name__ == "__main__":
    main()

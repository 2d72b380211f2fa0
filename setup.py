"""Package metadata. Versions live in requirements.txt; tool settings in pyproject.toml."""

import os
import re
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
# What `torchmoor up` makes archives of, in the wheel's torchmoor/bundle (torchmoor/fleet/archives.py).
BUNDLED = ("handlers", "models/tiny-llava")
# Most requests go through these modules, which TORCHMOOR_COMPILED=1 compiles (docs/decisions/0062-compiled-wheel.md).
COMPILED = {
    "torchmoor/proxy/api": ("operation",),
    "torchmoor/proxy/dispatch": ("chooser", "recent_decisions", "request_sessions"),
    "torchmoor/proxy/fast_path": ("request", "routes"),
    "torchmoor/proxy/http": (
        *("answer", "arriving", "bounded_cache", "call", "chunks", "client_connection", "client_state"),
        *("connection_parts", "exchange", "field_names", "fields", "head", "marked_answer", "message"),
        *("message_exchange", "outgoing", "reader", "request_delivery", "subrequest", "sweeper", "upstream"),
    ),
    "torchmoor/proxy/instances": ("breaker", "instance"),
    "torchmoor/proxy/routing": ("pool", "reasons"),
    "torchmoor/wire": ("session_ids",),
}
NOT_BUNDLED = ("__pycache__", "samples", "README.md")


def read_groups(name: str) -> dict[str, list[str]]:
    """The pinned requirements of a file by its group comments, as the ranges that the wheel accepts."""
    groups: dict[str, list[str]] = {}
    for line in (HERE / name).read_text().splitlines():
        if header := re.match(r"# \[(\w+)\]", line):
            groups[header[1]] = []
        elif "==" in line.partition("#")[0]:
            list(groups.values())[-1].append(accepted(line))
    return groups


def accepted(line: str) -> str:
    """The range of a pinned requirement: to the next major version, or the next minor one of a version 0."""
    pinned, _, comment = line.partition("#")
    name, _, version = pinned.strip().partition("==")
    major, minor = re.findall(r"\d+", version)[:2]
    oldest = re.search(r"oldest ([\d.]+)", comment)
    newest = f"0.{int(minor) + 1}" if major == "0" else str(int(major) + 1)
    return f"{name}>={oldest[1].rstrip('.') if oldest else f'{major}.{minor}'},<{newest}"


def compiled_modules() -> list[Extension]:
    """The extension modules of COMPILED, made by mypyc; none unless they are asked for."""
    if os.environ.get("TORCHMOOR_COMPILED") != "1":
        return []
    from mypyc.build import mypycify

    paths = [f"{folder}/{name}.py" for folder, names in COMPILED.items() for name in names]
    return mypycify(paths, opt_level="3", debug_level="0", group_name="torchmoor")


class BuildWithBundle(build_py):
    """Copies the handlers and the demo model into the wheel; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "torchmoor" / "bundle"
            shutil.rmtree(target, ignore_errors=True)
            for name in BUNDLED:
                shutil.copytree(HERE / name, target / name, ignore=shutil.ignore_patterns(*NOT_BUNDLED))


GROUPS = read_groups("requirements.txt") | read_groups("requirements-clients.txt")
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "torchmoor" / "__init__.py").read_text(), re.MULTILINE)[1]
PICTURES = re.compile(r"^!\[.*\]\(.*\)\n\n", re.MULTILINE)  # files of the repository, which an index page does not have

setup(
    name="torchmoor",
    version=VERSION,
    description="Stateful, streaming multimodal chat on TorchServe behind the SageMaker runtime API",
    long_description=PICTURES.sub("", (HERE / "README.md").read_text()),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["torchmoor", "torchmoor.*"]),
    package_data={
        "torchmoor": ["py.typed"],
        "torchmoor.proxy.api.chat_page": ["*.html", "*.css", "*.js", "*.LICENSE"],
        "torchmoor.admin.dashboard": ["static/*"],
        "torchmoor.fleet": ["*.xml"],
    },
    cmdclass={"build_py": BuildWithBundle},
    ext_modules=compiled_modules(),
    install_requires=GROUPS["client"],
    extras_require={
        "client": [],  # what is always installed
        "proxy": GROUPS["proxy"],
        "serve": GROUPS["proxy"] + GROUPS["handlers"],
        **{name: GROUPS[name] for name in ("otel", "gpu", "image", "langchain")},
    },
    entry_points={"console_scripts": ["torchmoor = torchmoor.cli.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Framework :: AsyncIO",
        "Intended Audience :: Developers",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Internet :: WWW/HTTP :: HTTP Servers",
        "Typing :: Typed",
    ],
)

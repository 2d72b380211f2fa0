"""Package metadata. Versions live in requirements.txt; tool settings in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_groups(name: str) -> dict[str, list[str]]:
    """The pinned requirements of a file by its group comments."""
    groups: dict[str, list[str]] = {}
    for line in (HERE / name).read_text().splitlines():
        if header := re.fullmatch(r"# \[(\w+)\].*", line):
            groups[header[1]] = []
        elif requirement := line.partition("#")[0].strip():
            list(groups.values())[-1].append(requirement)
    return groups


GROUPS = read_groups("requirements.txt") | read_groups("requirements-clients.txt")

setup(
    name="torchmoor",
    version="0.1.0",
    description="Stateful, streaming multimodal chat on TorchServe behind the SageMaker runtime API",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["torchmoor", "torchmoor.*"]),
    package_data={
        "torchmoor": ["py.typed"],
        "torchmoor.proxy.api.chat_page": ["*.html", "*.css", "*.js"],
        "torchmoor.admin.dashboard": ["static/*"],
        "torchmoor.fleet": ["*.xml"],
    },
    install_requires=GROUPS["proxy"],
    extras_require={name: GROUPS[name] for name in ("handlers", "otel", "image", "dev", "langchain")},
    entry_points={"console_scripts": ["torchmoor = torchmoor.cli.main:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

"""Decide which tests run in the same process, one after the other, and in which order groups start.

A group is a file, all files that use the same fleet of real TorchServe instances, or a folder like tests/image, whose
files share a slow fixture or would disturb each other if they ran at the same time.
Groups are derived from the source files, because pytest-xdist distributes tests when only their names are known;
its own `xdist_group` does nothing with pytest 9.2.
"""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
FLEETS = ("fleet", "many", "in_s3", "three", "small", "scripted")  # fixtures of tests/torchserve that several files use
FILE_BY_FILE = ("torchserve", "aws", "proxy", "fuzz", "unit")  # folders whose other files are groups of their own


@cache
def group_of(path: Path) -> str:
    """Return the fleet or folder that this file shares with others, else the file's own path."""
    where = path.relative_to(TESTS)
    if where.parts[0] not in FILE_BY_FILE:
        return where.parts[0]
    if where.parts[0] == "torchserve":
        for fleet in FLEETS:
            if fleet in _wanted_fixtures(ast.parse(path.read_text(encoding="utf-8"))):
                return fleet
    return str(where)


@cache
def place_of(path: Path) -> tuple[int, str]:
    """Return the sort key of a group: the slowest come first, so that none is left at the end for a single process."""
    group, folder = group_of(path), path.relative_to(TESTS).parts[0]
    if group in FLEETS:
        return FLEETS.index(group), ""
    if folder not in FILE_BY_FILE:
        return len(FLEETS), folder
    return len(FLEETS) + 1 + FILE_BY_FILE.index(folder), group


def _wanted_fixtures(tree: ast.Module) -> set[str]:
    """Return the names that a file's tests and fixtures use as parameters and that the file does not define."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    fixtures = [each for each in functions if any("fixture" in ast.unparse(by) for by in each.decorator_list)]
    tests = [each for each in functions if each.name.startswith("test_")]
    asked = {argument.arg for each in [*tests, *fixtures] for argument in each.args.args}
    return asked - {each.name for each in fixtures}

"""Which tests run in one process, one after the other, and in which order the groups are begun.

A group is a file, all files that use the same fleet of real TorchServe instances, or a folder like tests/image, whose
files share what takes long to make, or of which two at once would be in each other's way. So it is made once.
Groups are told from the files themselves, because pytest-xdist shares tests out before anything of them is known but
their names; its own `xdist_group` does nothing with pytest 9.2.
"""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
FLEETS = ("fleet", "many")  # the fixtures of tests/torchserve that several files use
FILE_BY_FILE = ("torchserve", "aws", "proxy", "fuzz", "unit")  # folders whose other files stand for themselves
SHORT = FILE_BY_FILE[1:]  # they fill what the long ones leave


@cache
def group_of(path: Path) -> str:
    """The fleet or the folder that tests of this file share with those of others, else the file's own path."""
    where = path.relative_to(TESTS)
    if where.parts[0] not in FILE_BY_FILE:
        return where.parts[0]
    if where.parts[0] == "torchserve":
        for fleet in FLEETS:
            if fleet in _wanted_fixtures(ast.parse(path.read_text(encoding="utf-8"))):
                return fleet
    return str(where)


def place_of(path: Path) -> tuple[int, str]:
    """What takes longest comes first, so that no process is left with it when the others have nothing to do."""
    group, folder = group_of(path), path.relative_to(TESTS).parts[0]
    if group in FLEETS:
        return FLEETS.index(group), ""
    if folder not in FILE_BY_FILE:
        return len(FLEETS), folder
    return len(FLEETS) + 1 + FILE_BY_FILE.index(folder), ""


def _wanted_fixtures(tree: ast.Module) -> set[str]:
    """Names that tests and fixtures of a file ask for and that are not defined in it."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    fixtures = [each for each in functions if any("fixture" in ast.unparse(by) for by in each.decorator_list)]
    tests = [each for each in functions if each.name.startswith("test_")]
    asked = {argument.arg for each in [*tests, *fixtures] for argument in each.args.args}
    return asked - {each.name for each in fixtures}

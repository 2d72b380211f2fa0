"""`make sbom` lists the packages of the set-up in CycloneDX's format."""

import json

import pytest

from tests.documented.as_user import ROOT, make, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())
sys.exit(error and str(error))
"""


def test_the_list_of_packages_is_valid_and_names_torch_and_torchserve() -> None:
    """Each package has its installed version; the programs that write the list are not in it."""
    make("sbom")
    listed = ROOT / "build" / "sbom.json"

    run(ROOT / ".venv-audit" / "bin" / "python", "-c", VALIDATE, listed)
    written = json.loads(listed.read_text(encoding="utf-8"))
    assert written["bomFormat"] == "CycloneDX"
    versions = {each["name"]: each["version"] for each in written["components"]}
    assert versions["torch"].partition("+")[0] == _pin("torch")
    assert versions["torchserve"] == _pin("torchserve")
    assert "cyclonedx-bom" not in versions


def _pin(package: str) -> str:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix(f"{package}==").split()[0] for line in lines if line.startswith(f"{package}=="))

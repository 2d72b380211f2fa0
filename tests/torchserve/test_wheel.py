"""The wheel and the sdist: their content, and serving and asking without a checkout.

The virtual environments get the wheel and find its dependencies in the test's own environment, because torch is too
large to be installed again.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.archives import unpack_tar
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sessions import open_session
from tests.waiting import PROGRAM_S
from tests.wheels import FOLDERS, build, copy_sources

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]

PACKAGES = Path(sysconfig.get_path("purelib"))
BUNDLE = "torchmoor/bundle"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from a copy of the checkout, which stays unchanged."""
    folder = tmp_path_factory.mktemp("sdist")
    return build("sdist", copy_sources(folder / "source"), folder / "dist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the sdist alone."""
    folder = tmp_path_factory.mktemp("wheel")
    unpack_tar(sdist, folder)
    [source] = folder.iterdir()
    return build("wheel", source, folder / "dist")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as bundle:
        [name] = [name for name in bundle.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(bundle.read(name))


def make_environment(folder: Path, wheel: Path) -> Path:
    """Make a virtual environment that has the wheel and no other package. Returns its folder of packages."""
    venv.EnvBuilder(symlinks=True).create(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)], check=True, timeout=120)
    return folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


@pytest.fixture(scope="module")
def serving(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the commands of an environment with torchmoor[serve]."""
    folder = tmp_path_factory.mktemp("serving") / "venv"
    packages = make_environment(folder, wheel)
    (packages / "dependencies.pth").write_text(f"{PACKAGES}\n")  # Python reads no .pth there: no editable torchmoor
    script = Path(sys.executable).with_name("torchserve").read_text()
    (folder / "bin" / "torchserve").write_text(re.sub(r"^#!.*", f"#!{folder}/bin/python", script))
    (folder / "bin" / "torchserve").chmod(0o755)
    return folder / "bin"


@pytest.fixture(scope="module")
def asking(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the commands of an environment with torchmoor[client]: the packages that its metadata requires."""
    folder = tmp_path_factory.mktemp("asking") / "venv"
    packages = make_environment(folder, wheel)
    wanted, linked = ["boto3", "click", "pydantic"], set()
    while wanted:
        name = wanted.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:  # for another system
            continue
        if name in linked:
            continue
        linked.add(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(PACKAGES / top)
        wanted += [name_of(each) for each in found.requires or () if "extra ==" not in each]
    return folder / "bin"


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def installed(serving: Path, empty: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run `torchmoor up` in an empty folder."""
    folder = tmp_path_factory.mktemp("installed")
    with run_fleet(run_dir=folder / "run", log=folder / "up.log", program=serving / "torchmoor", folder=empty) as fleet:
        yield fleet


def test_the_wheel_has_all_that_serving_needs_and_nothing_else(wheel: Path) -> None:
    """The wheel has every handler and the demo model, inside the package, and no tests, scripts or samples."""
    tracked = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    expected = {name if name.startswith("torchmoor/") else f"{BUNDLE}/{name}" for name in tracked}
    left_out = {name for name in expected if "/samples/" in name or name.endswith("tiny-llava/README.md")}

    with zipfile.ZipFile(wheel) as bundle:
        names = {name for name in bundle.namelist() if ".dist-info/" not in name}

    assert names == expected - left_out
    assert f"{BUNDLE}/models/tiny-llava/model.safetensors" in names
    assert wheel.stat().st_size < 8 << 20


def test_the_client_needs_little_and_pins_nothing(metadata: Message) -> None:
    """The client's requirements are ranges, without packages that only instances or the proxy import."""
    requirements = metadata.get_all("Requires-Dist") or []
    base = [each for each in requirements if "extra ==" not in each]

    assert {name_of(each) for each in base} == {"boto3", "click", "pydantic"}
    assert not [each for each in requirements if "==" in each.partition(";")[0] or ">=" not in each]
    assert {"client", "proxy", "serve", "langchain", "otel"} <= set(metadata.get_all("Provides-Extra") or [])
    assert [each for each in requirements if each.startswith("torch<") and 'extra == "serve"' in each]


def test_the_description_shows_no_image_that_an_index_lacks(metadata: Message) -> None:
    """Images of the README are files of the checkout."""
    text = str(metadata.get_payload())

    assert "boto3" in text
    assert "![" not in text


def test_the_wheel_serves_the_demo_model_in_an_empty_folder(installed: Fleet, empty: Path) -> None:
    """boto3 asks about an image; nothing is written to the folder."""
    chat = open_session(installed.client(), image=data_url(draw("circle", "red")))

    assert chat.ask("What color is the circle?") == "The circle is red."
    assert list(empty.iterdir()) == []


def test_the_client_asks_without_torch(installed: Fleet, asking: Path, tmp_path: Path) -> None:
    """`torchmoor ask` works; `up` names the missing packages."""
    (tmp_path / "circle.png").write_bytes(draw("circle", "red"))
    asked = [asking / "torchmoor", "ask", "--url", installed.runtime, "What color is the circle?", "circle.png"]

    answer = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    up = subprocess.run([asking / "torchmoor", "up"], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert (answer.returncode, answer.stdout) == (0, "The circle is red.\n"), answer.stderr
    assert up.returncode == 1
    assert "pip install 'torchmoor[serve]'" in up.stderr
    assert "Traceback" not in up.stderr


def test_doctor_finds_the_packages_and_the_demo_model(serving: Path, empty: Path) -> None:
    """The installed versions are within the wheel's ranges."""
    command = [serving / "torchmoor", "doctor", "--json", "--port", "0", "--admin-port", "0"]

    done = subprocess.run(command, cwd=empty, capture_output=True, text=True, timeout=PROGRAM_S)

    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["packages"]["level"] == "ok", found["packages"]
    assert found["archives"]["found"].startswith("llava is built in")


def test_a_users_own_model_is_served_from_the_wheel(serving: Path, tmp_path: Path) -> None:
    """A checkpoint is served under its own name, with only the wheel installed."""
    shutil.copytree(ROOT / "models" / "tiny-llava", tmp_path / "mine")
    with run_fleet(
        *("./mine", "--name", "mine"),
        run_dir=tmp_path / "run",
        log=tmp_path / "up.log",
        program=serving / "torchmoor",
        folder=tmp_path,
    ) as fleet:
        answer = fleet.client().invoke_endpoint(
            EndpointName="mine", ContentType="application/json", Body=json.dumps({"inputs": "What is it?"})
        )

        assert json.load(answer["Body"])

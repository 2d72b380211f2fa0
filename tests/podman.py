"""Images and containers on a machine without a Docker engine: podman and buildah, as root.

Both run in a mount namespace of their own without the cgroup2 mount that a host of cgroups v1 has beside them, since
they would take that for the only one. Everything that they keep lies below one folder, which stays between runs: the
base image, and what of a build did not change.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import requests

from tests.servers import missing
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
FOLDER = Path(os.environ.get("TORCHMOOR_TEST_IMAGES") or Path(tempfile.gettempdir()) / "torchmoor-test-images")
PROGRAMS = ("podman", "buildah", "crun", "mmdebstrap", "unshare")
BASE, IMAGE = "localhost/torchmoor-test-base", "localhost/torchmoor-test"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
WHEELS = "/opt/local-wheels"  # where the base image's pip looks besides; the host's wheels are mounted there
IN_NAMESPACE = 'mountpoint -q /sys/fs/cgroup/unified && umount /sys/fs/cgroup/unified; exec "$@"'
BUILD_TIMEOUT_S = 1500


class Podman:
    """The engine. Skips the test where it cannot work, which on a machine of CI is a failure."""

    def __init__(self, folder: Path = FOLDER) -> None:
        absent = [program for program in PROGRAMS if shutil.which(program) is None]
        if absent:
            missing(f"{', '.join(absent)} not installed; on Debian: apt-get install buildah podman crun mmdebstrap")
        if os.geteuid() != 0:
            missing("containers are made by root here")
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        )
        (folder / "containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))},
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }
        refusal = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True)
        if refusal.returncode != 0:  # nothing that CI could install would help
            import pytest

            pytest.skip(f"this kernel allows no mount namespaces: {refusal.stderr.strip()}")

    def command(self, *words: str | Path) -> list[str]:
        """The command line that runs these words where podman works."""
        return ["unshare", "-m", "bash", "-c", IN_NAMESPACE, "_", *map(str, words)]

    def run(self, *words: str | Path, timeout_s: float = 120, is_checked: bool = True) -> str:
        """What the command says on standard output."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=timeout_s, env=self.environment, cwd=ROOT
        )
        assert done.returncode == 0 or not is_checked, f"{words}: {(done.stdout + done.stderr)[-4000:]}"
        return done.stdout.strip()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One build at a time on this machine."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def build(self, tag: str = IMAGE, arguments: Mapping[str, str] | None = None) -> str:
        """The Dockerfile as it is, on plain Debian; returns the image's name."""
        words = [f"--build-arg={name}={value}" for name, value in (arguments or {}).items()]
        wheels = os.environ.get("PIP_FIND_LINKS", "")
        if Path(wheels).is_dir() and wheels:
            words.append(f"--volume={wheels}:{WHEELS}:ro")
        with self.locked():
            base = self._make_base()
            self.run(
                *("buildah", "build", "--layers", "--isolation", "chroot", "--format", "docker", "--quiet"),
                *(f"--build-arg=BASE_IMAGE={base}", *words, "--tag", tag, "--file", DOCKERFILE, ROOT),
                timeout_s=BUILD_TIMEOUT_S,
            )
        return tag

    def _make_base(self) -> str:
        """Debian with Python, this machine's certificate authorities, and a place for wheels."""
        if self.run("podman", "images", "--quiet", BASE):
            return BASE
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            root = Path(temporary) / "root"
            self.run(
                *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", root),
                timeout_s=BUILD_TIMEOUT_S,
            )
            for certificate in CERTIFICATES.glob("*.crt"):
                shutil.copy(certificate, f"{root}{CERTIFICATES}")
            self.run("chroot", root, "update-ca-certificates")
            (root / "etc" / "pip.conf").write_text(
                f"[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = {WHEELS}\n"
            )
            (root / WHEELS[1:]).mkdir()
            self.run("tar", "-C", root, "-cf", f"{temporary}/base.tar", ".")
            self.run("podman", "import", "--quiet", f"{temporary}/base.tar", BASE)
        return BASE

    @contextmanager
    def start(
        self,
        image: str,
        *arguments: str,
        log: Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        mounts: Mapping[Path, str] | None = None,
    ) -> Iterator[Container]:
        """A container on the host's network, which is gone afterwards. mounts: what lies where, read-only."""
        name = f"torchmoor-test-{log.stem}-{os.getpid()}"
        words = [
            *("podman", "run", "--rm", "--name", name, "--network", "host", "--no-healthcheck", *options),
            *(f"--env={key}={value}" for key, value in (environment or {}).items()),
            *(f"--volume={path}:{target}:ro" for path, target in (mounts or {}).items()),
            *(image, *arguments),
        ]
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(*words), stdout=output, stderr=subprocess.STDOUT, env=self.environment, cwd=ROOT
            )
        container = Container(self, name, process, log)
        try:
            yield container
        finally:
            if process.poll() is None:
                self.run("podman", "rm", "--force", "--time", "0", name, is_checked=False)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=30)
                process.kill()
                process.wait(timeout=30)


@dataclass
class Container:
    """One that was started."""

    engine: Podman
    name: str
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        """All that it has written."""
        return self.log_file.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of its first process, as the host has it."""
        return int(json.loads(self.engine.run("podman", "inspect", self.name))[0]["State"]["Pid"])

    def signal(self, name: str) -> None:
        """Send its first process a signal."""
        self.engine.run("podman", "kill", "--signal", name, self.name)

    def wait(self, timeout_s: float) -> int:
        """Its exit status."""
        return self.process.wait(timeout=timeout_s)

    def wait_until_ok(self, url: str, *, deadline_s: float = 600.0) -> None:
        """Until a GET is answered with 200; fails at once, with the log, if it ends before."""

        def is_ok() -> bool:
            assert self.process.poll() is None, self.log[-4000:]
            with suppress(requests.RequestException):
                return requests.get(url, timeout=5).status_code == 200
            return False

        try:
            wait_until(is_ok, f"{url} answers", deadline_s=deadline_s, interval_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log[-4000:]}") from None

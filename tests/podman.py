"""Build images and run containers without a Docker engine: podman and buildah, as root.

Both run in a mount namespace of their own, without the cgroup2 mount that a cgroups v1 host has in addition, since
they would mistake it for the only hierarchy. All their data, about 7 GB, lies below one folder, which is kept between
runs: the base image and the unchanged layers of a build. It is not below TMPDIR, which may be a tmpfs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import requests

from tests.tools import missing, require, require_mount_namespace
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
FOLDER = Path(os.environ.get("TORCHMOOR_TEST_IMAGES") or "/var/tmp/torchmoor-test-images")
PROGRAMS = ("podman", "buildah", "crun", "mmdebstrap")
BASE, IMAGE = "localhost/torchmoor-test-base", "localhost/torchmoor-test"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
# an additional package folder for the base image's pip; the host's wheels are mounted there
WHEELS = "/opt/local-wheels"
IN_NAMESPACE = 'mountpoint -q /sys/fs/cgroup/unified && umount /sys/fs/cgroup/unified; exec "$@"'
BUILD_TIMEOUT_S = 1500


class Podman:
    """Runs podman and buildah. Skips the test on a machine without them; in CI it fails the test."""

    def __init__(self, folder: Path = FOLDER) -> None:
        require(*PROGRAMS)
        if os.geteuid() != 0:
            missing("containers need root here")
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        )
        (folder / "containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            '[network]\nnetwork_backend = "cni"\n'
        )
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))},
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }
        require_mount_namespace()

    def command(self, *words: str | Path) -> list[str]:
        """Return the command line that runs these words where podman works."""
        return ["unshare", "-m", "bash", "-c", IN_NAMESPACE, "_", *map(str, words)]

    def run(self, *words: str | Path, timeout_s: float = 120, is_checked: bool = True) -> str:
        """Run a command and return its standard output."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=timeout_s, env=self.environment, cwd=ROOT
        )
        assert done.returncode == 0 or not is_checked, f"{words}: {(done.stdout + done.stderr)[-4000:]}"
        return done.stdout.strip()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Allow one build at a time on this machine."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def build(
        self, tag: str = IMAGE, arguments: Mapping[str, str] | None = None, make_base: Callable[[str], str] = str
    ) -> str:
        """Build the Dockerfile unchanged on plain Debian and return the image's name.

        make_base: derives a base image from the image of plain Debian, and returns its name.
        """
        words = [f"--build-arg={name}={value}" for name, value in (arguments or {}).items()]
        wheels = os.environ.get("PIP_FIND_LINKS", "")
        if Path(wheels).is_dir() and wheels:
            words.append(f"--volume={wheels}:{WHEELS}:ro")
        with self.locked():
            base = make_base(self._make_base())
            self.run(
                *("buildah", "build", "--layers", "--isolation", "chroot", "--format", "docker", "--quiet"),
                *(f"--build-arg=BASE_IMAGE={base}", *words, "--tag", tag, "--file", DOCKERFILE, ROOT),
                timeout_s=BUILD_TIMEOUT_S,
            )
        return tag

    def _make_base(self) -> str:
        """Build Debian with Python, this machine's certificate authorities, and a folder for wheels."""
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
        """Run a container on the host's network until the context ends. mounts: read-only bind mounts."""
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
    """A running container."""

    engine: Podman
    name: str
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        """Return everything that it has logged."""
        return self.log_file.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Return the host's process id of its first process."""
        return int(json.loads(self.engine.run("podman", "inspect", self.name))[0]["State"]["Pid"])

    def signal(self, name: str) -> None:
        """Send a signal to its first process."""
        self.engine.run("podman", "kill", "--signal", name, self.name)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return its exit status."""
        return self.process.wait(timeout=timeout_s)

    def wait_until_ok(self, url: str, *, deadline_s: float = 600.0) -> None:
        """Wait until a GET returns 200; fail at once with the log if the container ends before."""

        def is_ok() -> bool:
            assert self.process.poll() is None, self.log[-4000:]
            with suppress(requests.RequestException):
                return requests.get(url, timeout=5).status_code == 200
            return False

        try:
            wait_until(is_ok, f"{url} answers", deadline_s=deadline_s, interval_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log[-4000:]}") from None

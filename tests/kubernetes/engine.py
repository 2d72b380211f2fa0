"""Run podman for pods, and provide the images that the manifests name."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from tests.kubernetes.manifests import Overlay
from tests.podman import Podman
from tests.servers import find_valkey
from tests.waiting import wait_until

BUILT = "TORCHMOOR_TEST_IMAGE"  # environment variable: an existing image to test
VALKEY_DOCKERFILE = """ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ENV PATH=/usr/local/bin:/usr/bin:/bin
COPY valkey-server /usr/local/bin/
"""


class LastingPodman(Podman):
    """Podman in one mount namespace from the first command to the last: it keeps pods' networks there."""

    _holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LastingPodman:
        holder = subprocess.Popen(self.command("sleep", "infinity"), env=self.environment)
        name = Path(f"/proc/{holder.pid}/comm")
        wait_until(lambda: name.read_text().strip() == "sleep", "the namespace is made")
        self._holder = holder
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait(timeout=60)
        self._holder = None

    def command(self, *words: str | Path) -> list[str]:
        if self._holder is None:
            return super().command(*words)
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--", *map(str, words)]

    def make_images(self, overlay: Overlay) -> None:
        """Provide the overlay's images: ours from its Dockerfile, and Valkey's server from its Python package."""
        ours, valkey = (overlay.workload(name).containers[0]["image"] for name in ("torchmoor", "valkey"))
        built = os.environ.get(BUILT) or self.build(arguments={"DEMO_MODELS": "llava"})
        self.run("podman", "tag", built, ours)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            shutil.copy(find_valkey(), folder)
            (Path(folder) / "Dockerfile").write_text(VALKEY_DOCKERFILE)
            with self.locked():
                base = self._make_base()
                words = ("--isolation", "chroot", "--format", "docker", "--quiet", f"--build-arg=BASE_IMAGE={base}")
                self.run("buildah", "build", "--layers", *words, "--tag", valkey, folder, timeout_s=300)

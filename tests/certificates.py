"""Self-signed certificates for the tests of TLS."""

import subprocess
from pathlib import Path

from tests.tools import require

ECDSA = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make_certificate(
    folder: Path, name: str, *, valid_for: str = "IP:127.0.0.1", key_kind: tuple[str, ...] = ECDSA
) -> tuple[Path, Path]:
    """Make a certificate that is its own authority; return its file and its key's."""
    require("openssl")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", *key_kind, "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName={valid_for}", "-addext", "basicConstraints=critical,CA:TRUE"),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    key.chmod(0o600)
    return certificate, key


def make_one_file(folder: Path, host: str) -> Path:
    """Make a certificate of this host, with its key in the same file."""
    certificate, key = make_certificate(folder, host, valid_for=f"DNS:{host}")
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    return certificate

"""Why a connection failed, in the words of the system or of TLS: libraries may quote arguments in theirs."""

from __future__ import annotations

import errno
import os
import socket
import ssl

CERTIFICATE_REFUSED = "certificate refused"


def failure_reason(error: BaseException) -> str:
    """Return the reason of the first error in the chain of causes that has one; without one, the name of `error`."""
    cause: BaseException | None = error
    while cause is not None:
        if reason := _own_reason(cause):
            return reason
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def is_shortage(error: OSError) -> bool:
    """Return True if the process or the machine has no free descriptor."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def _own_reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):  # its strerror names a line of OpenSSL's source
        if found := getattr(error, "verify_message", ""):  # aiohttp's class has neither
            return f"{CERTIFICATE_REFUSED}: {found.rstrip('.')}"
        found = getattr(error, "reason", "")
        return f"TLS failed: {found}" if found else ""
    if type(error).__name__ == "CertificateError":  # urllib3's, which checks the host's name itself
        return f"{CERTIFICATE_REFUSED}: {error}"
    if isinstance(error, socket.gaierror):
        return error.strerror or ""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number and number > 0 else ""  # asyncio's own strerror has the address

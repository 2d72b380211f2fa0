"""Why a connection failed, in the words of the system or of TLS: libraries may quote arguments in theirs."""

from __future__ import annotations

import errno
import os
import socket
import ssl

CERTIFICATE_REFUSED = "certificate refused"
# Of descriptors, of local ports for further connections to one address, and of the system's memory
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))


def failure_reason(error: BaseException) -> str:
    """Return the reason of the first error in the chain of causes that has one; without one, the name of `error`."""
    cause: BaseException | None = error
    while cause is not None:
        if reason := _own_reason(cause):
            return reason
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def is_shortage(error: OSError) -> bool:
    """Return True if the process or the machine lacks what a connection needs, so that the peer is not at fault."""
    return error.errno in _SHORTAGES


def shows_nothing(error: OSError) -> bool:
    """Return True if the error says nothing about the peer: a shortage, or no answer from the name servers."""
    return is_shortage(error) or error.errno == socket.EAI_AGAIN


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

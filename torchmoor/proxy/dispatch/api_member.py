"""Check of one member of the runtime API, with SageMaker's messages. The table: api/runtime_members.py."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchmoor.errors import ValidationError

_NAME = rb"^[a-zA-Z0-9](-*[a-zA-Z0-9])*"  # must match the whole value, although it has no $
_SESSION_ID = rb"^(NEW_SESSION)$|" + _NAME + rb"$"


def header_text(value: bytes) -> str:
    """Read a header's value to be shown: as UTF-8 if it is valid, else as Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the request's shape: its API name and what its value must satisfy.

    java_pattern: the pattern as the service model writes it, in Java's syntax. remark: follows each message.
    """

    name: str
    max_length: int
    min_length: int
    pattern: re.Pattern[bytes]
    java_pattern: str
    remark: str = ""

    def find_problem(self, value: bytes) -> str | None:
        """Return SageMaker's message about an invalid value; None if the value is valid."""
        problem = None
        if len(value) > self.max_length:
            problem = f"have length less than or equal to {self.max_length}"
        elif len(value) < self.min_length:
            problem = f"have length greater than or equal to {self.min_length}"
        elif not self.pattern.fullmatch(value):
            problem = f"satisfy regular expression pattern: {self.java_pattern}"
        if problem is None:
            return None
        text = header_text(value)
        shown = text[:64] + ("..." if len(text) > 64 else "")
        return (
            f"1 validation error detected: Value '{shown}' at '{self.name}' failed to satisfy constraint: "
            f"Member must {problem}{self.remark}"
        )

    def check(self, value: bytes) -> None:
        problem = self.find_problem(value)
        if problem is not None:
            raise ValidationError(problem)


def named_member(name: str, max_length: int = 63, pattern: bytes = _NAME, *, min_length: int = 0) -> Member:
    """Make the member of a name: letters, digits and hyphens by default."""
    return Member(name, max_length, min_length, re.compile(pattern), pattern.decode())


# Checked where a session id is verified: once for each id, not for each request.
SESSION_ID_MEMBER = named_member("sessionId", 256, _SESSION_ID)

"""The runtime API's lengths and patterns, as botocore's service model has them. boto3 itself checks none of them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torchmoor.errors import ValidationError
from torchmoor.http.fields import Headers

_NAME = rb"^[a-zA-Z0-9](-*[a-zA-Z0-9])*"  # all of the value has to match, also where the pattern has no end
_COMPONENT_NAME = rb"^[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?$"
_SESSION_ID = rb"^(NEW_SESSION)$|" + _NAME + rb"$"


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the request's shape: its API name and what its value must satisfy.

    told: the pattern in the words of the service model, which is Java's.
    """

    name: str
    max_length: int
    min_length: int
    pattern: re.Pattern[bytes]
    told: str

    def check(self, value: bytes) -> None:
        """Raise ValidationError in the words that the service uses."""
        problem = None
        if len(value) > self.max_length:
            problem = f"have length less than or equal to {self.max_length}"
        elif len(value) < self.min_length:
            problem = f"have length greater than or equal to {self.min_length}"
        elif not self.pattern.fullmatch(value):
            problem = f"satisfy regular expression pattern: {self.told}"
        if problem is not None:
            shown = value[:64].decode("latin-1") + ("..." if len(value) > 64 else "")
            raise ValidationError(
                f"1 validation error detected: Value '{shown}' at '{self.name}' failed to satisfy constraint: "
                f"Member must {problem}"
            )


def _named(name: str, max_length: int = 63, pattern: bytes = _NAME) -> Member:
    return Member(name, max_length, 0, re.compile(pattern), pattern.decode())


def _printable(name: str, max_length: int) -> Member:
    return Member(name, max_length, 1, re.compile(rb"[\x21-\x7e][\x20-\x7e]*"), r"\A\S[\p{Print}]*\z")


def _ascii(name: str) -> Member:
    return Member(name, 1024, 0, re.compile(rb"[\x00-\x7f]*"), r"\p{ASCII}*")


ENDPOINT_NAME = _named("endpointName")
_PREFIX = b"x-amzn-sagemaker-"
SESSION_ID = b"x-amzn-sagemaker-session-id"
INFERENCE_ID = b"x-amzn-sagemaker-inference-id"
TARGET_MODEL = b"x-amzn-sagemaker-target-model"
TARGET_VARIANT = b"x-amzn-sagemaker-target-variant"
PREFIX_AWARE_ID = b"x-amzn-sagemaker-prefix-aware-id"
SAGEMAKER_ACCEPT = b"x-amzn-sagemaker-accept"
_CONTAINER = _PREFIX + b"target-container-hostname"
_EXPLANATIONS = _PREFIX + b"enable-explanations"
_COMPONENT = _PREFIX + b"inference-component"

# What an endpoint of SageMaker may have and none has here: passing it by in silence would answer another question.
NOT_THERE = {
    _CONTAINER: "has one container; leave TargetContainerHostname out.",
    _EXPLANATIONS: "has no explainer; leave EnableExplanations out.",
    _COMPONENT: "has no inference components; leave InferenceComponentName out.",
}

# Checked where it is verified, which is once for each id and not once for each request.
SESSION_ID_MEMBER = _named("sessionId", 256, _SESSION_ID)

MEMBERS: dict[bytes, Member] = {
    b"content-type": _ascii("contentType"),
    b"accept": _ascii("accept"),
    SAGEMAKER_ACCEPT: _ascii("accept"),
    _PREFIX + b"custom-attributes": _ascii("customAttributes"),
    TARGET_MODEL: _printable("targetModel", 1024),
    TARGET_VARIANT: _named("targetVariant"),
    _CONTAINER: _named("targetContainerHostname"),
    INFERENCE_ID: _printable("inferenceId", 64),
    _EXPLANATIONS: Member("enableExplanations", 64, 1, re.compile(rb"[\x20-\x7e]+"), ".*"),
    _COMPONENT: _named("inferenceComponentName", pattern=_COMPONENT_NAME),
    SESSION_ID: SESSION_ID_MEMBER,
    PREFIX_AWARE_ID: _printable("prefixAwareId", 64),
}


def not_there(endpoint: str, members: Collection[bytes]) -> ValidationError:
    """The refusal of a request with one of NOT_THERE."""
    [problem, *_] = [problem for name, problem in NOT_THERE.items() if name in members]
    return ValidationError(f"Endpoint {endpoint} {problem}")


# Never sent on: credentials, what the proxy writes itself, what it owns.
PRIVATE_FIELDS = frozenset((b"authorization", b"cookie", b"x-amz-security-token", INFERENCE_ID))
OWN_PREFIX = b"x-torchmoor-"
INVOCATION_ID = b"amz-sdk-invocation-id"  # the same when a client sends a request again


@dataclass(frozen=True, slots=True)
class Note:
    """What a request's field is to the API, beside passing on to the instance.

    is_read: its value is looked at. problem: why no request with it can be served.
    """

    is_passed: bool
    is_read: bool = False
    problem: str | None = None


_PRIVATE = Note(is_passed=False)
_READ = Note(is_passed=True, is_read=True)


def make_note(name: bytes, value: bytes) -> Note | None:
    """None for a field that just passes on, as most do."""
    is_passed = not (name in PRIVATE_FIELDS or name.startswith(OWN_PREFIX))
    member = MEMBERS.get(name)
    if member is None:
        return _READ if name == INVOCATION_ID else None if is_passed else _PRIVATE
    problem = None
    try:
        if member is SESSION_ID_MEMBER and len(value) <= member.max_length and value.isascii():
            pass  # its pattern is checked where it is verified
        else:
            member.check(value)
    except ValidationError as error:
        problem = error.message
    return Note(is_passed, is_read=True, problem=problem)


@dataclass(slots=True)
class Heard:
    """A request's fields as the API hears them.

    members: by header name, checked except for the session id; with them the SDK's invocation id. lines: what passes
    on, each with its line end.
    """

    members: dict[bytes, bytes]
    lines: list[bytes]


def read_members(headers: Headers) -> Heard:
    """Sort a request's fields. Raises ValidationError."""
    members: dict[bytes, bytes] = {}
    lines: list[bytes] = []
    for field in headers:
        note = field.note
        if note is None:
            lines.append(field.line)
            continue
        if note.is_passed:
            lines.append(field.line)
        if note.is_read:
            if note.problem is not None:
                raise ValidationError(note.problem)
            name = field.name
            if name in members:
                member = MEMBERS.get(name)
                raise ValidationError(f"Member '{member.name if member else name.decode()}' is given twice")
            members[name] = field.value
    return Heard(members, lines)

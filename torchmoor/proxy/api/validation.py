"""Table of the runtime API's members: their lengths, patterns and ranges, as in botocore's service model.

boto3 does not check them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torchmoor.config.launcher import num_form_fields
from torchmoor.errors import ValidationError
from torchmoor.proxy.dispatch.api_member import SESSION_ID_MEMBER, Member, header_text, named_member
from torchmoor.proxy.http.field_names import (
    ACCEPT,
    CONTENT_TYPE,
    CUSTOM_ATTRIBUTES,
    ENABLE_EXPLANATIONS,
    FILENAME,
    INFERENCE_COMPONENT,
    INFERENCE_ID,
    INPUT_LOCATION,
    INVOCATION_ID,
    INVOCATION_TIMEOUT,
    OUTPUT_PATH_EXTENSION,
    OWN_PREFIX,
    PREFIX_AWARE_ID,
    REQUEST_TTL,
    SAGEMAKER_ACCEPT,
    SAGEMAKER_CONTENT_TYPE,
    SESSION_ID,
    TARGET_CONTAINER,
    TARGET_MODEL,
    TARGET_VARIANT,
)
from torchmoor.proxy.http.fields import FieldNote
from torchmoor.proxy.http.head import Layout

_COMPONENT_NAME = rb"^[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?$"
_LOCATION = "^(https|s3)://([^/]+)/?(.*)$"
_LOCATION_FORM = rb"(https|file)://[\x21-\x7e]+|s3://[^\x00-\x20\x7f][^\x00-\x1f\x7f]*"
_LOCATION_REMARK = (
    " (https://, s3://, or file:// for configured directories). In an https or file URL, percent-encode spaces and "
    "characters that are not ASCII; in an S3 key, encode none."
)
_EXTENSION = rb"^(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+$"
_FILENAME = rb"^(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_\.]*$"


@dataclass(frozen=True, slots=True)
class NumberMember:
    """A member that is a whole number."""

    name: str
    least: int
    most: int

    def find_problem(self, value: bytes) -> str | None:
        if not re.fullmatch(rb"[0-9]{1,9}", value):
            shown = header_text(value)[:64]
            return f"1 validation error detected: Value '{shown}' at '{self.name}' must be a whole number"
        problem = ""
        if int(value) < self.least:
            problem = f"have value greater than or equal to {self.least}"
        elif int(value) > self.most:
            problem = f"have value less than or equal to {self.most}"
        if not problem:
            return None
        return (
            f"1 validation error detected: Value '{int(value)}' at '{self.name}' failed to satisfy constraint: "
            f"Member must {problem}"
        )


def _printable(name: str, max_length: int) -> Member:
    return Member(name, max_length, 1, re.compile(rb"[\x21-\x7e][\x20-\x7e]*"), r"\A\S[\p{Print}]*\z")


def _ascii(name: str) -> Member:
    return Member(name, 1024, 0, re.compile(rb"[\x00-\x7f]*"), r"\p{ASCII}*")


ENDPOINT_NAME = named_member("endpointName")

# Features of SageMaker's endpoints that are not supported. They are refused: ignoring them would change the answer.
NOT_THERE = {
    TARGET_CONTAINER: "has one container; leave TargetContainerHostname out.",
    ENABLE_EXPLANATIONS: "has no explainer; leave EnableExplanations out.",
    INFERENCE_COMPONENT: "has no inference components; leave InferenceComponentName out.",
}

MEMBERS: dict[bytes, Member | NumberMember] = {
    CONTENT_TYPE: _ascii("contentType"),
    ACCEPT: _ascii("accept"),
    SAGEMAKER_ACCEPT: _ascii("accept"),
    CUSTOM_ATTRIBUTES: _ascii("customAttributes"),
    TARGET_MODEL: _printable("targetModel", 1024),
    TARGET_VARIANT: named_member("targetVariant"),
    TARGET_CONTAINER: named_member("targetContainerHostname"),
    INFERENCE_ID: _printable("inferenceId", 64),
    ENABLE_EXPLANATIONS: Member("enableExplanations", 64, 1, re.compile(rb"[\x20-\x7e]+"), ".*"),
    INFERENCE_COMPONENT: named_member("inferenceComponentName", pattern=_COMPONENT_NAME),
    SESSION_ID: SESSION_ID_MEMBER,
    PREFIX_AWARE_ID: _printable("prefixAwareId", 64),
    SAGEMAKER_CONTENT_TYPE: _ascii("contentType"),
    INPUT_LOCATION: Member("inputLocation", 1024, 1, re.compile(_LOCATION_FORM), _LOCATION, _LOCATION_REMARK),
    OUTPUT_PATH_EXTENSION: Member("s3OutputPathExtension", 512, 1, re.compile(_EXTENSION), _EXTENSION.decode()),
    FILENAME: Member("filename", 32, 1, re.compile(_FILENAME), _FILENAME.decode()),
    REQUEST_TTL: NumberMember("requestTTLSeconds", 60, 21_600),
    INVOCATION_TIMEOUT: NumberMember("invocationTimeoutSeconds", 1, 3_600),
}


def not_there(endpoint: str, members: Collection[bytes]) -> ValidationError:
    """Refuse a request with one of NOT_THERE."""
    [problem, *_] = [problem for name, problem in NOT_THERE.items() if name in members]
    return ValidationError(f"Endpoint {endpoint} {problem}")


# Never sent on: credentials, and the fields that the proxy writes itself.
PRIVATE_FIELDS = frozenset((b"authorization", b"cookie", b"x-amz-security-token", INFERENCE_ID))


def make_note(name: bytes) -> FieldNote:
    """Return how a request's fields of that name are treated."""
    is_passed = not (name in PRIVATE_FIELDS or name.startswith(OWN_PREFIX))
    member = MEMBERS.get(name)
    if member is None:
        return FieldNote(is_passed=is_passed, is_read=name == INVOCATION_ID)
    find_problem = _find_problem_of_session_id if member is SESSION_ID_MEMBER else member.find_problem
    return FieldNote(is_passed=is_passed, is_read=True, find_problem=find_problem)


def _find_problem_of_session_id(value: bytes) -> str | None:
    """Check only the length; the pattern is checked where the id is verified."""
    if len(value) <= SESSION_ID_MEMBER.max_length and value.isascii():
        return None
    return SESSION_ID_MEMBER.find_problem(value)


def check_members(layout: Layout) -> None:
    """Raise ValidationError if a request's members do not fit the API; session ids are checked later."""
    if layout.is_sound:
        return
    if layout.problem is not None:
        raise ValidationError(layout.problem)
    name = layout.repeated or b""
    member = MEMBERS.get(name)
    raise ValidationError(f"Member '{member.name if member else name.decode()}' is given twice")


def check_form(content_type: bytes | None, body: bytes, max_fields: int) -> None:
    """Raise ValidationError if the body is a form of more fields."""
    num_fields = num_form_fields(content_type, body)
    if num_fields > max_fields:
        raise ValidationError(
            f"The form has {num_fields} fields, more than {max_fields} (limits.max_form_fields). "
            "Send JSON as application/json."
        )

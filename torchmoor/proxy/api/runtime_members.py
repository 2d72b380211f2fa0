"""The members of the runtime API's requests that are header fields: a row for each, and their checks.

Lengths, patterns and ranges are those of botocore's service model, which boto3 does not check. The names of fields that
layers below read are also in http/field_names.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torchmoor.errors import ValidationError
from torchmoor.proxy.dispatch.api_member import SESSION_ID_MEMBER, Member, header_text, named_member
from torchmoor.proxy.http.field_names import CREDENTIALS, INFERENCE_ID, INVOCATION_ID, OWN_PREFIX
from torchmoor.proxy.http.fields import FieldNote
from torchmoor.proxy.http.head import Layout
from torchmoor.wire import headers

_LOCATION_FORM = rb"(https|file)://[\x21-\x7e]+|s3://[^\x00-\x20\x7f][^\x00-\x1f\x7f]*"
_LOCATION_REMARK = (
    " (https://, s3://, or file:// for configured directories). In an https or file URL, percent-encode spaces and "
    "characters that are not ASCII; in an S3 key, encode none."
)


@dataclass(frozen=True, slots=True)
class NumberMember:
    """A member that is a whole number."""

    name: str
    least: int
    most: int

    def find_problem(self, value: bytes) -> str | None:
        if not re.fullmatch(rb"[0-9]+", value):
            shown = header_text(value)[:64]
            return f"1 validation error detected: Value '{shown}' at '{self.name}' must be a whole number"
        digits = value.lstrip(b"0") or b"0"
        number = int(digits) if len(digits) < 10 else self.most + 1  # int() raises an error for thousands of digits
        if self.least <= number <= self.most:
            return None
        word, bound = ("greater", self.least) if number < self.least else ("less", self.most)
        return (
            f"1 validation error detected: Value '{digits.decode()[:64]}' at '{self.name}' failed to satisfy "
            f"constraint: Member must have value {word} than or equal to {bound}"
        )


MEMBERS: dict[bytes, Member | NumberMember] = {}
# Members that the API reference names, by operation: of the two that answer at once, and of InvokeEndpointAsync.
OF_INVOKE: list[bytes] = []
OF_ASYNC: list[bytes] = []
STORED: dict[str, bytes] = {}  # those that an AsyncRequest keeps as they are, by its fields
# Features of SageMaker's endpoints that are not supported. They are refused: ignoring them would change the answer.
NOT_THERE: dict[bytes, str] = {}


def _row(
    name: str, member: Member | NumberMember, *operations: list[bytes], stored: str = "", refusal: str = ""
) -> bytes:
    """Add a member to the tables; return its name as a header field. stored: the field of AsyncRequest."""
    field = name.encode()
    MEMBERS[field] = member
    for operation in operations:
        operation.append(field)
    if stored:
        STORED[stored] = field
    if refusal:
        NOT_THERE[field] = refusal
    return field


def _printable(name: str, max_length: int) -> Member:
    return Member(name, max_length, 1, re.compile(rb"[\x21-\x7e][\x20-\x7e]*"), r"\A\S[\p{Print}]*\z")


def _ascii(name: str) -> Member:
    return Member(name, 1024, 0, re.compile(rb"[\x00-\x7f]*"), r"\p{ASCII}*")


ENDPOINT_NAME = named_member("endpointName")  # in the path

_row("content-type", _ascii("contentType"))
_row("accept", _ascii("accept"))
SAGEMAKER_CONTENT_TYPE = _row("x-amzn-sagemaker-content-type", _ascii("contentType"), OF_ASYNC, stored="content_type")
SAGEMAKER_ACCEPT = _row(headers.ACCEPT, _ascii("accept"), OF_ASYNC, stored="accept")
_row(headers.CUSTOM_ATTRIBUTES, _ascii("customAttributes"), OF_INVOKE, OF_ASYNC, stored="custom_attributes")
TARGET_MODEL = _row(headers.TARGET_MODEL, _printable("targetModel", 1024), OF_INVOKE)
TARGET_VARIANT = _row("x-amzn-sagemaker-target-variant", named_member("targetVariant"), OF_INVOKE)
_row(headers.INFERENCE_ID, _printable("inferenceId", 64), OF_INVOKE, OF_ASYNC)
_row(headers.SESSION_ID, SESSION_ID_MEMBER, OF_INVOKE)
PREFIX_AWARE_ID = _row("x-amzn-sagemaker-prefix-aware-id", _printable("prefixAwareId", 64), OF_INVOKE)
INPUT_LOCATION = _row(
    "x-amzn-sagemaker-inputlocation",
    Member("inputLocation", 1024, 1, re.compile(_LOCATION_FORM), "^(https|s3)://([^/]+)/?(.*)$", _LOCATION_REMARK),
    OF_ASYNC,
)
OUTPUT_PATH_EXTENSION = _row(
    "x-amzn-sagemaker-s3outputpathextension",
    named_member("s3OutputPathExtension", 512, rb"^(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+$", min_length=1),
    OF_ASYNC,
)
FILENAME = _row(
    "x-amzn-sagemaker-filename",
    named_member("filename", 32, rb"^(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_\.]*$", min_length=1),
    OF_ASYNC,
)
_row("x-amzn-sagemaker-requestttlseconds", NumberMember("requestTTLSeconds", 60, 21_600), OF_ASYNC, stored="ttl_s")
_row(
    "x-amzn-sagemaker-invocationtimeoutseconds",
    NumberMember("invocationTimeoutSeconds", 1, 3_600),
    OF_ASYNC,
    stored="timeout_s",
)
_row(
    "x-amzn-sagemaker-target-container-hostname",
    named_member("targetContainerHostname"),
    refusal="has one container; leave TargetContainerHostname out.",
)
_row(
    "x-amzn-sagemaker-enable-explanations",
    Member("enableExplanations", 64, 1, re.compile(rb"[\x20-\x7e]+"), ".*"),
    refusal="has no explainer; leave EnableExplanations out.",
)
_row(
    "x-amzn-sagemaker-inference-component",
    named_member("inferenceComponentName", pattern=rb"^[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?$"),
    refusal="has no inference components; leave InferenceComponentName out.",
)


def not_there(endpoint: str, members: Collection[bytes]) -> ValidationError:
    """Refuse a request with one of NOT_THERE."""
    [problem, *_] = [problem for name, problem in NOT_THERE.items() if name in members]
    return ValidationError(f"Endpoint {endpoint} {problem}")


# Never forwarded: credentials, and the fields that the proxy writes itself.
PRIVATE_FIELDS = CREDENTIALS | {INFERENCE_ID}


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

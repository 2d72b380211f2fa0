"""The runtime API's patterns and lengths, held against botocore's service model."""

from typing import get_type_hints

import botocore.session
import pytest

from torchmoor.async_inference.request import AsyncRequest
from torchmoor.errors import ValidationError
from torchmoor.proxy.api.runtime_members import (
    ENDPOINT_NAME,
    MEMBERS,
    OF_ASYNC,
    STORED,
    NumberMember,
    check_members,
    make_note,
)
from torchmoor.proxy.http.head import Head, HeadBook


def test_lengths_are_those_of_the_service_model() -> None:
    model = botocore.session.get_session().get_service_model("sagemaker-runtime")

    assert (ENDPOINT_NAME.max_length, ENDPOINT_NAME.min_length) == (63, 0)
    for operation in ("InvokeEndpoint", "InvokeEndpointWithResponseStream", "InvokeEndpointAsync"):
        for name, shape in model.operation_model(operation).input_shape.members.items():
            if shape.serialization.get("location") != "header":
                continue
            member, limits = MEMBERS[shape.serialization["name"].lower().encode()], shape.metadata
            assert name.lower() == member.name.lower() or name == "InferenceComponentName"
            if isinstance(member, NumberMember):
                assert (member.least, member.most) == (limits["min"], limits["max"]), name
                continue
            assert (member.min_length, member.max_length) == (limits.get("min", 0), limits["max"]), name
            if name != "SessionId":  # which may be NEW_SESSION in the streamed operation too
                assert limits["pattern"] == member.java_pattern, name


def test_the_asynchronous_operation_has_the_members_of_the_service_model() -> None:
    model = botocore.session.get_session().get_service_model("sagemaker-runtime")
    shapes = [each.serialization for each in model.operation_model("InvokeEndpointAsync").input_shape.members.values()]
    types = get_type_hints(AsyncRequest)

    assert {each["name"].lower().encode() for each in shapes if each.get("location") == "header"} == {*OF_ASYNC}
    for field, name in STORED.items():
        assert types[field] is (float if isinstance(MEMBERS[name], NumberMember) else str)


@pytest.mark.parametrize("name", ["a", "A-1", "a--b", "x" * 63])
def test_endpoint_names_in_form_pass(name: str) -> None:
    """^[a-zA-Z0-9](-*[a-zA-Z0-9])*$"""
    ENDPOINT_NAME.check(name.encode())


@pytest.mark.parametrize("name", ["", "-a", "a-", "a_b", "a b", "x" * 64, "ä", "a\n", "a" * 40 + "!"])
def test_endpoint_names_out_of_form_are_refused(name: str) -> None:
    """The message names member and value in SageMaker's wording."""
    with pytest.raises(ValidationError, match=r"(?s)1 validation error detected: Value .* at 'endpointName'"):
        ENDPOINT_NAME.check(name.encode())


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_refused_value_is_shown_as_it_was_written(encoding: str) -> None:
    """A refused value is shown as the client wrote it, in UTF-8 or, as http.client may send it, in Latin-1."""
    value = "café".encode(encoding)

    assert "Value 'café' at 'inferenceId'" in (MEMBERS[b"x-amzn-sagemaker-inference-id"].find_problem(value) or "")
    assert "Value 'café' at 'requestTTLSeconds'" in (
        MEMBERS[b"x-amzn-sagemaker-requestttlseconds"].find_problem(value) or ""
    )


@pytest.mark.parametrize(("value", "shown"), [(b"1" * 10, "1" * 10), (b"9" * 5000, "9" * 64), (b"0021601", "21601")])
def test_a_number_above_its_range_is_refused_with_the_range(value: bytes, shown: str) -> None:
    problem = MEMBERS[b"x-amzn-sagemaker-requestttlseconds"].find_problem(value)

    assert problem == (
        f"1 validation error detected: Value '{shown}' at 'requestTTLSeconds' failed to satisfy constraint: "
        "Member must have value less than or equal to 21600"
    )
    assert MEMBERS[b"x-amzn-sagemaker-requestttlseconds"].find_problem(b"0000021600") is None


def test_members_are_read_once_and_in_ascii() -> None:
    """A member that is sent twice is ambiguous and refused; members are ASCII."""
    header = b"x-amzn-sagemaker-session-id"

    def heard(*lines: bytes) -> bytes | None:
        fields, layout = HeadBook(make_note).read([*lines])
        check_members(layout)
        return Head(fields, layout).find(header)

    assert heard(b"other: \xff", header + b": NEW_SESSION") == b"NEW_SESSION"
    with pytest.raises(ValidationError, match="twice"):
        heard(header + b": a", header + b": a")
    with pytest.raises(ValidationError, match="ASCII"):
        heard(b"accept: \xff")

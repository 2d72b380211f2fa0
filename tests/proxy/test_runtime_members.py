"""Every member of InvokeEndpoint and InvokeEndpointWithResponseStream, sent by the real boto3 client."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import answering
from torchmoor.config.routing import VariantSettings

OPERATIONS = ("invoke_endpoint", "invoke_endpoint_with_response_stream")
ONLY_WHOLE = ("TargetModel", "EnableExplanations")  # members that the streamed operation's shape does not have
NAME = "^[a-zA-Z0-9](-*[a-zA-Z0-9])*"
PRINTABLE = r"\A\S[\p{Print}]*\z"
ASCII = r"\p{ASCII}*"
MAX_BODY_BYTES = 6_291_456

PASSED = [
    ("ContentType", "content-type", ("application/json", "x" * 1024)),
    ("Accept", "accept", ("text/plain; q=0.5, */*", "x" * 1024)),
    ("CustomAttributes", "x-amzn-sagemaker-custom-attributes", ("a=1; b=2", "x" * 1024)),
    ("TargetVariant", "x-amzn-sagemaker-target-variant", ("AllTraffic",)),
    ("InferenceId", "x-amzn-sagemaker-inference-id", ("i", "a b", "~" * 64)),
    ("PrefixAwareId", "x-amzn-sagemaker-prefix-aware-id", ("p", "a b", "!" * 64)),
    ("SessionId", "x-amzn-sagemaker-session-id", ("NEW_SESSION", make_session_id("a"))),
]
REFUSED = [
    ("EndpointName", "no_name", NAME),
    ("EndpointName", "-a", NAME),
    ("EndpointName", "x" * 64, 63),
    ("ContentType", "x" * 1025, 1024),
    ("ContentType", "ä", ASCII),
    ("Accept", "x" * 1025, 1024),
    ("CustomAttributes", "x" * 1025, 1024),
    ("CustomAttributes", "ä", ASCII),
    ("TargetVariant", "no_name", NAME),
    ("TargetVariant", "x" * 64, 63),
    ("TargetModel", "x" * 1025, 1024),
    ("TargetModel", "ä", PRINTABLE),
    ("TargetContainerHostname", "no_name", NAME),
    ("TargetContainerHostname", "x" * 64, 63),
    ("InferenceId", "x" * 65, 64),
    ("InferenceId", "ä", PRINTABLE),
    ("PrefixAwareId", "x" * 65, 64),
    ("PrefixAwareId", "ä", PRINTABLE),
    ("EnableExplanations", "x" * 65, 64),
    ("InferenceComponentName", "x" * 64, 63),
    ("InferenceComponentName", "-a", r"^[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?$"),
    ("SessionId", "x" * 257, 256),
    ("SessionId", "no_name", f"^(NEW_SESSION)$|{NAME}$"),
    ("SessionId", "NEW_SESSION_", f"^(NEW_SESSION)$|{NAME}$"),
]
NOT_THERE = [
    ("TargetModel", "model-1.tar.gz", "is not a multi-model endpoint"),
    ("TargetContainerHostname", "second", "has one container; leave TargetContainerHostname out"),
    ("InferenceComponentName", "component-1", "has no inference components; leave InferenceComponentName out"),
    ("EnableExplanations", "`true`", "has no explainer; leave EnableExplanations out"),
    ("TargetVariant", "Other", "Variant Other not found for endpoint llava"),
    ("EndpointName", "other", "Endpoint other of account 000000000000 not found"),
    ("SessionId", "made-up", "session id is not valid"),
]


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def call(stage: Stage, operation: str, **arguments: Any) -> Any:
    """Return the operation's answer with its whole body."""
    answer = getattr(stage.client(), operation)(**{"EndpointName": "llava", "Body": b"{}", **arguments})
    if operation == OPERATIONS[0]:
        answer["Body"] = answer["Body"].read()
    else:
        answer["Body"] = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])
    return answer


def refusal(stage: Stage, operation: str, **arguments: Any) -> str:
    """Return the ValidationError's message; assert that no instance was asked."""
    with pytest.raises(ClientError) as caught:
        call(stage, operation, **arguments)
    response = caught.value.response
    assert (response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]) == (400, "ValidationError")
    assert stage.a.received + stage.b.received == []
    return str(response["Error"]["Message"])


def test_every_member_that_is_served_reaches_the_instance(stage: Stage, operation: str) -> None:
    """Each member reaches the instance in the same header of both operations, up to its longest value."""
    for member, header, values in PASSED:
        for value in values:
            call(stage, operation, **{member: value})

            [seen] = stage.a.received + stage.b.received
            assert seen.headers[header] == value, member
            stage.a.received.clear()
            stage.b.received.clear()


def test_every_member_that_breaks_its_shape_is_refused(stage: Stage, operation: str) -> None:
    """The error has SageMaker's wording: member, value and constraint; boto3 checks none of these."""
    for member, value, rule in REFUSED:
        if member in ONLY_WHOLE and operation != OPERATIONS[0]:
            continue
        message = refusal(stage, operation, **{member: value})

        must = f"have length less than or equal to {rule}" if isinstance(rule, int) else f"pattern: {rule}"
        name = member[0].lower() + member[1:]
        assert message.startswith("1 validation error detected: Value '"), message
        assert f" at '{name}' failed to satisfy constraint: Member must " in message
        assert message.endswith(must), message


def test_what_an_endpoint_does_not_have_is_refused_by_name(stage: Stage, operation: str) -> None:
    """A member that the endpoint does not support is refused instead of being ignored silently."""
    for member, value, words in NOT_THERE:
        if member in ONLY_WHOLE and operation != OPERATIONS[0]:
            continue
        assert words in refusal(stage, operation, **{member: value})


def test_body_limit_is_the_apis_own(stage: Stage, operation: str) -> None:
    """A body of 6,291,456 bytes is accepted, and one byte more is not."""
    longest = bytes(range(256)) * (MAX_BODY_BYTES // 256)

    call(stage, operation, Body=longest)

    [seen] = stage.a.received + stage.b.received
    assert seen.body == longest
    stage.a.received.clear()
    stage.b.received.clear()
    assert f"limit of {MAX_BODY_BYTES} bytes" in refusal(stage, operation, Body=longest + b"x")


def test_every_member_of_the_answer_is_told(make_stage: MakeStage, operation: str) -> None:
    """Each member of the answer has boto3's name, or its header if the streamed operation's shape lacks it."""
    stage = make_stage(variants=(VariantSettings(model="llava", name="Blue"),), names=("a",))
    opened = "ts-seq-x; Expires=2030-01-01T00:00:00Z"
    stage.a.behave = answering(
        headers={
            "Content-Type": "text/plain; charset=utf-8",
            "X-Amzn-SageMaker-Custom-Attributes": "mine",
            "X-Amzn-SageMaker-New-Session-Id": opened,
            "X-Amzn-SageMaker-Closed-Session-Id": "ts-seq-y",
            "X-Torchmoor-Prefill-Tokens": "7",
        },
        body="grün".encode(),
    )

    answer = call(stage, operation)

    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert answer["Body"].decode() == "grün"
    assert answer["ContentType"] == "text/plain; charset=utf-8"
    assert answer["CustomAttributes"] == "mine"
    assert answer["InvokedProductionVariant"] == "Blue"
    assert answer.get("NewSessionId", opened) == headers["x-amzn-sagemaker-new-session-id"] == opened
    assert answer.get("ClosedSessionId", "ts-seq-y") == headers["x-amzn-sagemaker-closed-session-id"] == "ts-seq-y"
    assert headers["x-torchmoor-prefill-tokens"] == "7"
    assert headers["x-torchmoor-instance"] == "a"
    assert answer["ResponseMetadata"]["RequestId"] == headers["x-amzn-requestid"]

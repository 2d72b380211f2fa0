"""Sessions with the bodies of TGI and OpenAI on real TorchServe, by boto3 and by OpenAI's own client."""

import json
from typing import Any

import openai
import pytest

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sessions import ENDPOINT, refusal

pytestmark = pytest.mark.torchserve
QUESTION = "What color is the circle?"
SHAPE = "What shape is this?"


def seeing(question: str) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": data_url(draw("circle", "red"))}}
    return {"role": "user", "content": [picture, {"type": "text", "text": question}]}


def test_boto3_opens_a_session_with_any_body(fleet: Fleet) -> None:
    """NEW_SESSION answers the first question; turns of each dialect go to its instance and know what came before."""
    client = fleet.client()

    def invoke(session_id: str, body: dict[str, Any]) -> dict[str, Any]:
        return client.invoke_endpoint(
            EndpointName=ENDPOINT,
            SessionId=session_id,
            ContentType="application/json",
            CustomAttributes="trace=7",
            Body=json.dumps(body),
        )

    opened = invoke("NEW_SESSION", {"messages": [seeing(QUESTION)], "max_tokens": 16})
    sid, _, expires = opened["NewSessionId"].partition("; Expires=")
    asked = invoke(sid, {"inputs": SHAPE, "parameters": {"max_new_tokens": 16}})
    again = invoke(sid, {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16})

    assert expires.endswith("Z")
    assert "red" in json.load(opened["Body"])["choices"][0]["message"]["content"]
    assert "circle" in json.load(asked["Body"])[0]["generated_text"]
    assert "red" in json.load(again["Body"])["choices"][0]["message"]["content"]
    assert {answer["CustomAttributes"] for answer in (opened, asked, again)} == {"trace=7"}
    headers = [answer["ResponseMetadata"]["HTTPHeaders"] for answer in (opened, asked, again)]
    assert {each["x-torchmoor-instance"] for each in headers} == set(fleet.holders(sid))
    assert headers[2]["x-torchmoor-cache-tier"] == "kv"
    invoke(sid, {"type": "close_session"})
    assert refusal(lambda: invoke(sid, {"inputs": SHAPE}))[0] == "ValidationError"


def test_boto3_streams_the_first_answer_of_a_session(fleet: Fleet) -> None:
    """The streamed operation returns the new id in its head, as far as botocore's model has no member for it."""
    client = fleet.client()

    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=ENDPOINT,
        SessionId="NEW_SESSION",
        ContentType="application/json",
        CustomAttributes="trace=8",
        Body=json.dumps({"messages": [seeing(QUESTION)], "stream": True}),
    )
    text = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])

    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    sid = headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]
    assert text.endswith(b"data: [DONE]\n\n")
    assert answer["CustomAttributes"] == "trace=8"
    assert fleet.holders(sid) == [headers["x-torchmoor-instance"]]


def test_openais_client_repeats_its_whole_list(fleet: Fleet) -> None:
    """With the session's header, a growing list of messages is one conversation, and a changed one is refused."""
    session = "x-amzn-sagemaker-session-id"
    messages: list[Any] = [seeing(QUESTION)]
    with openai.OpenAI(base_url=f"{fleet.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        create = gpt.chat.completions.with_raw_response.create
        opened = create(model=ENDPOINT, messages=messages, extra_headers={session: "NEW_SESSION"})
        sid = opened.headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]
        answer = opened.parse().choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": SHAPE}]
        followed = create(model=ENDPOINT, messages=messages, extra_headers={session: sid})
        changed = [*messages, {"role": "assistant", "content": "A square."}, messages[-1]]
        with pytest.raises(openai.BadRequestError, match="send the question alone"):
            create(model=ENDPOINT, messages=changed, extra_headers={session: sid})

    assert "red" in str(answer)
    assert "circle" in str(followed.parse().choices[0].message.content)
    assert followed.headers["x-torchmoor-instance"] == opened.headers["x-torchmoor-instance"]
    assert followed.headers["x-torchmoor-cache-tier"] == "kv"

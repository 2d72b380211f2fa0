"""Sessions on real TorchServe, driven by boto3: open, ask repeatedly, stream, close."""

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.torchserve.conftest import ROOT, Fleet
from tests.torchserve.drawings import data_url, draw
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve
ENDPOINT = "llava"
SAMPLES = ROOT / "models" / "tiny-llava" / "samples"


@dataclass
class Chat:
    """A session, used as by a boto3 user."""

    client: Any
    id: str

    def invoke(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.client.invoke_endpoint(
            EndpointName=ENDPOINT, ContentType="application/json", SessionId=self.id, Body=json.dumps(body)
        )

    def ask(self, question: str, **more: Any) -> str:
        answer = self.invoke({"type": "send_text_prompt", "session_id": self.id, "prompt_text": question, **more})
        said: dict[str, str] = json.load(answer["Body"])
        assert list(said) == ["response_text"]
        return said["response_text"]

    def stream(self, question: str, **more: Any) -> list[bytes]:
        answer = self.client.invoke_endpoint_with_response_stream(
            EndpointName=ENDPOINT,
            ContentType="application/json",
            SessionId=self.id,
            Body=json.dumps({"type": "send_text_prompt", "prompt_text": question, "stream": True, **more}),
        )
        return [event["PayloadPart"]["Bytes"] for event in answer["Body"]]

    def close(self) -> dict[str, Any]:
        return self.invoke({"type": "close_session", "session_id": self.id})


def open_session(client: Any, **fields: Any) -> Chat:
    answer = client.invoke_endpoint(
        EndpointName=ENDPOINT,
        ContentType="application/json",
        SessionId="NEW_SESSION",
        Body=json.dumps({"type": "start_session", **fields}),
    )
    session_id, _, expires = answer["NewSessionId"].partition("; Expires=")
    assert expires.endswith("Z")
    assert json.load(answer["Body"]) == {"session_id": session_id}
    return Chat(client, session_id)


def refusal(call: Any) -> tuple[str, str]:
    """Return the error code and message that boto3 raises."""
    with pytest.raises(ClientError) as caught:
        call()
    return caught.value.response["Error"]["Code"], caught.value.response["Error"]["Message"]


@pytest.fixture
def client(fleet: Fleet) -> Any:
    return fleet.client()


def test_answers_are_right_without_sending_the_image_again(client: Any, fleet: Fleet) -> None:
    """All questions of a sample, in one session per image, get the answers of the model card."""
    samples = json.loads((SAMPLES / "questions.json").read_text())
    chats: dict[str, Chat] = {}
    before = sum(fleet.status(i["name"])["images"]["received"] for i in fleet.instances())

    for sample in samples:
        if sample["image"] not in chats:
            chats[sample["image"]] = open_session(client, image=data_url((SAMPLES / sample["image"]).read_bytes()))
        assert chats[sample["image"]].ask(sample["question"]) == sample["answer"]

    received = sum(fleet.status(i["name"])["images"]["received"] for i in fleet.instances()) - before
    assert received == len(chats)
    for chat in chats.values():
        chat.close()


def test_two_sessions_do_not_mix(client: Any) -> None:
    """Two open sessions with different images, used in turn, answer about their own image."""
    red = open_session(client, image=data_url(draw("circle", "red")))
    blue = open_session(client, image=data_url(draw("square", "blue")))

    for _ in range(2):
        assert "red" in red.ask("What color is the circle?")
        assert "blue" in blue.ask("What color is the square?")

    red.close()
    blue.close()


def test_sessions_spread_and_follow_ups_stay(client: Any, fleet: Fleet) -> None:
    """New sessions go to both instances; each follow-up is computed by the one that holds the session.

    Instances report their capacity at different times, so one may get several sessions in a row.
    """
    chats: dict[str, Chat] = {}
    for _ in range(64):
        chat = open_session(client, image=data_url(draw("circle", "green")))
        (name,) = fleet.holders(chat.id)
        if name in chats:
            chat.close()
        chats.setdefault(name, chat)
        if len(chats) == 2:
            break

    assert len(chats) == 2
    for name, chat in chats.items():
        before = {i["name"]: fleet.status(i["name"])["turns"]["finished"] for i in fleet.instances()}
        for _ in range(3):
            chat.ask("What color is the circle?")
        after = {i["name"]: fleet.status(i["name"])["turns"]["finished"] for i in fleet.instances()}
        assert {other: after[other] - before[other] for other in after} == {
            other: 3 if other == name else 0 for other in after
        }
        chat.close()
        assert fleet.holders(chat.id) == []


def test_follow_up_prefills_only_its_own_tokens(client: Any) -> None:
    """The receipt of the second question counts a few tokens, without the image and the history."""
    chat = open_session(client, image=data_url(draw("circle", "red")))
    receipts = []
    for question in ("What color is the circle?", "How many objects are there?"):
        answer = chat.invoke({"type": "send_text_prompt", "prompt_text": question})
        receipts.append(answer["ResponseMetadata"]["HTTPHeaders"])

    assert receipts[0]["x-torchmoor-cache-tier"] == "features"
    assert receipts[1]["x-torchmoor-cache-tier"] == "kv"
    assert int(receipts[1]["x-torchmoor-prefill-tokens"]) < 20 < int(receipts[1]["x-torchmoor-context-tokens"])
    chat.close()


def test_streamed_text_equals_unstreamed_text(client: Any) -> None:
    """The concatenated event stream equals the answer of the other operation."""
    whole = open_session(client, image=data_url(draw("circle", "red")))
    streamed = open_session(client, image=data_url(draw("circle", "red")))

    for question in ("Describe the image.", "What color is the circle?"):
        parts = streamed.stream(question)
        assert b"".join(parts).decode() == whole.ask(question)
    # On a busy machine a short answer may be ready before its first piece is fetched.
    wait_until(lambda: len(streamed.stream("Describe the image.")) > 1, "an answer in several parts")

    whole.close()
    streamed.close()


def test_stream_speaks_tgi_when_asked(client: Any) -> None:
    """An Accept of text/event-stream gets TGI's events, the last with the generated text."""
    chat = open_session(client, image=data_url(draw("circle", "red")))
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=ENDPOINT,
        ContentType="application/json",
        Accept="text/event-stream",
        SessionId=chat.id,
        Body=json.dumps({"type": "send_text_prompt", "prompt_text": "What color is the circle?", "stream": True}),
    )
    assert answer["ContentType"] == "text/event-stream"
    text = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]).decode()
    events = [json.loads(line.removeprefix("data:")) for line in text.split("\n") if line.startswith("data:")]

    assert "".join(e["token"]["text"] for e in events) == events[-1]["generated_text"]
    assert "red" in events[-1]["generated_text"]
    chat.close()


def test_close_ends_the_session(client: Any) -> None:
    """Closing returns the session's id; the next question gets an error that says that the session was closed."""
    chat = open_session(client, image=data_url(draw("circle", "red")))
    answer = chat.close()

    assert answer["ClosedSessionId"] == chat.id
    assert json.load(answer["Body"]) == {"success": True}
    code, message = refusal(lambda: chat.ask("What color is the circle?"))
    assert code == "ValidationError"
    assert "closed" in message


def test_expired_session_says_so(client: Any) -> None:
    """After its expiry every question gets an error that says so."""
    chat = open_session(client, image=data_url(draw("circle", "red")), ttl_s=1)
    message, deadline = "", time.monotonic() + 20
    while not message and time.monotonic() < deadline:
        try:
            chat.ask("What color is the circle?")
        except ClientError as error:
            message = error.response["Error"]["Message"]

    assert "expired" in message


def test_second_image_in_a_session(client: Any) -> None:
    """A question may contain another image; the conversation continues."""
    chat = open_session(client, image=data_url(draw("circle", "red")))
    chat.ask("What color is the circle?")
    chat.ask("What do you see?", images=[data_url(draw("square", "blue"))])
    answer = chat.invoke({"type": "send_text_prompt", "prompt_text": "What color is it?"})

    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-cache-tier"] == "kv"
    chat.close()


def test_image_is_fetched_from_an_allowed_address(client: Any, picture_server: str) -> None:
    """A URL in `path`, as in the AWS sample, opens a session."""
    chat = open_session(client, path=f"{picture_server}/circle.png")

    assert "red" in chat.ask("What color is the circle?")
    chat.close()


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"{not json", "ModelError", "(400)"),
        (b'{"type": "nonsense"}', "ModelError", "(400)"),
        (b'{"type": "start_session", "image": "aGVsbG8="}', "ModelError", "(415)"),
        (b'{"type": "start_session", "path": "http://10.0.0.1/x.png"}', "ModelError", "(403)"),
        (b'{"type": "start_session", "path": "http://169.254.169.254/latest"}', "ModelError", "(403)"),
        (b'{"type": "start_session", "path": "file:///etc/passwd"}', "ModelError", "(403)"),
        (b'{"type": "start_session", "path": "http://127.0.0.1:9/x.png"}', "ModelError", "(502)"),
        (b'{"type": "start_session", "path": "http://no-such-host.invalid/x.png"}', "ModelError", "(502)"),
    ],
)
def test_bad_opening_is_told_why(client: Any, body: bytes, code: str, words: str) -> None:
    """A handler's refusal reaches boto3 as a ModelError with the handler's status, and the worker continues."""
    assert (code, True) == (
        (
            found := refusal(
                lambda: client.invoke_endpoint(
                    EndpointName=ENDPOINT, ContentType="application/json", SessionId="NEW_SESSION", Body=body
                )
            )
        )[0],
        words in found[1],
    )
    open_session(client, image=data_url(draw("circle", "red"))).close()


def test_too_large_a_body_is_refused(client: Any) -> None:
    """A body beyond the API's limit of 6 MiB is refused."""
    code, _ = refusal(
        lambda: client.invoke_endpoint(EndpointName=ENDPOINT, ContentType="image/png", Body=b"x" * (7 << 20))
    )
    assert code == "ValidationError"


def test_unknown_and_forged_sessions_are_refused(client: Any) -> None:
    """An id that was never minted, or one with a changed character, is a ValidationError."""
    chat = open_session(client, image=data_url(draw("circle", "red")))
    last = "a" if chat.id[-1] != "a" else "b"

    for forged in ("no-such-session", chat.id[:-1] + last):
        assert refusal(lambda forged=forged: Chat(client, forged).ask("What color is it?"))[0] == "ValidationError"
    chat.close()


def test_unknown_endpoint_is_refused(client: Any) -> None:
    """The error has SageMaker's wording."""
    code, message = refusal(lambda: client.invoke_endpoint(EndpointName="nobody", Body=b"{}"))
    assert code == "ValidationError"
    assert "Endpoint nobody of account" in message  # prose: allow


def test_many_sessions_at_once(client: Any, fleet: Fleet) -> None:
    """Forty concurrent sessions with four different images each answer about their own."""
    colors = ["red", "green", "blue", "yellow"] * 10
    wrong: list[str] = []

    def converse(color: str) -> None:
        chat = open_session(fleet.client(), image=data_url(draw("circle", color)))
        for _ in range(2):
            answer = chat.ask("What color is the circle?")
            if color not in answer:
                wrong.append(f"{color}: {answer}")
        chat.close()

    threads = [threading.Thread(target=converse, args=(color,)) for color in colors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)

    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_bad_parameters_are_named(client: Any) -> None:
    """A generation parameter out of range is refused by name, and the session continues."""
    chat = open_session(client, image=data_url(draw("circle", "red")))
    ask = {"type": "send_text_prompt", "prompt_text": "What color is it?", "parameters": {"top_p": 2}}

    code, message = refusal(lambda: chat.invoke(ask))

    assert code == "ModelError"
    assert "top_p" in message
    assert "red" in chat.ask("What color is the circle?")
    chat.close()

"""Turns of sessions in the dialects of TGI and OpenAI, through the chat service."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from handlers.journal.directory import DirectoryJournal
from handlers.models.loader import load_model
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.test_chat_service import Hold, data_url
from tests.waiting import wait_until

SESSION = "x-amzn-sagemaker-session-id"
OPENED = "x-amzn-sagemaker-new-session-id"
SHORT = {"max_new_tokens": 8}
SYSTEM = {"role": "system", "content": "Be brief."}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def texts(client: Any, session_id: str) -> list[tuple[str, str]]:
    messages = client.session(session_id).messages
    return [(message["role"], message["content"][-1]["text"]) for message in messages]


def complete(client: Any, session_id: str, messages: list[dict[str, Any]], **headers: str) -> Any:
    body = {"messages": messages, "max_tokens": 8}
    return client.call(body, {SESSION: session_id, **headers})


def opened_by(answer: Any) -> str:
    assert answer.status == 200, answer.body
    return str(answer.headers[OPENED].partition(";")[0])


def answer_of(answer: Any) -> str:
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def test_every_body_continues_one_conversation(client: Any) -> None:
    """A session that `inputs` opens is asked by `messages` and by the session API; each turn sees the earlier ones."""
    first = client.call({"inputs": "one", "parameters": SHORT}, {SESSION: "NEW_SESSION"})
    sid = opened_by(first)
    second = complete(client, sid, [said("user", "two")])
    third = client.answer(sid, "three", parameters=SHORT)

    assert second.headers["x-torchmoor-cache-tier"] == "kv"
    assert OPENED not in second.headers
    assert texts(client, sid) == [
        ("user", "one"),
        ("assistant", first.json[0]["generated_text"]),
        ("user", "two"),
        ("assistant", answer_of(second)),
        ("user", "three"),
        ("assistant", third),
    ]


def test_a_client_may_repeat_the_conversation(make_client: Any, tmp_path: Path) -> None:
    """OpenAI's clients send their whole list.

    Messages that the session already has are not added again, on any worker.
    """
    journal = DirectoryJournal(tmp_path / "journal", JournalSettings())
    client, other = (make_client(instance=f"llava-{i}", journal=journal) for i in range(2))
    opening = complete(client, "NEW_SESSION", [SYSTEM, said("user", "one")])
    sid = opened_by(opening)
    grown = [SYSTEM, said("user", "one"), said("assistant", answer_of(opening)), said("user", "two")]

    second = complete(other, sid, grown)
    alone = complete(client, sid, [SYSTEM, said("user", "three")])

    assert texts(client, sid) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", answer_of(opening)),
        ("user", "two"),
        ("assistant", answer_of(second)),
        ("user", "three"),
        ("assistant", answer_of(alone)),
    ]


@pytest.mark.parametrize("begin", ["", "<think>\n"])
@pytest.mark.parametrize("thought", ["<think>Hm.</think>\n\n", "Hm.</think>\n\n", "Hm.", ""])
def test_a_client_may_repeat_an_answer_without_its_reasoning(
    checkpoint: Path, tmp_path: Path, make_client: Any, begin: str, thought: str
) -> None:
    """A client gets the reasoning in a field of its own, with which or without which it repeats the answer."""
    for path in checkpoint.iterdir():
        if path.is_file() and path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    template = (checkpoint / "chat_template.jinja").read_text()
    thinking = template.replace("'<|assistant|>' }}{% endif %}", f"'<|assistant|>{begin}' }}}}{{% endif %}}")
    (tmp_path / "chat_template.jinja").write_text(thinking + "{# </think> #}")
    client = make_client(load_model(tmp_path, torch.device("cpu"), "float32"))
    forced = {"response_format": {"type": "regex", "value": re.escape(f"{thought}Red.")}}
    opening = client.call({"messages": [said("user", "one")], **forced}, {SESSION: "NEW_SESSION"})
    sid, message = opened_by(opening), opening.json["choices"][0]["message"]

    for repeated in (message, said("assistant", message["content"])):
        answer = complete(client, sid, [said("user", "one"), repeated, said("user", "two")])
        assert answer.status == 200, answer.body
        sid = opened_by(client.call({"type": "branch_session", "session_id": sid, "turns": 1}))
    changed = complete(client, sid, [said("user", "one"), said("assistant", "Blue."), said("user", "two")])
    assert changed.error == "InvalidRequest"


@pytest.mark.parametrize(
    "repeated",
    [
        [said("user", "another"), said("assistant", "conversation")],
        [said("user", "one")],
        [SYSTEM],
    ],
)
def test_another_conversation_is_refused(client: Any, repeated: list[dict[str, str]]) -> None:
    """Messages that differ from the session's are refused; none is replaced or left out silently."""
    sid = opened_by(client.call({"inputs": "one", "parameters": SHORT}, {SESSION: "NEW_SESSION"}))

    answer = complete(client, sid, [*repeated, said("user", "two")])

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert "send the question alone" in answer.json["error"]["message"]
    assert len(texts(client, sid)) == 2


def test_the_system_message_outlives_the_oldest_turns(make_client: Any) -> None:
    """A conversation beyond the context loses turns, never its system message."""
    client = make_client(session={"overflow": "drop_oldest"}, engine={"max_prompt_tokens": 120})
    sid = opened_by(complete(client, "NEW_SESSION", [SYSTEM, said("user", "What is in the picture? 0")]))
    for number in range(1, 10):
        answer = complete(client, sid, [said("user", f"What is in the picture? {number}")])

    kept = texts(client, sid)
    assert int(answer.headers["x-torchmoor-dropped-turns"]) > 0
    assert kept[0] == ("system", "Be brief.")
    assert kept[1][0] == "user"
    assert kept[-2] == ("user", "What is in the picture? 9")


def test_a_conversation_whose_oldest_turns_were_dropped_may_be_repeated(make_client: Any) -> None:
    """A client may repeat dropped turns, one of which has the results of two calls as two messages."""
    client = make_client(session={"overflow": "drop_oldest"}, engine={"max_prompt_tokens": 120})
    sid = opened_by(complete(client, "NEW_SESSION", [said("user", "What is it?")]))
    results = [{"role": "tool", "tool_call_id": each, "content": "It is red."} for each in ("a", "b")]
    for question in ([*results], *([said("user", f"Which color has shape number {i}?")] for i in range(8))):
        assert complete(client, sid, question).status == 200
    session = client.session(sid)
    assert session.num_dropped >= 4
    asked = [*(said("user", event.question) for event in session.entries)]
    answers = [said("assistant", event.answer) for event in session.entries]
    turns = [[question, answer] for question, answer in zip(asked, answers, strict=True)]
    turns[1] = [*results, answers[1]]

    repeated = [message for turn in turns for message in turn]
    answer = complete(client, sid, [*repeated, said("user", "And now?")])

    assert answer.status == 200, answer.body


def test_an_opening_sent_again_is_one_session(client: Any) -> None:
    """The same invocation id gives the same session and the recorded answer."""
    answers = [complete(client, "NEW_SESSION", [said("user", "one")], **{"amz-sdk-invocation-id": "i"}) for _ in "ab"]

    sid, again = map(opened_by, answers)
    assert sid == again
    assert answer_of(answers[0]) == answer_of(answers[1])
    assert len(texts(client, sid)) == 2


def test_openings_with_other_questions_are_other_sessions(
    make_client: Any, tmp_path: Path, red: Image.Image, blue: Image.Image
) -> None:
    """A client may use one invocation id for all its requests, also at several workers."""
    journal = DirectoryJournal(tmp_path / "journal", JournalSettings())
    clients = [make_client(instance=f"llava-{i}", journal=journal) for i in range(2)]
    same_id = {"amz-sdk-invocation-id": "i"}
    pictures = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in (red, blue)]
    questions: list[list[dict[str, Any]]] = [
        [said("user", "one")],
        [said("user", "two")],
        [SYSTEM, said("user", "two")],
        *([{"role": "user", "content": [picture, {"type": "text", "text": "two"}]}] for picture in pictures),
    ]

    opened = [opened_by(complete(clients[0], "NEW_SESSION", question, **same_id)) for question in questions]
    again = [opened_by(complete(clients[1], "NEW_SESSION", question, **same_id)) for question in questions]

    assert len(set(opened)) == len(questions)
    assert again == opened


def test_a_failed_opening_leaves_no_session(client: Any) -> None:
    """The first question's error is the answer; the client gets no id, so no session stays."""
    answer = complete(client, "NEW_SESSION", [said("user", "one"), said("assistant", "x"), said("user", "two")])

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert OPENED not in answer.headers
    assert client.service.store.snapshot() == []


def test_a_client_that_leaves_its_opening_leaves_no_session(make_client: Any, endless_llava: Any) -> None:
    """A session is undone if its client leaves before the answer's head; later the client has the id, and it stays."""
    client = make_client(endless_llava)
    body = {"inputs": "one", "parameters": {"max_new_tokens": 1500}}

    client.send(body, {SESSION: "NEW_SESSION"}).reply.cancel()
    hold = Hold(endless_llava, num_steps=20)
    streamed = client.send({**body, "stream": True}, {SESSION: "NEW_SESSION"})
    streamed.wait_until(lambda exchange: bool(exchange.headers))
    streamed.reply.cancel()
    hold.release()

    sid = streamed.headers[OPENED].partition(";")[0]
    assert client.call({"inputs": "two", "parameters": SHORT}, {SESSION: sid}).status == 200
    wait_until(lambda: client.service.store.session_ids() == [sid], "the opening of the client that left is undone")


@pytest.mark.parametrize(
    ("attributes", "status"),
    [("accept_eula=true", 200), ("c=1;accept_eula = true", 200), ("accept_eula=false", 424), ("", 424)],
)
def test_a_license_must_be_accepted(make_client: Any, attributes: str, status: int) -> None:
    """With the setting, each request must accept the license in its CustomAttributes."""
    client = make_client(request={"requires_eula": True})

    answer = client.call({"inputs": "x", "parameters": SHORT}, {"x-amzn-sagemaker-custom-attributes": attributes})

    assert answer.status == status
    assert client.call({}, {"x-torchmoor-operation": "status"}).status == 200
    if status == 424:
        assert answer.error == "EulaNotAccepted"

"""Holds conversations about images in closed loops, and records the outcome of each turn.

The clients here repeat no request, so a request that the proxy does not repeat by itself counts as failed.
"""

import base64
import json
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from botocore.eventstream import EventStreamBuffer

from benchmarks.report import ROOT

SAMPLES = ROOT / "models" / "tiny-llava" / "samples"
TIMEOUT_S = 90.0
LONG = {"max_new_tokens": 1000, "do_sample": True, "temperature": 1e6, "seed": 11}  # nearly all tokens equally likely
PAUSE_S = 0.8  # between two turns: about 15 per round, since the small model errs in longer conversations


@dataclass(frozen=True, slots=True)
class Turn:
    """The outcome of one question.

    failure: the error that the client got, or ""; has_bytes: it got part of the answer before. num_context: tokens of
    the whole prompt, from the answer's receipt.
    """

    invocation_id: str
    began: float
    took_s: float
    instance: str = ""
    answer: str = ""
    num_context: int = 0
    failure: str = ""
    has_bytes: bool = False


@dataclass
class Conversation:
    """One session and its turns, in order."""

    runtime: str
    image: str
    questions: list[tuple[str, str]]  # with the right answers
    is_streamed: bool
    token: str = ""  # bearer token of the client
    id: str = ""
    turns: list[Turn] = field(default_factory=list)

    def open(self) -> None:
        """Start the session with its image."""
        if refusal := self.try_open():
            raise SystemExit(f"a session could not be opened: {refusal}")

    def try_open(self) -> str:
        """Start the session. Return the refusal, or an empty text."""
        data = base64.b64encode((SAMPLES / self.image).read_bytes()).decode()
        kind = "jpeg" if self.image.endswith("jpg") else self.image.rpartition(".")[2]
        body = {"type": "start_session", "image": f"data:image/{kind};base64,{data}"}
        _, status, headers, content = self.post("NEW_SESSION", str(uuid4()), body)
        if status != 200:
            return f"{status} {content[:300]!r}"
        self.id = headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]
        return ""

    def ask(self, question: str = "") -> Turn:
        """Ask a question, by default the next of `questions`."""
        question = question or self.questions[len(self.turns) % len(self.questions)][0]
        turn = _ask_streamed(self, question) if self.is_streamed else _ask_whole(self, question)
        self.turns.append(turn)
        return turn

    def run(self, stop: threading.Event) -> None:
        """Ask questions until `stop` is set."""
        while not stop.is_set():
            self.ask()
            stop.wait(PAUSE_S)

    def close(self) -> None:
        """End the session."""
        self.post(self.id, str(uuid4()), {"type": "close_session"})

    def post(self, session: str, invocation_id: str, body: dict[str, Any]) -> tuple[float, int, dict[str, str], bytes]:
        """Return the moment of the head's arrival, status, headers and body. Raises OSError, HTTPException."""
        connection = HTTPConnection(urlsplit(self.runtime).netloc, timeout=TIMEOUT_S)
        try:
            fields = self.fields(session, invocation_id)
            connection.request("POST", "/endpoints/llava/invocations", json.dumps(body), fields)
            answer = connection.getresponse()
            head_at = time.monotonic()
            return head_at, answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def fields(self, session: str, invocation_id: str) -> dict[str, str]:
        return {
            "Content-Type": "application/json",
            "X-Amzn-SageMaker-Session-Id": session,
            "amz-sdk-invocation-id": invocation_id,
            **authorization(self.token),
        }

    def is_alive(self) -> bool:
        """Ask about the image again. Return whether the answer is right and its context longer than all before.

        The question is about a color, which the small model answers correctly in a conversation of any length.
        """
        longest = max((turn.num_context for turn in self.turns), default=0)
        question, right = next(item for item in self.questions if item[0].startswith("What color"))
        turn = self.ask(question)
        if not turn.failure and not turn.num_context:  # the answer came from the journal, after an instance was lost
            turn = self.ask(question)
        if turn.answer == right and turn.num_context > longest:
            return True
        print(f"{self.image} {self.id[:12]}: {turn}, after {longest} tokens of {len(self.turns)} turns")
        return False

    def num_turns_lost(self, journal: Path) -> int:
        """Count the answered turns that are not in the journal exactly once with the client's answer."""
        recorded: dict[str, list[str]] = {}
        for path in (journal / self.id).glob("[0-9]" * 8):
            event = json.loads(path.read_bytes())
            if event["kind"] == "turn":
                recorded.setdefault(event["invocation_id"], []).append(event["answer"])
        return sum(recorded.get(turn.invocation_id) != [turn.answer] for turn in self.turns if not turn.failure)


class LongAnswers(threading.Thread):
    """Streams the same long answer repeatedly, without a session.

    num_ended: streams that have ended; num_broken: those with an error or a text other than `expected`; longest_gap_s:
    between two pieces of one stream.
    """

    def __init__(self, runtime: str, expected: bytes, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.num_ended = self.num_broken = 0
        self.longest_gap_s = 0.0
        self._expected = expected
        self._runtime = runtime
        self._is_stopped = stop

    def run(self) -> None:
        while not self._is_stopped.is_set():
            try:
                text = self.read()
            except (OSError, HTTPException) as error:
                print(f"a long answer ended with {error!r}")
                text = b""
            self.num_ended += 1
            self.num_broken += text != self._expected

    def read(self) -> bytes:
        """Stream one answer and return its text. Raises OSError, HTTPException."""
        connection = HTTPConnection(urlsplit(self._runtime).netloc, timeout=TIMEOUT_S)
        body, pieces = {"inputs": "hello", "stream": True, "parameters": LONG}, []
        fields = {"Content-Type": "application/json", "Accept": "application/jsonlines"}
        try:
            connection.request("POST", "/invocations", json.dumps(body), fields)
            answer, before = connection.getresponse(), time.monotonic()
            while piece := answer.read1(65536):
                now = time.monotonic()
                self.longest_gap_s, before = max(self.longest_gap_s, now - before), now
                pieces.append(piece)
        finally:
            connection.close()
        return b"".join(json.loads(line)["token"]["text"].encode() for line in b"".join(pieces).splitlines())


def make_conversations(runtime: str, number: int, token: str = "") -> list[Conversation]:
    """Make conversations, which the caller opens. Every other one streams."""
    questions: dict[str, list[tuple[str, str]]] = {}
    for sample in json.loads((SAMPLES / "questions.json").read_text()):
        questions.setdefault(sample["image"], []).append((sample["question"], sample["answer"]))
    images = list(questions)
    return [
        Conversation(runtime, image, questions[image], is_streamed=bool(i % 2), token=token)
        for i, image in zip(range(number), cycle(images), strict=False)
    ]


def authorization(token: str) -> dict[str, str]:
    """Return the header field of a bearer token; empty without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _ask_whole(chat: Conversation, question: str) -> Turn:
    invocation_id, began = str(uuid4()), time.monotonic()
    body = {"type": "send_text_prompt", "prompt_text": question}
    try:
        _, status, headers, content = chat.post(chat.id, invocation_id, body)
    except (OSError, HTTPException) as error:
        return Turn(invocation_id, began, time.monotonic() - began, failure=repr(error))
    took_s, instance = time.monotonic() - began, headers.get("x-torchmoor-instance", "")
    if status != 200:
        return Turn(invocation_id, began, took_s, instance, failure=f"{status} {content[:300]!r}")
    num_context = int(headers.get("x-torchmoor-context-tokens", "0"))  # 0: the answer came from the journal
    return Turn(invocation_id, began, took_s, instance, json.loads(content)["response_text"], num_context)


def _ask_streamed(chat: Conversation, question: str) -> Turn:
    invocation_id, began = str(uuid4()), time.monotonic()
    body = json.dumps({"type": "send_text_prompt", "prompt_text": question, "stream": True})
    connection = HTTPConnection(urlsplit(chat.runtime).netloc, timeout=TIMEOUT_S)
    instance, num_context, pieces, failure = "", 0, [], ""
    try:
        fields = chat.fields(chat.id, invocation_id)
        connection.request("POST", "/endpoints/llava/invocations-response-stream", body, fields)
        answer = connection.getresponse()
        instance = answer.getheader("x-torchmoor-instance", "")
        if answer.status != 200:
            failure = f"{answer.status} {answer.read(300)!r}"
        else:
            num_context = int(answer.getheader("x-torchmoor-context-tokens", "0"))
            frames = EventStreamBuffer()
            while piece := answer.read1(65536):
                frames.add_data(piece)
                for frame in frames:
                    if frame.headers[":message-type"] == "event":
                        pieces.append(frame.payload)
                    else:
                        failure = f"{frame.headers[':exception-type']} {frame.payload[:300]!r}"
    except (OSError, HTTPException) as error:
        failure = repr(error)
    finally:
        connection.close()
    took_s, text = time.monotonic() - began, b"".join(pieces).decode()
    return Turn(invocation_id, began, took_s, instance, text, num_context, failure, has_bytes=bool(pieces))

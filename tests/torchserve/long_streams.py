"""Long streamed answers in several forms, each read by its own client on a thread of its own.

A test that acts before they end slows the workers (test_faults.py, slowed_worker).
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import requests

from tests.torchserve.conftest import Fleet
from tests.torchserve.test_cancel import ENDLESS
from tests.torchserve.test_sessions import Chat
from torchmoor.wire.headers import INSTANCE

LONG = {**ENDLESS, "max_new_tokens": 800}  # a slowed worker runs longer where the test gets no processor
INPUTS = {"inputs": "hello", "stream": True, "parameters": {**LONG, "details": True}}
LOGPROB = re.compile(r'"log_?prob":-?[0-9.e-]+')  # its last digits depend on how many tokens a step has


class LongStream(threading.Thread):
    """Reads a stream to its end. instance: which has begun it."""

    def __init__(self, begin: Callable[[], tuple[str, Iterator[str]]]) -> None:
        super().__init__(daemon=True)
        self.instance, self._pieces = begin()
        self._text = next(self._pieces)
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for piece in self._pieces:
                self._text += piece
        except Exception as error:
            self._error = error

    def finish(self) -> str:
        """Return the client's text without log probabilities. Raises the client's exception."""
        self.join(120)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return LOGPROB.sub("", self._text)


def begin_by_boto3(fleet: Fleet, body: dict[str, Any], **more: str) -> LongStream:
    """Begin an answer by boto3. more: further members of the request."""

    def begin() -> tuple[str, Iterator[str]]:
        answer = fleet.client().invoke_endpoint_with_response_stream(
            EndpointName="llava", ContentType="application/json", Body=json.dumps(body), **more
        )
        pieces = (event["PayloadPart"]["Bytes"].decode() for event in answer["Body"])
        return answer["ResponseMetadata"]["HTTPHeaders"][INSTANCE], pieces

    return LongStream(begin)


def begin_streams(fleet: Fleet, chat: Chat) -> list[LongStream]:
    """Begin a turn of a session, answers in the forms of TGI and LMI by boto3, one at TGI's route, two by OpenAI's."""
    turn = {"type": "send_text_prompt", "prompt_text": "hello", "stream": True, "parameters": LONG}

    def by_route() -> tuple[str, Iterator[str]]:
        answer = requests.post(f"{fleet.runtime}/generate_stream", json=INPUTS, stream=True, timeout=60)
        return answer.headers[INSTANCE], (line.decode() for line in answer.iter_lines())

    def by_openai() -> tuple[str, Iterator[str]]:
        gpt = openai.OpenAI(base_url=fleet.runtime + "/v1", api_key="any", timeout=60, max_retries=0)
        answer = gpt.chat.completions.with_raw_response.create(
            model="llava",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=LONG["max_new_tokens"],
            temperature=LONG["temperature"],
            seed=LONG["seed"],
        )

        def pieces() -> Iterator[str]:
            with gpt:
                yield from (str([chunk.choices, chunk.usage]) for chunk in answer.parse())

        return answer.headers[INSTANCE], pieces()

    return [
        begin_by_boto3(fleet, turn, SessionId=chat.id),
        begin_by_boto3(fleet, INPUTS, Accept="text/event-stream"),
        begin_by_boto3(fleet, INPUTS, Accept="application/jsonlines"),
        LongStream(by_route),
        LongStream(by_openai),
        LongStream(lambda: _begin_response(fleet)),
    ]


def _begin_response(fleet: Fleet) -> tuple[str, Iterator[str]]:
    """Begin a response with log probabilities, whose last event repeats its tokens."""
    gpt = openai.OpenAI(base_url=fleet.runtime + "/v1", api_key="any", timeout=60, max_retries=0)
    answer = gpt.responses.with_raw_response.create(
        model="llava",
        input="hello",
        stream=True,
        store=False,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=LONG["max_new_tokens"],
        temperature=LONG["temperature"],
        extra_body={"seed": LONG["seed"]},
    )

    def pieces() -> Iterator[str]:
        with gpt:
            for event in answer.parse():
                if event.type == "response.output_text.delta":
                    yield f"{event.delta} {[each.token for each in event.logprobs]}"
                elif event.type == "response.output_text.done":
                    yield str([each.token for each in event.logprobs])

    return answer.headers[INSTANCE], pieces()


def num_continued(fleet: Fleet) -> int:
    """Return how many streams another instance has continued."""
    metrics = requests.get(f"{fleet.admin}/metrics", timeout=10).text
    return sum(
        int(float(line.split()[-1])) for line in metrics.splitlines() if line.startswith("StreamsContinued_total")
    )

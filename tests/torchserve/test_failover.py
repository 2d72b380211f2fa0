"""Workers and instances die or hang, some under load: what clients notice, on real TorchServe."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import openai
import pytest
import requests
from botocore.exceptions import ClientError, EventStreamError

from tests.torchserve.conftest import Fleet, Three
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.long_streams import begin_streams, num_continued
from tests.torchserve.test_cancel import ENDLESS
from tests.torchserve.test_faults import (
    ask_until_answered,
    find_jvm,
    ready_instances,
    slowed_worker,
    slowed_workers,
    stopped_worker,
    wait_until_all_serve,
    worker_pids,
)
from tests.torchserve.test_sessions import Chat, open_session
from tests.waiting import wait_until
from torchmoor.wire.headers import INSTANCE
from torchmoor.wire.response_ids import read_response_id

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]
QUESTION = "What color is the circle?"


class Talk(threading.Thread):
    """A conversation that runs until it is stopped; every answer must be right."""

    def __init__(self, chat: Chat, *, is_streamed: bool) -> None:
        super().__init__(daemon=True)
        self.chat = chat
        self.is_streamed = is_streamed
        self.is_stopped = False
        self.acknowledged: list[str] = []  # ids of invocations that were answered completely
        self.failed_before_byte: list[str] = []
        self.failed_after_byte: list[str] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.is_stopped:
            self.ask()
            time.sleep(0.3)

    def ask(self) -> None:
        """Send one turn with a new invocation id."""
        number = str(uuid4())

        def name(request: object, **_: object) -> None:
            request.headers["amz-sdk-invocation-id"] = number

        events = self.chat.client.meta.events
        events.register("before-send.sagemaker-runtime", name, unique_id="number")
        pieces: list[bytes] = []
        try:
            if self.is_streamed:
                for piece in self.stream():
                    pieces.append(piece)
            else:
                pieces.append(self.chat.ask(QUESTION).encode())
        except (ClientError, EventStreamError) as error:
            (self.failed_after_byte if pieces else self.failed_before_byte).append(str(error))
            return
        finally:
            events.unregister("before-send.sagemaker-runtime", unique_id="number")
        self.acknowledged.append(number)
        if b"red" not in b"".join(pieces):
            self.wrong.append(b"".join(pieces).decode())

    def stream(self) -> Iterator[bytes]:
        answer = self.chat.client.invoke_endpoint_with_response_stream(
            EndpointName="llava",
            ContentType="application/json",
            SessionId=self.chat.id,
            Body=json.dumps({"type": "send_text_prompt", "prompt_text": QUESTION, "stream": True}),
        )
        for event in answer["Body"]:
            yield event["PayloadPart"]["Bytes"]


def recorded_turns(journal: Path, session_id: str) -> list[dict[str, Any]]:
    """Return the turns in a session's journal."""
    events = [json.loads(path.read_bytes()) for path in sorted((journal / session_id).glob("[0-9]" * 8))]
    return [event for event in events if event["kind"] == "turn"]


def has_continued(fleet: Fleet, number: int) -> bool:
    return num_continued(fleet) >= number


def check(talks: list[Talk], journal: Path) -> None:
    """Check that each acknowledged turn is recorded exactly once, and that none has failed."""
    for talk in talks:
        assert (talk.failed_before_byte, talk.failed_after_byte, talk.wrong) == ([], [], [])
        recorded = [turn["invocation_id"] for turn in recorded_turns(journal, talk.chat.id)]
        assert len(set(recorded)) == len(recorded)
        assert set(talk.acknowledged) <= set(recorded)
        talk.ask()
        assert (talk.failed_before_byte, talk.failed_after_byte, talk.wrong) == ([], [], [])


def test_hanging_worker_is_gone_around(three: Three) -> None:
    """A turn that a hanging worker does not answer is answered by another instance; a close then frees both.

    SIGSTOP of the Python worker leaves TorchServe reporting READY; the proxy detects the silence. After SIGCONT the
    instance serves again.
    """
    fleet = three.fleet
    chat = open_session(fleet.client(), image=data_url(draw("square", "blue")))
    assert "blue" in chat.ask("What color is the square?")
    (hung,) = fleet.holders(chat.id)

    with stopped_worker(three.run_dir, hung):
        assert "blue" in chat.ask("What color is the square?")
        wait_until(lambda: hung not in ready_instances(fleet), "the hanging worker is noticed")

    wait_until(lambda: hung in ready_instances(fleet), "the worker is back")
    assert "blue" in ask_until_answered(chat, "What color is the square?")
    assert len(fleet.holders(chat.id)) == 2

    chat.close()

    wait_until(lambda: fleet.holders(chat.id) == [], "no instance holds the session")


def test_streams_go_on_elsewhere_while_their_workers_die(three: Three) -> None:
    """Two of three workers get kill -9 one after the other in the middle of six streams in different forms.

    Each client reads on to the end and gets, byte for byte, the answer that nothing interrupts. The turn is recorded
    once.
    """
    fleet, run_dir = three.fleet, three.run_dir
    wait_until(lambda: all(i["share"] == 1.0 for i in fleet.instances()), "all instances at work")
    spared = sorted(ready_instances(fleet))[-1]
    requests.post(f"{fleet.admin}/instances/{spared}/drain", timeout=10).raise_for_status()
    chats = [open_session(fleet.client(), image=data_url(draw("circle", "red"))) for _ in range(2)]
    whole = [stream.finish() for stream in begin_streams(fleet, chats[0])]
    before = num_continued(fleet)

    victims = sorted(ready_instances(fleet) - {spared})
    with slowed_worker(run_dir, victims[0]), slowed_worker(run_dir, victims[1]):
        streams = begin_streams(fleet, chats[1])
        requests.post(f"{fleet.admin}/instances/{spared}/resume", timeout=10).raise_for_status()
        assert {stream.instance for stream in streams} <= set(victims)
        for victim in victims:
            for pid in worker_pids(run_dir, victim):
                os.kill(pid, signal.SIGKILL)
            num_lost = sum(stream.instance <= victim for stream in streams)
            wait_until(partial(has_continued, fleet, before + num_lost), "the streams go on")

    assert [stream.finish() for stream in streams] == whole
    assert [event["answer"] for event in recorded_turns(three.journal, chats[1].id)] == whole[:1]
    wait_until_all_serve(fleet)


def test_responses_survive_the_death_of_their_instance(three: Three) -> None:
    """After kill -9 between two turns, a stored response is shown, continued and branched as if nothing had happened.

    The answers equal those of a client that sends the whole conversation.
    """
    picture: Any = {"type": "input_image", "image_url": data_url(draw("circle", "red")), "detail": "auto"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}, picture]}]
    with openai.OpenAI(base_url=f"{three.fleet.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        raw = gpt.responses.with_raw_response.create(model="llava", input=asked)
        victim, first = raw.headers["x-torchmoor-instance"], raw.parse()
        second = gpt.responses.create(model="llava", input="What shape is it?", previous_response_id=first.id)

        kill_instance(three, victim)

        assert gpt.responses.retrieve(first.id) == first
        third = gpt.responses.create(model="llava", input=QUESTION, previous_response_id=second.id)
        branch = gpt.responses.create(model="llava", input="How many shapes?", previous_response_id=first.id)
        for response, said in ((third, [first, second]), (branch, [first])):
            resent: Any = [*asked, {"role": "assistant", "content": said[0].output_text}]
            for question, answer in zip(["What shape is it?"], said[1:], strict=False):
                resent += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.output_text}]
            question = gpt.responses.input_items.list(response.id).data[0].content[0].text
            whole = gpt.responses.create(
                model="llava", input=[*resent, {"role": "user", "content": question}], store=False
            )
            assert whole.output_text == response.output_text
            assert whole.usage.input_tokens == response.usage.input_tokens


@pytest.mark.slow
def test_a_chain_of_20_responses_survives_kills(three: Three) -> None:
    """kill -9 hits the chain's instance between two turns and within streamed ones.

    Every acknowledged response is stored once, and the last answer equals that to the whole conversation.
    """
    picture: Any = {"type": "input_image", "image_url": data_url(draw("circle", "red")), "detail": "auto"}
    said: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}, picture]}]
    with openai.OpenAI(base_url=f"{three.fleet.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        raw = gpt.responses.with_raw_response.create(model="llava", input=said)
        chain, victim = [raw.parse()], raw.headers[INSTANCE]
        for number in range(1, 21):
            said.append({"role": "assistant", "content": chain[-1].output_text})
            said.append({"role": "user", "content": QUESTION if number % 2 else "What shape is it?"})
            turn: Any = {"model": "llava", "input": said[-1:], "previous_response_id": chain[-1].id}
            if number in (4, 11):
                kill(three, victim)
            if number in (7, 15):
                chain.append(respond_while_killed(three, gpt, turn))
            else:
                raw = gpt.responses.with_raw_response.create(**turn)
                victim = raw.headers[INSTANCE]
                chain.append(raw.parse())
        whole = gpt.responses.create(model="llava", input=said, store=False)
        stored = [gpt.responses.retrieve(each.id) for each in chain]

    assert stored == chain
    assert [each.previous_response_id for each in stored] == [None, *(each.id for each in chain[:-1])]
    places = [read_response_id(each.id) for each in chain]
    sessions = {place.session_id for place in places if place is not None}
    assert sum(len(recorded_turns(three.journal, session)) for session in sessions) == len(chain)
    assert whole.output_text == chain[-1].output_text
    assert whole.usage.input_tokens == chain[-1].usage.input_tokens


def respond_while_killed(three: Three, gpt: openai.OpenAI, turn: Any) -> Any:
    """Stream a response whose instance is killed after the first text. Return it.

    The kill waits for nothing: on a busy machine the answer of a slowed worker could end meanwhile.
    """
    long = {"temperature": ENDLESS["temperature"], "max_output_tokens": 200, "extra_body": {"seed": ENDLESS["seed"]}}
    wait_until_all_serve(three.fleet)
    before = num_continued(three.fleet)
    workers = {each["name"]: worker_pids(three.run_dir, each["name"]) for each in three.fleet.instances()}
    with slowed_workers(three.fleet):
        raw = gpt.responses.with_raw_response.create(**turn, **long, stream=True)
        events = iter(raw.parse())
        next(event for event in events if event.type == "response.output_text.delta")
        for pid in workers[raw.headers[INSTANCE]]:
            os.kill(pid, signal.SIGKILL)
    *_, last = events
    assert num_continued(three.fleet) == before + 1, last
    return last.response


def test_a_response_in_the_background_is_generated_again_when_its_instance_dies(three: Three) -> None:
    """kill -9 hits the instance during the answer. A client that follows it gets each event once, and the same text."""
    picture: Any = {"type": "input_image", "image_url": data_url(draw("circle", "red")), "detail": "auto"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}, picture]}]
    turn: Any = {"model": "llava", "input": asked, "temperature": ENDLESS["temperature"], "max_output_tokens": 200}
    turn["extra_body"] = {"seed": ENDLESS["seed"]}
    with openai.OpenAI(base_url=f"{three.fleet.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        wait_until_all_serve(three.fleet)
        events: list[Any] = []
        with slowed_workers(three.fleet), suppress(openai.OpenAIError, httpx2.HTTPError):
            raw = gpt.responses.with_raw_response.create(**turn, background=True, stream=True)
            for event in raw.parse():
                events.append(event)
                if len(events) == 20:
                    kill_instance(three, raw.headers[INSTANCE])
        response_id = events[0].response.id

        def is_followed_to_its_end() -> bool:
            with suppress(openai.OpenAIError, httpx2.HTTPError):
                events.extend(
                    gpt.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
                )
            return bool(events[-1].type == "response.incomplete")

        wait_until(is_followed_to_its_end, "the response ends")
        stored = list(gpt.responses.retrieve(response_id, stream=True))
        direct = gpt.responses.create(**turn)

    assert len(events) > 20
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events == stored
    assert events[-1].response.output_text == direct.output_text
    place = read_response_id(response_id)
    assert len(recorded_turns(three.journal, place.session_id)) == 1


def kill_instance(three: Three, victim: str) -> None:
    """Kill an instance's TorchServe and its workers."""
    for pid in (find_jvm(three.run_dir, victim), *worker_pids(three.run_dir, victim)):
        with suppress(ProcessLookupError):  # a worker ends with its TorchServe
            os.kill(pid, signal.SIGKILL)


def kill(three: Three, victim: str) -> None:
    """Kill an instance's workers, once all instances are there."""
    wait_until_all_serve(three.fleet)
    for pid in worker_pids(three.run_dir, victim):
        os.kill(pid, signal.SIGKILL)


def test_killed_and_hanging_instances_lose_nothing(three: Three) -> None:
    """kill -9 of one TorchServe during conversations, then SIGSTOP of another, lose no session.

    Every acknowledged turn is recorded once, and none fails: streams that had begun go on at another instance.
    """
    fleet, run_dir = three.fleet, three.run_dir
    wait_until_all_serve(fleet)
    names = sorted(ready_instances(fleet))
    picture = data_url(draw("circle", "red"))
    talks = [Talk(open_session(fleet.client(), image=picture), is_streamed=bool(number % 2)) for number in range(6)]
    for talk in talks:
        talk.start()
    wait_until_all_answered(talks)

    os.kill(find_jvm(run_dir, names[0]), signal.SIGKILL)
    wait_until(lambda: names[0] not in ready_instances(fleet), "the dead instance is noticed")
    wait_until_all_answered(talks)
    hung = find_jvm(run_dir, names[1])
    os.kill(hung, signal.SIGSTOP)
    try:
        wait_until(lambda: names[1] not in ready_instances(fleet), "the hanging instance is noticed")
        wait_until_all_answered(talks)
    finally:
        os.kill(hung, signal.SIGCONT)
        for talk in talks:
            talk.is_stopped = True
    for talk in talks:
        talk.join(60)
        assert not talk.is_alive()
    check(talks, three.journal)


def wait_until_all_answered(talks: list[Talk]) -> None:
    """Wait until every conversation has had another answer."""
    before = [len(talk.acknowledged) for talk in talks]
    wait_until(
        lambda: all(len(talk.acknowledged) > num + 1 for talk, num in zip(talks, before, strict=True)),
        "the conversations go on",
    )

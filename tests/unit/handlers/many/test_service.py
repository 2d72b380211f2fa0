"""Requests by model name with a real registry and tiny models: receipts, leases, operations."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.engine.builtin.runner import ModelRunner
from handlers.errors import ClientGone, HandlerError
from handlers.many.loading.checkpoint_loader import CheckpointLoader
from handlers.many.residency.registry import ModelRegistry, open_registry
from handlers.many.service import ManyService
from handlers.many.sources.given import GivenSource
from handlers.many.sources.source import SourceModel
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from handlers.settings.handler import HandlerSettings
from handlers.settings.many import ManySettings
from tests.unit.handlers.many.replies import whole
from tests.unit.handlers.many.tiny import save_checkpoint
from tests.waiting import wait_until

TARGET = "x-amzn-sagemaker-target-model"
CPU = torch.device("cpu")


class Worker:
    """A service and its parts, as handlers/torchserve/start_many.py connects them."""

    def __init__(self, folder: Path) -> None:
        many = ManySettings(source=str(folder / "models"), cache_dir=str(folder / "cache"))
        settings = HandlerSettings(many=many)
        loader = CheckpointLoader(settings, CPU, SessionIdMinter.from_environment({}), {})
        self.registry: ModelRegistry = open_registry(many, folder, loader, CPU)
        self.service = ManyService(self.registry, loader, "local", "cpu")

    def send(self, body: Any, **headers: str) -> PendingReply:
        reply = PendingReply(lambda: None)
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        self.service.start(Incoming({"content-type": "application/json", **own}, content), reply)
        return reply

    def ask(self, model: str, body: Any) -> PendingReply:
        return self.send(body, **{TARGET: model})

    def operate(self, **body: Any) -> tuple[int, dict[str, Any]]:
        return said(self.send(body, x_torchmoor_operation="models"))

    def model(self, name: str) -> dict[str, Any]:
        found = [each for each in self.service.status()["models"] if each["name"] == name]
        return found[0] if found else {}


def said(reply: PendingReply) -> tuple[int, dict[str, Any]]:
    return whole(reply).status, json.loads(whole(reply).body)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """Run a worker with a classifier and a generator; afterwards no lease is left and the counts are right."""
    save_checkpoint(tmp_path / "models" / "classify", "BertForSequenceClassification")
    save_checkpoint(tmp_path / "models" / "write", "LlamaForCausalLM")
    made = Worker(tmp_path)
    yield made
    wait_until(lambda: not any(each.get("leases") for each in made.service.status()["models"]), "every lease has ended")
    made.registry.check_integrity()
    made.service.stop()


def test_a_request_finds_its_model_and_is_told_what_it_cost(worker: Worker) -> None:
    """The first request waits for the load, the second does not, and their receipts say so."""
    first = whole(worker.ask("classify", {"inputs": "the cat"}))
    second = whole(worker.ask("classify", {"inputs": "the cat"}))
    latencies: list[float] = []

    def are_counted() -> bool:
        latencies.extend(worker.service.counters.drain("latency"))
        return len(latencies) == 2

    assert (first.status, second.status) == (200, 200)
    assert first.body == second.body
    assert first.headers["x-torchmoor-model-cache"] != "hit"
    assert second.headers["x-torchmoor-model-cache"] == "hit"
    assert second.headers["x-torchmoor-model-load-ms"] == "0"
    wait_until(are_counted, "both requests are counted")
    assert worker.service.numbers()["requests"]["answered"] == 2
    assert len(worker.service.counters.drain("load")) == 1


def test_a_lease_lasts_as_long_as_the_answer(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream leases its model while it runs; a disconnected client releases it."""
    streams: list[PendingReply] = []
    has_left, run = threading.Event(), ModelRunner.run

    def run_until_it_begins(runner: ModelRunner, *arguments: Any) -> Any:
        assert not any(stream.has_news() for stream in streams) or has_left.wait(60)
        return run(runner, *arguments)

    monkeypatch.setattr(ModelRunner, "run", run_until_it_begins)
    parameters = {"max_new_tokens": 64, "ignore_eos": True}
    streams.append(worker.ask("write", {"inputs": "the cat", "parameters": parameters, "stream": True}))
    [stream] = streams
    wait_until(stream.has_news, "the stream begins")
    assert worker.model("write")["leases"] == 1
    head = stream.take(1 << 20)
    assert head.headers["x-torchmoor-model-cache"]

    stream.cancel()
    has_left.set()

    wait_until(lambda: worker.model("write")["leases"] == 0, "the lease has ended")
    wait_until(lambda: worker.service.numbers()["requests"]["cancelled"] == 1, "it counts as cancelled")


def test_a_client_that_leaves_before_its_model_is_there_leaves_nothing(worker: Worker) -> None:
    """A client that disconnects during the load leaves no lease, whether the load succeeds or fails."""
    reply = worker.ask("classify", {"inputs": "the cat"})
    reply.cancel(ClientGone("gone"))

    assert whole(worker.ask("classify", {"inputs": "the cat"})).status == 200
    assert whole(reply).status == 499


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({}, {"inputs": "a"}, 400, "InvalidRequest"),
        ({TARGET: "nobody"}, {"inputs": "a"}, 404, "ModelUnknown"),
        ({TARGET: "../classify"}, {"inputs": "a"}, 404, "ModelUnknown"),
        ({TARGET: "classify"}, {"inputs": 5}, 400, "InvalidRequest"),
        ({"x-torchmoor-operation": "juggle"}, {}, 400, "InvalidRequest"),
        ({"x-torchmoor-operation": "models"}, {"action": "juggle", "model": "a"}, 400, "InvalidRequest"),
        ({"x-torchmoor-operation": "models"}, {"action": "load", "model": ""}, 400, "InvalidRequest"),
        ({"x-torchmoor-operation": "models"}, {"action": "pin", "model": "a", "url": "b"}, 400, "InvalidRequest"),
        ({"x-torchmoor-operation": "models"}, b"{", 400, "InvalidJson"),
        ({"x-torchmoor-operation": "models"}, {"action": "unload", "model": "classify"}, 404, "ModelUnknown"),
        ({"x-torchmoor-operation": "models"}, {"action": "unpin", "model": "classify"}, 404, "ModelUnknown"),
        ({"x-torchmoor-operation": "models"}, {"action": "load", "model": "nobody"}, 404, "ModelUnknown"),
        ({"x-torchmoor-operation": "models"}, {"action": "pin", "model": "nobody"}, 404, "ModelUnknown"),
        ({"x-torchmoor-operation": "models"}, {"action": "prewarm", "model": "nobody"}, 404, "ModelUnknown"),
        ({"x-torchmoor-operation": "models"}, {"action": "pin", "model": "../x"}, 404, "ModelUnknown"),
    ],
)
def test_what_cannot_be_served_is_told_why(
    headers: dict[str, str], body: Any, status: int, code: str, worker: Worker
) -> None:
    """Each error has its own status and code."""
    found, error = said(worker.send(body, **headers))

    assert (found, error["error"]["code"]) == (status, code)


def test_what_a_model_stores_is_found_without_its_name(worker: Worker) -> None:
    """Only creation names the model.

    Later requests find the stored object, which is lost when the model leaves memory.
    """
    created = {TARGET: "write", "x-torchmoor-resource": "POST responses"}
    assert worker.operate(action="load", model="classify")[0] == 200
    status, first = said(worker.send({"model": "write", "input": "the cat", "max_output_tokens": 16}, **created))
    assert status == 200
    created["x-torchmoor-resource"] = "POST conversations"
    talk = said(worker.send({"metadata": {"a": "b"}}, **created))[1]

    def ask(resource: str) -> tuple[int, dict[str, Any]]:
        return said(worker.send(None, x_torchmoor_resource=resource))

    assert ask(f"GET responses/{first['id']}?include=x") == (200, first)
    assert ask(f"GET conversations/{talk['id']}/items")[1]["data"] == []
    assert ask(f"DELETE responses/{first['id']}")[1]["deleted"] is True
    assert worker.operate(action="unload", model="write")[0] == 200
    status, lost = ask(f"GET conversations/{talk['id']}")
    assert (status, "No model in memory has this id" in lost["error"]["message"]) == (404, True)
    assert worker.model("write") == {}
    status, unnamed = said(worker.send({}, x_torchmoor_resource="POST conversations"))
    assert (status, "extra_headers" in unnamed["error"]["message"]) == (400, True)


def test_operators_decide_what_is_in_memory(worker: Worker) -> None:
    """Operators load, pin and unload models, and the status reports it."""
    assert worker.operate(action="load", model="classify") == (200, {"model": "classify", "tier": "device"})
    assert worker.operate(action="load", model="classify")[0] == 409
    assert worker.operate(action="pin", model="classify") == (200, {"model": "classify", "tier": "device"})
    assert worker.model("classify")["pinned"] is True
    assert worker.operate(action="unpin", model="classify")[0] == 200
    assert worker.operate(action="unload", model="classify")[0] == 200
    assert worker.model("classify") == {}
    assert worker.operate(action="prewarm", model="write")[0] == 200
    wait_until(lambda: worker.model("write").get("tier") == "device", "the model is loaded")
    status = json.loads(whole(worker.send(None, x_torchmoor_operation="status")).body)
    assert status["next_to_go"] == ["write"]
    assert status["budgets"]["device"]["used"] > 0
    assert worker.service.numbers()["models"]["device"] == 1


def test_a_model_that_its_source_does_not_have_is_not_pinned(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pinning waits for the source, however slow it is. The error fits models and adapters."""
    find, is_asked, may_answer = GivenSource.find, threading.Event(), threading.Event()

    def find_slowly(source: GivenSource, name: str) -> SourceModel:
        is_asked.set()
        assert may_answer.wait(60)
        return find(source, name)

    monkeypatch.setattr(GivenSource, "find", find_slowly)
    reply = worker.send({"action": "pin", "model": "later"}, x_torchmoor_operation="models")
    assert is_asked.wait(60)
    assert not reply.has_news()
    may_answer.set()

    status, answer = said(reply)
    assert (status, "folder or a .tar.gz" in answer["error"]["message"]) == (404, True)
    (tmp_path / "models" / "classify").rename(tmp_path / "models" / "later")
    assert worker.operate(action="prewarm", model="later")[0] == 200
    wait_until(lambda: worker.model("later").get("tier") == "device", "the model is loaded")
    assert worker.model("later")["pinned"] is False


def test_an_answer_tells_its_end_once() -> None:
    """An answer reports its end exactly once: whole, as a stream, cancelled before, after, or twice."""
    told: list[str] = []

    def reply_named(name: str) -> PendingReply:
        reply = PendingReply(lambda: None)
        reply.on_end(lambda: told.append(name))
        return reply

    finished = reply_named("finished")
    finished.finish({}, b"")
    finished.cancel()
    streamed = reply_named("streamed")
    streamed.begin({}, HandlerError.body)
    streamed.write(b"a")
    assert told == ["finished"]
    streamed.write(b"b", is_end=True)
    streamed.cancel()
    cancelled = reply_named("cancelled")
    cancelled.cancel()
    cancelled.finish({}, b"")
    failed = reply_named("failed")
    failed.fail(HandlerError("x"))

    assert told == ["finished", "streamed", "cancelled", "failed"]
    failed.on_end(lambda: told.append("late"))
    assert told[-1] == "late"


@pytest.mark.parametrize("question", ["metadata", "ready"])
def test_a_request_may_name_the_version_that_the_metadata_has(worker: Worker, question: str) -> None:
    """A request may name the version from the metadata, as open inference clients do; another version is refused."""
    headers = {TARGET: "classify", "x-torchmoor-model-question": question}

    [version] = said(worker.send(None, **{**headers, "x-torchmoor-model-question": "metadata"}))[1]["versions"]

    assert said(worker.send(None, **headers, x_torchmoor_model_version=version))[0] == 200
    status, error = said(worker.send(None, **headers, x_torchmoor_model_version="2"))
    assert status == 400
    assert "no version '2'; it has: 1" in error["error"]["message"]

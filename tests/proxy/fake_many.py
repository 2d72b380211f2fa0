"""Run a fake instance with many models, which the proxy cannot distinguish from many.mar."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.proxy.fake_instance import FakeInstance, Gate, Received, Wire, refusing

TARGET = "x-amzn-sagemaker-target-model"


def task_answer(name: str) -> dict[str, Any]:
    """Return what OpenAI's embeddings, rerank and the open inference protocol require of an answer."""
    return {
        **{"object": "list", "data": [], "usage": {"prompt_tokens": 1, "total_tokens": 1}},
        **{"id": "1", "results": []},
        **{"name": name, "ready": True, "versions": ["1"], "platform": "text-classification", "inputs": []},
        **{"model_name": name, "model_version": "1", "outputs": []},
    }


def resource_answer(resource: str) -> dict[str, Any]:
    """Return what the Responses API, tokenize and detokenize require of an answer.

    resource: the method and path of the request.
    """
    made = {"id": "resp_1", "created_at": 1, "output": [], "usage": {}}
    return {
        "POST responses": {**made, "object": "response", "status": "completed"},
        "POST responses/compact": {**made, "object": "response.compaction"},
        "POST responses/input_tokens": {"object": "response.input_tokens", "input_tokens": 1},
        "POST tokenize": {"count": 1, "max_model_len": 8, "tokens": [1], "token_strs": None},
        "POST detokenize": {"prompt": "a"},
    }.get(resource.partition("?")[0], {})


def completion(body: bytes) -> dict[str, Any]:
    """Return what OpenAI's APIs require of an answer, to a body of chat completions or of completions."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict) or not asked.keys() & {"messages", "prompt"}:
        return {}
    is_chat = "messages" in asked
    said = {"message": {"role": "assistant", "content": "a"}} if is_chat else {"text": "a"}
    return {
        "id": "1",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1,
        "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None, **said}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


@dataclass
class FakeMany:
    """Models by name: those in the source, and the tier of each loaded one.

    room: models that fit into memory; more are refused, and nothing is evicted. loading: the gate that a load waits
    for. answering: the gate that an answer waits for once its model is loaded. has_tasks: answers have all fields that
    those of tasks need.
    """

    fake: FakeInstance
    source: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    urls: dict[str, str] = field(default_factory=dict)
    room: int = 100
    loading: Gate | None = None
    answering: Gate | None = None
    refusal: tuple[int, str, str] | None = None  # for every request: status, code, message
    has_tasks: bool = False
    num_loads: int = 0
    num_status: int = 0

    def __post_init__(self) -> None:
        self.fake.behave = self.behave
        self.fake.on_operation = self.operate

    async def behave(self, request: Received, wire: Wire) -> None:
        """Answer a request for the model that its header names."""
        asked = request.headers.get(TARGET)
        name = None if asked is None else asked.removeprefix("/")
        if self.refusal is not None:
            status, code, message = self.refusal
            fields = {"Retry-After": "7"} if status == 429 else {}
            await refusing(status, code, message, fields)(request, wire)
        elif name is None:
            await refusing(400, "InvalidRequest", "which model?")(request, wire)
        elif (why := self.why_not(name)) is not None:
            await refusing(*why)(request, wire)
        else:
            tier = self.tiers.get(name, "source")
            await self.load(name)
            if self.answering is not None:
                await self.answering.pass_through()
            found = {"device": "hit", "host": "host", "disk": "disk"}.get(tier, "cold")
            receipts = {"X-Torchmoor-Model-Cache": found, "X-Torchmoor-Model-Load-Ms": "0" if found == "hit" else "250"}
            answer = {
                **(task_answer(name) if self.has_tasks else {}),
                **completion(request.body),
                **resource_answer(request.headers.get("x-torchmoor-resource", "")),
                "model": asked,
                "instance": self.fake.name,
            }
            await wire.answer(200, receipts, json.dumps(answer).encode())

    def why_not(self, name: str) -> tuple[int, str, str] | None:
        """Return the refusal of a model, or None."""
        if name in self.broken:
            return 424, "ModelBroken", self.broken[name]
        if name not in self.source and name not in self.urls:
            return 404, "ModelUnknown", f"there is no model {name}"
        if name not in self.tiers and len(self.tiers) >= self.room:
            return 507, "OutOfMemory", f"no room for {name}"
        return None

    async def load(self, name: str) -> None:
        """Load a model, or join the load that is in progress."""
        if self.tiers.get(name) == "device":
            return
        if self.tiers.get(name) != "loading":
            self.num_loads += 1
            self.tiers[name] = "loading"
        if self.loading is not None:
            await self.loading.pass_through()
        self.tiers[name] = "device"

    async def operate(self, request: Received, wire: Wire) -> None:
        """Answer the operations `status` and `models`."""
        body = json.loads(request.body)
        if request.headers["x-torchmoor-operation"] == "status":
            self.num_status += 1
            rows = [
                {
                    "name": name,
                    "tier": tier,
                    "bytes": 1000,
                    "pinned": name in self.pinned,
                    "hits": 1,
                    "last_used_s": 0.5,
                }
                for name, tier in self.tiers.items()
            ]
            device = {"used": 1000 * len(rows), "max": 1000 * self.room}
            status = {
                "instance": self.fake.name,
                "models": rows,
                "budgets": {"device": device},
                "next_to_go": [name for name in self.tiers if name not in self.pinned],
            }
            await wire.answer(body=json.dumps(status).encode())
            return
        name, action = body["model"], body["action"]
        if "url" in body:
            if body["url"] == "/nowhere":
                await refusing(404, "ModelUnknown", "there is no /nowhere")(request, wire)
                return
            self.urls.setdefault(name, body["url"])
        why = self.why_not(name)
        if action == "load" and self.tiers.get(name) == "device":
            why = 409, "ModelLoaded", f"{name} is loaded"
        if action in ("unload", "unpin") and name not in self.tiers:
            why = 404, "ModelUnknown", f"{name} is not loaded"
        if why is not None:
            await refusing(*why)(request, wire)
            return
        if action == "unload":
            del self.tiers[name]
            self.urls.pop(name, None)
        elif action == "unpin":
            self.pinned.discard(name)
        else:
            await self.load(name)
            if action == "pin":
                self.pinned.add(name)
        await wire.answer(body=json.dumps({"model": name, "tier": self.tiers.get(name, "source")}).encode())


class FakeFleet:
    """Gives every instance of a stage many models before the proxy first asks for its status."""

    def __init__(self, source: Iterable[str] = (), *, has_tasks: bool = False) -> None:
        self.many: dict[str, FakeMany] = {}
        self._source = set(source)
        self._has_tasks = has_tasks

    def __call__(self, instances: Mapping[str, FakeInstance]) -> None:
        self.many = {
            name: FakeMany(fake, source=set(self._source), has_tasks=self._has_tasks)
            for name, fake in instances.items()
        }

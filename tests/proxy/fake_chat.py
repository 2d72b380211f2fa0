"""Answer the session API as a fake instance, for tests of the chat page."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.proxy.conftest import Stage, make_session_id
from tests.proxy.fake_instance import Behaviour, Gate, Received, Wire, answering

RECEIPT = {
    "X-Torchmoor-Cache-Tier": "kv",
    "X-Torchmoor-Context-Tokens": "123",
    "X-Torchmoor-Prefill-Tokens": "10",
    "X-Torchmoor-Queue-Ms": "0.3",
    "X-Torchmoor-Ttft-Ms": "8.2",
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def lines(words: Sequence[str], finish: str = "eos_token") -> list[bytes]:
    """Return an answer as LMI's JSON lines, one per token."""
    values: list[dict[str, Any]] = [
        {"token": {"id": number, "text": word, "log_prob": -0.1, "special_token": False}}
        for number, word in enumerate(words)
    ]
    values[-1] |= {
        "generated_text": "".join(words),
        "details": {"finish_reason": finish, "generated_tokens": len(words)},
    }
    return [json.dumps(value).encode() + b"\n" for value in values]


@dataclass
class FakeChat:
    """The behaviour of all instances of a stage, and the requests that they received.

    instead: behaviours for the next requests, one each. gate: where each answer waits after its first token, until the
    gate opens or the answer is stopped.
    """

    stage: Stage
    words: Sequence[str] = ("The", " circle", " is", " red", ".")
    finish: str = "eos_token"
    expires_in_s: float = 3600.0
    gate: Gate | None = None
    is_stopped: bool = False
    num_turns: dict[str, int] = field(default_factory=dict)  # by session
    instead: list[Behaviour] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    num_opened: int = 0

    def __post_init__(self) -> None:
        for name, fake in self.stage.instances.items():
            fake.behave = self._at(name)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies that were JSON, in order."""
        return [json.loads(each.body) for each in self.received]

    def asked(self) -> list[str]:
        """Return the questions, in order."""
        return [body["prompt_text"] for body in self.bodies if "prompt_text" in body]

    def _at(self, name: str) -> Behaviour:
        async def behave(request: Received, wire: Wire) -> None:
            self.received.append(request)
            if self.instead:
                await self.instead.pop(0)(request, wire)
                return
            body = json.loads(request.body)
            if body.get("requestType") == "NEW_SESSION":
                await self._open(name, request, wire)
            elif body["type"] == "branch_session":
                await self._open(name, request, wire, body["turns"])
            elif body["type"] == "send_text_prompt":
                await self._answer(request, wire)
            elif body["type"] == "stop_answer":
                self.is_stopped = self.gate is not None
                if self.gate is not None:
                    self.gate.open()
                await answering(body=json.dumps({"success": True, "stopped": self.is_stopped}).encode())(request, wire)
            else:
                await answering(body=b'{"success": true}')(request, wire)

        return behave

    async def _open(self, name: str, request: Received, wire: Wire, num_turns: int = 0) -> None:
        self.num_opened += 1
        session = make_session_id(
            name,
            endpoint=request.headers["x-torchmoor-endpoint"],
            nonce="abcdefghijklmno" + LETTERS[self.num_opened],
            principal=request.headers.get("x-torchmoor-principal", ""),
        )
        self.num_turns[session] = num_turns
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.expires_in_s))
        await wire.answer(200, {"X-Amzn-SageMaker-New-Session-Id": f"{session}; Expires={expires}"})

    async def _answer(self, request: Received, wire: Wire) -> None:
        session = request.headers["x-amzn-sagemaker-session-id"]
        self.num_turns[session] += 1
        await wire.begin_stream("application/jsonlines", {**RECEIPT, "X-Torchmoor-Turn": str(self.num_turns[session])})
        for number, line in enumerate(lines(self.words, self.finish)):
            if number == 1 and self.gate is not None:
                await self.gate.pass_through()
            if self.is_stopped:
                self.is_stopped, self.gate = False, None
                await wire.chunk(lines([*self.words[: number + 1]], "stop_sequence")[-1])
                break
            await wire.chunk(line)
        await wire.chunk(b"")

"""Run a fake instance that holds sessions and lists them with the operation `sessions`, as the chat archives do."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.proxy.fake_instance import FakeInstance, Received, Wire, refusing
from torchmoor.wire.session_query import SessionQuery

STATUS = {"sessions": {"open": 0, "max": 1024}}


def make_session(name: str, **facts: Any) -> dict[str, Any]:
    """Return a session as a handler reports it. name: its hash."""
    now = time.time()
    usual = {
        "tier": "device",
        "bytes": 1 << 20,
        "turns": 3,
        "images": 1,
        "waiting": 0,
        "is_running": False,
        "is_pinned": False,
        "opened_at": now - 600,
        "last_used_at": now - 30,
        "expires_at": int(now) + 3000,
    }
    return {"session": name, **usual, **facts}


@dataclass
class FakeSessions:
    """Sessions by their hashes, and a journal that the test may share between instances.

    status: the answer to the status operation, in addition to the sessions. refusal: status, code and message for
    every action.
    """

    fake: FakeInstance
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=lambda: STATUS)
    refusal: tuple[int, str, str] | None = None
    journal: set[str] = field(default_factory=set)  # hashes of sessions that no instance holds
    num_evicted: int = 0
    num_lists: int = 0

    def __post_init__(self) -> None:
        self.fake.on_operation = self.operate

    def hold(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add these sessions."""
        self.sessions.update({row["session"]: row for row in rows})

    async def operate(self, request: Received, wire: Wire) -> None:
        """Answer an operation."""
        operation = request.headers["x-torchmoor-operation"]
        if operation == "status":
            await wire.answer(body=json.dumps(self.status).encode())
        elif operation == "sessions":
            await self._answer(json.loads(request.body), request, wire)
        else:
            await refusing(400, "InvalidRequest", "there is no such operation")(request, wire)

    async def _answer(self, body: Mapping[str, Any], request: Received, wire: Wire) -> None:
        if "action" not in body:
            self.num_lists += 1
            query = SessionQuery(**body)
            names = sorted(name for name in self.sessions if name > query.after and name.startswith(query.prefix))
            page = names[: query.limit]
            told = {
                "sessions": [self.sessions[name] for name in page],
                "next": page[-1] if len(page) < len(names) else None,
                "open": len(self.sessions),
                "evicted": self.num_evicted,
            }
            await wire.answer(body=json.dumps(told).encode())
        elif body.get("in_journal") and body["session"] in self.journal:
            self.journal.remove(body["session"])
            await wire.answer(body=json.dumps({"session": body["session"]}).encode())
        elif body["session"] not in self.sessions:
            await refusing(404, "SessionUnknown", "this worker holds no session of this hash")(request, wire)
        elif self.refusal is not None:
            await refusing(*self.refusal)(request, wire)
        else:
            await wire.answer(body=json.dumps(self._act(body["action"], body["session"])).encode())

    def _act(self, action: str, name: str) -> dict[str, Any]:
        if action == "close":
            return self.sessions.pop(name)
        self.sessions[name]["is_pinned"] = action == "pin"
        return self.sessions[name]


class FakeHolders:
    """Gives every instance of a stage its sessions; `prepare` of make_stage."""

    def __init__(self) -> None:
        self.of: dict[str, FakeSessions] = {}

    def __call__(self, instances: Mapping[str, FakeInstance]) -> None:
        self.of = {name: FakeSessions(fake) for name, fake in instances.items()}

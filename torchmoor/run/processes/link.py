"""What a proxy process and its parent say to each other: lines of JSON on a socket that only the two have.

Parent to process: assign (first), instance, removed, asked, status, expecting, breaker, listen, report, decisions,
credentials, reload_tls, reopen_log, stop.
Process to parent: ready, failed, down, suspect, expecting, breaker, held, report, decisions.
Either notices the other's end by the end of the socket, however it came.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from torchmoor.config.settings import ProxySettings
from torchmoor.fleet.status import Status
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.routing.models import Report, Tier

Message = dict[str, Any]
MAX_MESSAGE_BYTES = 32 << 20  # a status of ten thousand models is about one
MAX_UNREAD_BYTES = 64 << 20  # in the sender: a process that reads so little has stopped


class Link:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, own: socket.socket) -> Link:
        """Take over a connected socket."""
        return cls(*await asyncio.open_unix_connection(sock=own, limit=MAX_MESSAGE_BYTES))

    def send(self, kind: str, **members: Any) -> None:
        """To one that has ended it goes nowhere."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": kind, **members}).encode() + b"\n")

    @property
    def is_clogged(self) -> bool:
        """True if the other end reads too little of what it is sent."""
        return self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES

    async def receive(self) -> AsyncIterator[Message]:
        """Messages until the other end closes."""
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            message: Message = json.loads(line)
            yield message

    def close(self) -> None:
        """Say no more."""
        self._writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a process is told first.

    port: that it shares. row: its own in the counts, of num_rows. counts, wakers: descriptors that it has inherited.
    uses_counts: whether it routes by the others' counts, too. log_level: as logging has it.
    """

    settings: ProxySettings
    port: int
    row: int
    num_rows: int
    counts: int
    wakers: tuple[int, ...]
    uses_counts: bool
    log_level: int


def to_text(settings: object) -> str:
    """Settings for the wire. Pickled: they go from a parent to its own child, on a socket that nobody else has."""
    return base64.b64encode(pickle.dumps(settings)).decode()


def from_text(text: str) -> Any:
    """What to_text made."""
    return pickle.loads(base64.b64decode(text))


_FACTS = (
    *("name", "endpoint", "variant", "model", "host", "port", "management_port", "metrics_port"),
    *("capacity", "started_at", "source"),  # the monotonic clock is the host's
)


def describe(instance: Instance) -> Message:
    """An instance as a process is told of it."""
    facts: Message = {name: getattr(instance, name) for name in _FACTS}
    return facts


def write_status(status: Status) -> Message:
    """What an instance holds, as a process is told of it."""
    report = status.report
    if report is None:
        return {"room": status.room, "models": None}
    models = {model: int(tier) for model, tier in report.models.items()}
    return {"room": status.room, "models": models, "used": report.used_bytes, "max": report.max_bytes}


def read_status(message: Message) -> Status:
    """What write_status made."""
    models = message["models"]
    if models is None:
        return Status(message["room"], None)
    report = Report({model: Tier(tier) for model, tier in models.items()}, message["used"], message["max"])
    return Status(message["room"], report)

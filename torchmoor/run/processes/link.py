"""The messages between a proxy process and its parent: lines of JSON on a socket pair.

Parent to child: assign (first), instance, removed, asked, status, expecting, breaker, command, listen, report,
decisions, stop. Child to parent: ready, failed, down, suspect, expecting, breaker, waiting, report, decisions. Each
side notices the other's end by the end of the socket, whatever its cause.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from typing import Any

from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.instances.instance import Instance, InstanceFacts

Message = dict[str, Any]
MAX_MESSAGE_BYTES = 32 << 20  # a status of 10,000 models takes about 1 MB
MAX_UNREAD_BYTES = 64 << 20  # buffered in the sender; with more, the reader is taken to hang


class Link:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, own: socket.socket) -> Link:
        """Take over a connected socket."""
        return cls(*await asyncio.open_unix_connection(sock=own, limit=MAX_MESSAGE_BYTES))

    def send(self, kind: str, **members: Any) -> None:
        """Send a message; does nothing if the other end is closed."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": kind, **members}).encode() + b"\n")

    @property
    def is_clogged(self) -> bool:
        """True if the other end does not read its messages."""
        return self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES

    async def receive(self) -> AsyncIterator[Message]:
        """Yield messages until the other end closes."""
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            message: Message = json.loads(line)
            yield message

    def close(self) -> None:
        """Close the socket."""
        self._writer.close()


@dataclass(frozen=True, slots=True)
class ChildAssignment:
    """The first message to a child. index: from 0 up. log_level: as in logging."""

    settings: ProxySettings
    port: int
    index: int
    log_level: int


def to_text(value: object) -> str:
    """Encode settings, a status or a command for a message. Pickled: only parent and child have the socket."""
    return base64.b64encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:
    """Decode the result of to_text."""
    return pickle.loads(base64.b64decode(text))


def describe(instance: Instance) -> Message:
    """Return an instance's facts, for a child. All processes of a host share the monotonic clock of `started_at`."""
    return {each.name: getattr(instance, each.name) for each in fields(InstanceFacts)}

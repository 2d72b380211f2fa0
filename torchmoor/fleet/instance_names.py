"""What instances call themselves that DNS knows by their addresses only: the name that their session ids carry.

A handler of ours says it in its status (docs/runtime-api.md). What serves and says something else has none, and is
called by its address. What does not serve yet is asked again, and is sent nothing before its name is known: a session
that it opens under one name could not be found under another.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol

from torchmoor.config.instances import INSTANCE_NAME
from torchmoor.fleet.discovery_dns import name_of_address
from torchmoor.fleet.discovery_plan import DnsTarget
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.operations import OperationAnswer
from torchmoor.wire import operations

MAX_TRIES = 3  # of one that says something else
MAX_QUESTIONS = 64  # at a time
TIMEOUT_S = 2.0

# TorchServe's own words while there is no model, or no worker of it
_NOT_YET = frozenset(("ServiceUnavailableException", "ModelNotFoundException", "ModelVersionNotFoundException"))


class Asker(Protocol):
    """Asks instances; fleet/operations."""

    async def ask(
        self, instance: Instance, operation: str, body: Mapping[str, object], *, timeout_s: float
    ) -> OperationAnswer | None:
        """Have an operation done; None if there is no answer."""
        ...


class InstanceNames:
    """Of the addresses that one DNS name gives. make: an instance at an address, to be asked."""

    def __init__(self, operations: Asker, make: Callable[[str], Instance]) -> None:
        self._operations = operations
        self._make = make
        self._names: dict[str, str] = {}
        self._tries: dict[str, int] = {}

    async def find_targets(self, hosts: Iterable[str], port: int, *, doubtful: Set[str]) -> tuple[DnsTarget, ...]:
        """Those whose names are known by now; one that has several addresses is one.

        doubtful: hosts where somebody else may be by now; they are asked again, and keep their names if nobody answers.
        """
        listed = list(hosts)
        for gone in (self._names.keys() | self._tries.keys()) - set(listed):
            self._names.pop(gone, None)
            self._tries.pop(gone, None)
        limit = asyncio.Semaphore(MAX_QUESTIONS)

        async def ask(host: str) -> None:
            async with limit:
                await self._ask(host)

        await asyncio.gather(*(ask(host) for host in listed if host not in self._names or host in doubtful))
        found: dict[str, list[str]] = {}
        for host in listed:
            if host in self._names:
                found.setdefault(self._names[host], []).append(host)
        return tuple(DnsTarget(name, port, tuple(at)) for name, at in found.items())

    async def _ask(self, host: str) -> None:
        answer = await self._operations.ask(self._make(host), operations.STATUS, {}, timeout_s=TIMEOUT_S)
        if answer is None:
            return
        said = _read(answer.body)
        name = said.get("instance")
        if answer.status == 200 and isinstance(name, str) and len(name) <= 63 and INSTANCE_NAME.fullmatch(name):
            self._names[host] = name
        elif host not in self._names and said.get("type") not in _NOT_YET:
            self._tries[host] = self._tries.get(host, 0) + 1
            if self._tries[host] >= MAX_TRIES:
                self._names[host] = name_of_address(host)


def _read(body: bytes) -> dict[str, object]:
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}

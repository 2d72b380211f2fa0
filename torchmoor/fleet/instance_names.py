"""Names of instances that DNS lists only by address: the names that their session ids contain.

Our handlers report their name in the status operation (docs/instance-protocol.md). A serving instance that reports no
name is named after its address. An instance that does not serve yet is asked again and receives no request before its
name is known: a session that was opened under one name could not be found under another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set
from ipaddress import ip_address

from torchmoor.fleet.discovery_plan import DnsTarget
from torchmoor.proxy.instances.handler_operations import HandlerOperations
from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import operations
from torchmoor.wire.session_ids import is_instance_name

MAX_TRIES = 3  # of an instance that reports no name
MAX_QUESTIONS = 64  # in flight
TIMEOUT_S = 2.0

# TorchServe's own errors while it has no model or worker
_NOT_YET = frozenset(("ServiceUnavailableException", "ModelNotFoundException", "ModelVersionNotFoundException"))


class InstanceNames:
    """Finds the names at one DNS name's addresses. make: makes an instance to ask at an address."""

    def __init__(self, operations: HandlerOperations, make: Callable[[str], Instance]) -> None:
        self._operations = operations
        self._make = make
        self._names: dict[str, str] = {}
        self._tries: dict[str, int] = {}

    async def find_targets(self, hosts: Iterable[str], port: int, *, doubtful: Set[str]) -> tuple[DnsTarget, ...]:
        """Return the named instances, each with all its addresses.

        doubtful: hosts that may have another instance now. They are asked again, and keep their name without an answer.
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
        status = answer.content()
        name = status.get("instance")
        if answer.status == 200 and isinstance(name, str) and is_instance_name(name):
            self._names[host] = name
        elif host not in self._names and status.get("type") not in _NOT_YET:
            self._tries[host] = self._tries.get(host, 0) + 1
            if self._tries[host] >= MAX_TRIES:
                self._names[host] = name_of_address(host)


def name_of_address(host: str) -> str:
    """Return the name of an instance that reports none, such as ip-10-0-0-5."""
    return "ip-" + ip_address(host).exploded.replace(".", "-").replace(":", "-")

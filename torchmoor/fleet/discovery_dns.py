"""DNS queries of service discovery.

Names are absolute: the system's search domains are not tried, so that one query has one answer. dnspython repeats a
truncated query over TCP, follows CNAMEs, validates answers and tries the servers in turn, all within one time-out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass

import dns.asyncresolver
import dns.exception
import dns.message
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver

from torchmoor.config.discovery import DiscoverySettings, parse_nameserver
from torchmoor.errors import DiscoveryError
from torchmoor.fleet.discovery_plan import DnsTarget
from torchmoor.tasks import cancel_all

logger = logging.getLogger(__name__)

UDP_BYTES = 1232  # recommended by DNS flag day 2020; larger answers use TCP
MAX_ERROR_CHARS = 500
MAX_QUESTIONS = 16  # at a time, for addresses that an answer lacks

_ADDRESS_RECORDS = (dns.rdatatype.A, dns.rdatatype.AAAA)
Hosts = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class DnsAnswer:
    """A DNS answer: targets of SRV records, or hosts of address records. ttl_s: None if unknown."""

    targets: tuple[DnsTarget, ...] = ()
    hosts: tuple[str, ...] = ()
    ttl_s: float | None = None


async def ask(settings: DiscoverySettings) -> DnsAnswer:
    """Query a name, and the addresses of its targets. A name without such records has an empty answer.

    Raises DiscoveryError if there is no valid answer.
    """
    try:
        resolver = make_resolver(settings)
        name = dns.name.from_text(settings.dns_name)
        answer = await resolver.resolve(name, settings.record, raise_on_no_answer=False)
    except dns.resolver.NXDOMAIN:
        return DnsAnswer()
    except (dns.exception.DNSException, OSError) as error:
        raise DiscoveryError(f"{settings.dns_name}: {_describe(error)}") from error
    if answer.rrset is None:
        return DnsAnswer()
    ttl_s = float(answer.rrset.ttl)
    if settings.record != "SRV":
        return DnsAnswer(hosts=tuple(sorted(record.address for record in answer.rrset)), ttl_s=ttl_s)
    records = [record for record in answer.rrset if record.target != dns.name.root]  # the root means: no such service
    hosts = _read_additional(answer.response)
    missing = {record.target for record in records if record.target.to_text().lower() not in hosts}
    hosts |= await find_hosts(resolver, missing, settings.timeout_s)
    targets = tuple(
        DnsTarget(_first_label(record.target), record.port, hosts.get(record.target.to_text().lower(), ()))
        for record in records
    )
    return DnsAnswer(targets=targets, ttl_s=ttl_s)


def make_resolver(settings: DiscoverySettings) -> dns.asyncresolver.Resolver:
    """Make a resolver with the settings' servers, or else the system's current ones. Raises DNSException."""
    resolver = dns.asyncresolver.Resolver(configure=not settings.nameservers)
    if settings.nameservers:
        resolver.nameservers = [dns.nameserver.Do53Nameserver(*parse_nameserver(each)) for each in settings.nameservers]
    resolver.use_edns(0, 0, UDP_BYTES)
    resolver.lifetime = settings.timeout_s
    resolver.timeout = settings.timeout_s / min(len(resolver.nameservers) + 1, 3)  # a packet may get lost
    return resolver


def _read_additional(message: dns.message.Message) -> Hosts:
    """Return the IPv4 addresses in an answer's additional section."""
    return {
        rrset.name.to_text().lower(): tuple(sorted(record.address for record in rrset))
        for rrset in message.additional
        if rrset.rdtype == dns.rdatatype.A
    }


async def find_hosts(resolver: dns.asyncresolver.Resolver, names: Iterable[dns.name.Name], timeout_s: float) -> Hosts:
    """Resolve targets until the time is over, in random order, so that each is resolved eventually."""
    limit = asyncio.Semaphore(MAX_QUESTIONS)
    found: Hosts = {}

    async def find(name: dns.name.Name) -> None:
        async with limit:
            for kind in _ADDRESS_RECORDS:
                try:
                    answer = await resolver.resolve(name, kind, raise_on_no_answer=False)
                except (dns.exception.DNSException, OSError) as error:
                    logger.debug("no address name=%s error=%s", name, _describe(error))
                    return
                if answer.rrset is not None:
                    found[name.to_text().lower()] = tuple(sorted(record.address for record in answer.rrset))
                    return

    shuffled = list(names)
    random.shuffle(shuffled)
    tasks = [asyncio.create_task(find(name)) for name in shuffled]
    if tasks:
        try:
            await asyncio.wait(tasks, timeout=timeout_s)
        finally:
            await cancel_all(tasks)
    return found


def _first_label(name: dns.name.Name) -> str:
    return name.labels[0].decode("ascii", "backslashreplace").lower()


def _describe(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_CHARS] or type(error).__name__

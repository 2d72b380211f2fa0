"""A DNS server on loopback, over UDP and TCP on one port, with scripted answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

Behaviour = Callable[[dns.message.Message, bool], dns.message.Message | bytes | None]


def answering(*records: str, additional: tuple[str, ...] = ()) -> Behaviour:
    """Return a behaviour that answers from a zone file's lines: records of the question and its CNAMEs."""

    def behave(query: dns.message.Message, is_tcp: bool) -> dns.message.Message:
        answer = dns.message.make_response(query)
        asked = query.question[0]
        name = asked.name
        for line in records:
            rrset = read(line)
            if rrset.name == name and rrset.rdtype == 5:
                answer.answer.append(rrset)
                name = rrset[0].target
        found = [read(line) for line in records]
        for rrset in found:
            if rrset.name == name and rrset.rdtype == asked.rdtype:
                place = answer.find_rrset(answer.answer, name, 1, rrset.rdtype, create=True)
                place.update(rrset)
        if not any(rrset.name == name for rrset in found):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        answer.additional += [read(line) for line in additional]
        return answer

    return behave


def truncating(behave: Behaviour) -> Behaviour:
    """Return a behaviour that answers over UDP only that the result is too long."""

    def truncate(query: dns.message.Message, is_tcp: bool) -> dns.message.Message | bytes | None:
        if is_tcp:
            return behave(query, is_tcp)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.TC
        return answer

    return truncate


def failing(code: dns.rcode.Rcode) -> Behaviour:
    def fail(query: dns.message.Message, is_tcp: bool) -> dns.message.Message:
        answer = dns.message.make_response(query)
        answer.set_rcode(code)
        return answer

    return fail


def read(line: str) -> dns.rrset.RRset:
    """NAME TTL TYPE VALUE"""
    name, ttl, kind, value = line.split(maxsplit=3)
    return dns.rrset.from_text(name, int(ttl), "IN", kind, value)


class DnsServer:
    """behave: may be changed at any time. num_asked: the questions so far."""

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.num_asked = 0
        self.address = ""

    def answer(self, question: bytes, *, is_tcp: bool) -> bytes:
        """Return the answer; it is empty if none is sent."""
        self.num_asked += 1
        said = self.behave(dns.message.from_wire(question), is_tcp)
        return said.to_wire(max_size=65535) if isinstance(said, dns.message.Message) else said or b""


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # asyncio's own transport is not a DatagramTransport by its type

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._server.answer(data, is_tcp=False)
        if answer:
            self._transport.sendto(answer, addr)


@asynccontextmanager
async def serving(behave: Behaviour) -> AsyncIterator[DnsServer]:
    server = DnsServer(behave)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int.from_bytes(await reader.readexactly(2), "big")
        answer = server.answer(await reader.readexactly(length), is_tcp=True)
        writer.write(len(answer).to_bytes(2, "big") + answer)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Udp(server), local_addr=("127.0.0.1", port)
    )
    server.address = f"127.0.0.1:{port}"
    try:
        yield server
    finally:
        transport.close()
        listener.close()
        await listener.wait_closed()

"""Addresses of hosts, and the rule for public ones: for URLs of images that clients send, and requests of the proxy."""

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_AZURE_PLATFORM = ipaddress.IPv4Address("168.63.129.16")  # in each Azure network: DNS, keys, the host's agent


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host name. Blocks, perhaps for longer than a connection may take. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def destination(text: str) -> Address:
    """Return the address that packets reach: IPv6 can embed an IPv4 address in several ways, and have a zone."""
    ip = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    translated = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
    return ip.ipv4_mapped or ip.sixtofour or translated or ip


def is_public(ip: Address) -> bool:
    """Return whether an address, as `destination` returns it, lies outside private, local and reserved networks."""
    if isinstance(ip, ipaddress.IPv6Address) and (ip not in _GLOBAL_UNICAST or ip.teredo):
        return False
    return ip.is_global and not ip.is_multicast and ip != _AZURE_PLATFORM

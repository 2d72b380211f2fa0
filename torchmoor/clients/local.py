"""Addresses of this machine, which the environment's HTTP proxy cannot reach."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit
from urllib.request import BaseHandler, OpenerDirector, ProxyHandler, build_opener


def is_local(url: str) -> bool:
    """Return True if a URL's host is this machine's loopback, or 0.0.0.0 or ::, which lead there, too."""
    try:
        host = urlsplit(url).hostname or ""
        if host == "localhost":
            return True
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:  # a name, or not a URL
        return False


def make_opener(url: str, *handlers: type[BaseHandler]) -> OpenerDirector:
    """Return urllib's opener for a URL, without proxies for this machine."""
    return build_opener(*handlers, *([ProxyHandler({})] if is_local(url) else []))

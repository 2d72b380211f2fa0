"""Addresses of this machine, which the environment's HTTP proxy cannot reach."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit
from urllib.request import BaseHandler, OpenerDirector, ProxyHandler, build_opener


def is_local(url: str) -> bool:
    """Return True if a URL's host is this machine's loopback."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or not a URL
        return False


def make_opener(url: str, *handlers: type[BaseHandler]) -> OpenerDirector:
    """Return urllib's opener for a URL, without proxies for this machine."""
    return build_opener(*handlers, *([ProxyHandler({})] if is_local(url) else []))

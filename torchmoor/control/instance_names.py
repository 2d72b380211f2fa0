"""Names of the instances of created endpoints: no other instance of the host has one of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from torchmoor.proxy.instances.endpoint import Endpoint, name_stem

MAX_STEM = 48  # of an endpoint's name; the serial and a number come after it


def make_stem(name: str, serial: int, endpoints: Iterable[Endpoint]) -> str:
    """Return the beginning of the names of an endpoint's instances, before their numbers.

    serial: no other created endpoint has it; 1 or more. endpoints: the host's; instances of those that its
    configuration has are named after them, and may be started later.
    """
    taken: set[str] = set()
    for endpoint in endpoints:
        if not endpoint.generation:
            taken.add(endpoint.name.lower())
            taken.update(name_stem(endpoint.settings, variant.settings) for variant in endpoint.variants)
    stem = f"{_shorten(name)}-{serial}"
    while stem in taken:
        stem += "-0"  # no serial is 0
    return stem


def _shorten(name: str) -> str:
    short = re.sub(r"-+", "-", name.lower())
    if len(short) <= MAX_STEM:
        return short
    return f"{short[: MAX_STEM - 9].rstrip('-')}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"

"""Session ids: reading and verifying what a handler minted, and where a session goes.

    ts-seq-{nonce}-{expiry}-{instance}-{key id}{mac}

nonce: 16 characters base32; expiry: 8 hexadecimal digits, seconds since 1970; instance: the stable name of the one
that opened the session; key id: 2 characters; mac: the first 16 bytes of HMAC-SHA256 in base32, 26 characters. All
lower case. The handlers mint ids with their own copy of this rule (they share no code with the proxy); a test
holds the two together.
"""

from __future__ import annotations

import hmac
import re
from base64 import b32encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from torchmoor.proxy.routing.pool import C, Pool

NEW_SESSION = b"NEW_SESSION"
MAX_LENGTH = 256
MAX_COMPARED = 16  # instances whose rooms are compared for a new session; of more, two are drawn

_CONTEXT = "torchmoor-session-v1"
_MAC_BYTES = 16
_PREFIX = "ts-seq-"
_NONCE = slice(7, 23)
_EXPIRY = slice(24, 32)
_INSTANCE = slice(33, -29)
_KEY_ID = slice(-28, -26)
_EXPIRY_FORM = re.compile(r"[0-9a-f]{8}", re.ASCII)
_INSTANCE_FORM = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*", re.ASCII)  # no nested repeat of one character: linear
_MAX_INSTANCE_LENGTH = 63


class SessionId(NamedTuple):
    """A verified id's parts. expires_at: seconds since 1970; judged by the handler alone.

    One that its instance's own handler has minted has neither that nor a key (foreign_sessions.py).
    """

    text: str
    instance: str
    expires_at: int
    key_id: str

    @property
    def is_foreign(self) -> bool:
        """True if only its own instance can serve the session, and no proof is in its id."""
        return not self.key_id


def session_mac(
    key: bytes, *, endpoint: str, principal: str, nonce: str, expiry: str, instance: str, key_id: str
) -> str:
    """The id's last part, without its key id."""
    message = "\n".join((_CONTEXT, endpoint, principal, nonce, expiry, instance, key_id)).encode("ascii")
    digest = hmac.digest(key, message, "sha256")[:_MAC_BYTES]
    return b32encode(digest).decode("ascii").rstrip("=").lower()


def verify(text: str, keys: Mapping[str, bytes], *, endpoint: str, principal: str = "") -> SessionId | None:
    """The parts of an id that was minted for this endpoint and caller with one of the keys; else None.

    The parts are taken by position: the instance's name is what the parts of fixed length leave. The whole id is
    made again and compared, so that only its one canonical spelling passes.
    """
    if len(text) > MAX_LENGTH or not text.isascii():
        return None
    nonce, expiry, instance, key_id = text[_NONCE], text[_EXPIRY], text[_INSTANCE], text[_KEY_ID]
    key = keys.get(key_id)
    if (
        key is None
        or len(instance) > _MAX_INSTANCE_LENGTH
        or not _INSTANCE_FORM.fullmatch(instance)
        or not _EXPIRY_FORM.fullmatch(expiry)
    ):
        return None
    mac = session_mac(
        key,
        endpoint=endpoint,
        principal=principal,
        nonce=nonce,
        expiry=expiry,
        instance=instance,
        key_id=key_id,
    )
    canonical = f"{_PREFIX}{nonce}-{expiry}-{instance}-{key_id}{mac}"
    if not hmac.compare_digest(canonical, text):
        return None
    return SessionId(text, instance, int(expiry, 16), key_id)


def rendezvous(session_id: str, instances: Iterable[C]) -> C | None:
    """Where a session goes whose own instance is not ready: the same answer in every proxy, without shared state.

    The ready instance with the highest hash of id and name. When one leaves, only its own sessions move.
    """

    def weight(instance: C) -> bytes:
        return blake2b(f"{session_id}\n{instance.name}".encode(), digest_size=16).digest()

    return max((instance for instance in instances if instance.is_ready), key=weight, default=None)


def place_of(session_id: str) -> float:
    """A number from 0 to 1 that is the session's own: which sessions come first, in every proxy."""
    return int.from_bytes(blake2b(session_id.encode(), digest_size=7).digest(), "big") / (1 << 56)


def find_roomiest(pool: Pool[C], excluded: frozenset[str], rng: Random) -> C | None:
    """Where a new session goes: to the open instance with the most session room, then the least load.

    Of more than MAX_COMPARED only two, drawn at random, are compared. With so many of them each tells its room rarely,
    and whoever seemed the roomiest would get the new sessions of all proxies until it tells the next time
    (benchmarks/scale.py: the fullest of 1,000 instances had 1.6 times the mean, with two drawn 1.1).

    Rooms within an eighth of the most count as equal, else one free place more would outweigh any load. An instance
    whose room is not known yet counts as the roomiest; of one that comes back only its share of the room counts. None
    if nobody's room is known: then load decides alone.
    """
    instances = pool.open_instances
    if len(instances) > MAX_COMPARED:
        drawn = _roomiest_of(rng.sample(instances, 2), excluded)
        if drawn is not None and drawn.session_room != 0:
            return drawn
    return _roomiest_of(instances, excluded)


def _roomiest_of(instances: Sequence[C], excluded: frozenset[str]) -> C | None:
    instances = [instance for instance in instances if instance.name not in excluded]
    rooms = {i.name: i.session_room * i.share for i in instances if i.session_room is not None}
    if not rooms:
        return None
    most = max(rooms.values())
    enough = most - most // 8
    roomy = [instance for instance in instances if rooms.get(instance.name, enough) >= enough]
    return min(roomy, key=lambda instance: (instance.load, -rooms.get(instance.name, most + 1)))

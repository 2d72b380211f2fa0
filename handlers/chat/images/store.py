"""The image store: holds each image once, even if many conversations have it.

Tiers of an image, fastest first: its projected features on the device, its encoded bytes on the host, and the same
bytes in the journal. The contract: an image is stored as long as a session holds it. If memory is needed, the least
recently used features that no running turn has pinned are evicted; they are computed again when they are needed.
Encoded bytes are evicted only if a journal has them. An image that still does not fit is refused. `features_bytes` and
`host_bytes` are the sums over all stored images.

Pixel values are not kept: computing features from them takes as long as from the encoded image
(docs/decisions/0007-blocks-and-tiers.md).
"""

import hashlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum

from PIL import Image as Pillow

from handlers.engine.contract import ImageFeatures
from handlers.errors import OutOfMemory
from handlers.journal.event import image_hash
from handlers.worker.counters import Counters

logger = logging.getLogger(__name__)
ROWS_PER_DIGEST = 64  # copied at a time
MAX_ENCODINGS = 8  # encodings of one image that are recognised by their bytes; further ones are decoded


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a conversation.

    key: a negative number that identifies the image within its sharing scope, and represents it in a cache's list of
    tokens. digest: hash of its encoded bytes, its name in the journal.
    """

    key: int
    digest: str
    num_tokens: int


class ImageTier(Enum):
    """Where an image is kept, the fastest first."""

    FEATURES = "features"
    HOST = "encoded"
    JOURNAL = "journal"


@dataclass(slots=True, eq=False)
class _Entry:
    key: int
    features: ImageFeatures | None = None
    num_tokens: int = 0
    num_bytes: int = 0  # size of its features, on the device or not
    encoded: bytes | None = None
    num_holders: int = 0
    num_pins: int = 0
    digests: deque[tuple[str, str]] = field(default_factory=deque)  # (scope, digest) of its known encodings
    computing: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that encodes it


class ImageStore:
    """Holds images and their features. Any thread; methods that decode or encode take long.

    max_features_bytes: limit of features on the device. max_host_bytes: limit of encoded images on the host.
    is_durable: a journal has every image that a session holds. defers: images from the journal are encoded only when a
    prompt needs them; requires that every image has the same number of tokens. decoded: a context manager that returns
    an RGB image; raises the BadImage family, OutOfMemory. encode: computes features, (tokens, hidden size).
    """

    def __init__(
        self,
        max_features_bytes: int,
        max_host_bytes: int,
        is_durable: bool,
        decoded: Callable[[bytes, Callable[[], None]], AbstractContextManager[Pillow.Image]],
        encode: Callable[[Pillow.Image], ImageFeatures],
        counters: Counters,
        *,
        defers: bool = False,
    ) -> None:
        self.max_features_bytes = max_features_bytes
        self.max_host_bytes = max_host_bytes
        self.features_bytes = 0
        self.host_bytes = 0
        self._is_durable = is_durable
        self._decoded = decoded
        self._encode = encode
        self._counters = counters
        self._defers = defers
        self._num_tokens = 0  # tokens of every image, known after the first has been encoded; only if `defers`
        self._lock = threading.RLock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the least recently used first
        self._known: dict[tuple[str, str], _Entry] = {}  # by scope and digest, so that a known image is not decoded

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return (
            f"<ImageStore {len(self)} images, {self.features_bytes} bytes on the device, {self.host_bytes} on the host>"
        )

    def take_in(
        self, scope: str, encoded: bytes, check: Callable[[], None] = lambda: None, *, is_recorded: bool = False
    ) -> Image:
        """Hold the image of these bytes until `release`. Computes its features unless the scope has them.

        Features that do not fit beside pinned ones are not stored, and computed again when they are needed.
        is_recorded: the image comes from the journal. check: called while the image waits to be decoded; raises if the
        request is cancelled. Raises the BadImage family, OutOfMemory, and what `check` raises.
        """
        digest = image_hash(encoded)
        with self._lock:
            entry = self._known.get((scope, digest))
            if entry is not None:
                self._hold(entry)
                try:
                    self._keep_encoded(entry, encoded)  # the host may have evicted them
                except OutOfMemory:
                    self._let_go(entry, is_kept=True)
                    raise
                self._counters.add("images_shared")
                return Image(entry.key, digest, entry.num_tokens)
        with self._decoded(encoded, check) as decoded:
            key = content_key(scope, decoded)
            with self._lock:
                entry = self._entries.setdefault(key, _Entry(key))
                self._hold(entry)
            try:
                if not (is_recorded and self._defer(entry)):
                    self._share_or_compute(entry, decoded)
                with self._lock:
                    self._keep_encoded(entry, encoded)
                    self._know(entry, (scope, digest))
            except BaseException:
                self._let_go(entry, is_kept=False)
                raise
        return Image(key, digest, entry.num_tokens)

    def release(self, image: Image, *, is_kept: bool = False) -> None:
        """Remove one holder; after the last one the image is forgotten.

        is_kept: keep its features until their memory is needed, for a client that sends the same image again.
        """
        with self._lock:
            self._let_go(self._entries[image.key], is_kept)

    def pin(self, image: Image, fetch: Callable[[], bytes]) -> tuple[ImageFeatures, ImageTier]:
        """Pin the image's features, (tokens, hidden size), on the device until `unpin`; return them and their tier.

        fetch: reads its encoded bytes from the journal. Raises OutOfMemory, and what `fetch` raises.
        """
        with self._lock:
            entry = self._entries[image.key]
            entry.num_pins += 1
            self._entries.move_to_end(entry.key)
            if entry.features is not None:
                return entry.features, ImageTier.FEATURES
        try:
            with entry.computing:
                if entry.features is not None:
                    return entry.features, ImageTier.FEATURES
                with self._lock:  # before the work rather than after it
                    self._make_room(entry.num_bytes, entry)
                encoded, tier = entry.encoded, ImageTier.HOST
                if encoded is None:
                    encoded, tier = fetch(), ImageTier.JOURNAL
                with self._decoded(encoded, lambda: None) as decoded:
                    features = self._compute(entry, decoded)
            with self._lock:
                self._keep_encoded(entry, encoded)
            return features, tier
        except BaseException:
            self.unpin(image)
            raise

    def find_encoded(self, image: Image) -> bytes | None:
        """Return encoded bytes of a held image, not necessarily those of `digest`; None if the host has none."""
        with self._lock:
            return self._entries[image.key].encoded

    def share(self, image: Image) -> None:
        """Hold a held image once more."""
        with self._lock:
            self._hold(self._entries[image.key])

    def measure(self, images: Iterable[Image]) -> tuple[int, ImageTier]:
        """Return the bytes of these held images on device and host, and the slowest of their tiers."""
        num_bytes, tiers = 0, {ImageTier.FEATURES}
        with self._lock:
            for key in {image.key for image in images}:
                entry = self._entries[key]
                num_bytes += _num_bytes(entry.features) + len(entry.encoded or b"")
                is_here = entry.features is not None
                elsewhere = ImageTier.JOURNAL if entry.encoded is None else ImageTier.HOST
                tiers.add(ImageTier.FEATURES if is_here else elsewhere)
        return num_bytes, max(tiers, key=list(ImageTier).index)

    def unpin(self, image: Image) -> None:
        """Remove one pin of the image's features."""
        with self._lock:
            entry = self._entries[image.key]
            entry.num_pins -= 1
            self._forget_if_unused(entry)

    def _hold(self, entry: _Entry) -> None:
        entry.num_holders += 1
        self._entries.move_to_end(entry.key)

    def _know(self, entry: _Entry, name: tuple[str, str]) -> None:
        """Register an encoding of the image, so that it is recognised without decoding."""
        if name not in self._known:
            entry.digests.append(name)
            self._known[name] = entry
        if len(entry.digests) > MAX_ENCODINGS:
            del self._known[entry.digests.popleft()]

    def _let_go(self, entry: _Entry, is_kept: bool) -> None:
        with self._lock:
            entry.num_holders -= 1
            if entry.num_holders == 0:
                self._set_encoded(entry, None)
                if not is_kept and not entry.num_pins:
                    self._set_features(entry, None)
                self._forget_if_unused(entry)

    def _forget_if_unused(self, entry: _Entry) -> None:
        if not entry.num_holders and not entry.num_pins and entry.features is None:
            del self._entries[entry.key]
            for name in entry.digests:
                del self._known[name]

    def _defer(self, entry: _Entry) -> bool:
        """Return whether the image is encoded only when a prompt needs it."""
        with self._lock:
            entry.num_tokens = entry.num_tokens or self._num_tokens
            return self._defers and entry.num_tokens > 0

    def _share_or_compute(self, entry: _Entry, decoded: Pillow.Image) -> None:
        """Compute the image's features unless they were computed before.

        Does not wait for the lock of an image that was computed before: `pin` holds that lock while it waits for
        decoding memory, which `decoded` may occupy.
        """
        if not entry.num_tokens:
            with entry.computing:
                if not entry.num_tokens:
                    self._compute(entry, decoded)
                    return
        self._counters.add("images_shared")

    def _compute(self, entry: _Entry, decoded: Pillow.Image) -> ImageFeatures:
        """Compute the image's features and store them; they must fit if they are pinned. Hold `entry.computing`."""
        features = self._encode(decoded)
        self._counters.add("images_encoded")
        with self._lock:
            try:
                self._make_room(features.nbytes, entry)
                self._set_features(entry, features)
            except OutOfMemory:
                if entry.num_pins or features.nbytes > self.max_features_bytes:
                    raise
            entry.num_tokens, entry.num_bytes = len(features), features.nbytes
            if self._defers:
                self._num_tokens = len(features)
        return features

    def _make_room(self, num_bytes: int, but: _Entry) -> None:
        """Evict unused features until `num_bytes` more fit. Raises OutOfMemory, and evicts nothing, if they cannot."""
        missing = self.features_bytes + num_bytes - self.max_features_bytes
        if missing <= 0:
            return
        idle = [e for e in self._entries.values() if e.features is not None and not e.num_pins and e is not but]
        if missing > sum(_num_bytes(entry.features) for entry in idle):
            raise OutOfMemory(
                f"the {self.max_features_bytes} bytes for images on the device have no room for {num_bytes} more; "
                "close sessions or try again later"
            )
        for entry in idle:
            if missing <= 0:
                return
            missing -= _num_bytes(entry.features)
            self._counters.add("images_demoted")
            self._set_features(entry, None)
            self._forget_if_unused(entry)

    def _keep_encoded(self, entry: _Entry, encoded: bytes) -> None:
        """Keep the bytes on the host if they fit. Raises OutOfMemory if they do not and no journal has them."""
        if entry.encoded is not None or not entry.num_holders:
            return
        if self._is_durable and len(encoded) > self.max_host_bytes:
            return
        others = (e for e in list(self._entries.values()) if e.encoded is not None)
        while self._is_durable and self.host_bytes + len(encoded) > self.max_host_bytes:
            oldest = next(others, None)
            if oldest is None:
                return
            self._set_encoded(oldest, None)
        if self.host_bytes + len(encoded) > self.max_host_bytes:
            raise OutOfMemory(
                f"the {self.max_host_bytes} bytes for images on the host have no room for {len(encoded)} more; "
                "close sessions, try again later, or switch a journal on, which keeps them instead"
            )
        self._set_encoded(entry, encoded)

    def _set_features(self, entry: _Entry, features: ImageFeatures | None) -> None:
        self.features_bytes += _num_bytes(features) - _num_bytes(entry.features)
        entry.features = features

    def _set_encoded(self, entry: _Entry, encoded: bytes | None) -> None:
        self.host_bytes += len(encoded or b"") - len(entry.encoded or b"")
        entry.encoded = encoded

    def check_integrity(self, num_held: int) -> None:
        """Raise RuntimeError unless sums and names are correct and nothing is pinned.

        num_held: images of all sessions.
        """
        with self._lock:
            entries = list(self._entries.values())
            if sum(_num_bytes(entry.features) for entry in entries) != self.features_bytes:
                raise RuntimeError(f"{self.features_bytes} bytes of features are counted, but others are held")
            if self.features_bytes > self.max_features_bytes:
                raise RuntimeError(f"features hold {self.features_bytes} bytes, more than they may")
            if sum(len(entry.encoded or b"") for entry in entries) != self.host_bytes:
                raise RuntimeError(f"{self.host_bytes} bytes on the host are counted, but others are held")
            if sum(entry.num_holders for entry in entries) != num_held or any(entry.num_pins for entry in entries):
                raise RuntimeError("the counts of holders and pins do not match the sessions")
            if {name for entry in entries for name in entry.digests} != set(self._known):
                raise RuntimeError("the known encodings are not those of the images that are held")


def digests(images: Iterable[Image]) -> tuple[str, ...]:
    """List the images' names in the journal."""
    return tuple(image.digest for image in images)


def content_key(scope: str, image: Pillow.Image) -> int:
    """Return a negative number that names the decoded pixels within a sharing scope."""
    digest = hashlib.sha256(f"{scope}|{image.size}|".encode())
    for top in range(0, image.height, ROWS_PER_DIGEST):
        bottom = min(top + ROWS_PER_DIGEST, image.height)
        digest.update(image.crop((0, top, image.width, bottom)).tobytes())
    return -1 - int.from_bytes(digest.digest()[:16])


def _num_bytes(features: ImageFeatures | None) -> int:
    return 0 if features is None else features.nbytes

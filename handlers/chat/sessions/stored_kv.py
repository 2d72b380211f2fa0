"""Writes KV caches of idle sessions to the journal, and reads them instead of computing the prompt again.

    idle for kv_idle_s --> parts that the journal lacks are written --> read by the next worker, or by this one after
    the cache was evicted

A part is used only if it was computed by the same model from the same tokens and images. Other parts are ignored and
counted, and the prompt is computed.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from handlers.chat.images.store import Image
from handlers.chat.sessions.session import Session
from handlers.engine.contract import KvParts
from handlers.errors import HandlerError, OutOfMemory
from handlers.journal.codec import HEAD_BYTES, KvCodec
from handlers.journal.event import DamagedRecord
from handlers.journal.journal import Journal, JournalFull, OwnerFull
from handlers.worker.counters import Counters
from torchmoor.wire.last_kept import LastKept

logger = logging.getLogger(__name__)
MAX_WAITING = 10_000  # sessions that wait to be written; beyond this number the oldest is skipped
PARTS_READ = 4  # at once
WEIGHT = 0.2  # weight of the newest measurement in the running mean
TRIED_EVERY = 16  # of this many restorations that would be slower than computing, one is done, to measure again


class StoredKv:
    """Writes and reads stored KV caches. Any thread.

    idle_s: how long a session must be idle before its cache is written.
    """

    def __init__(
        self,
        journal: Journal,
        parts: KvParts,
        keys: Mapping[str, bytes],
        idle_s: float,
        counters: Counters,
    ) -> None:
        self._journal = journal
        self._parts = parts
        self._codec = KvCodec(keys)
        self._idle_s = idle_s
        self._counters = counters
        self._token_s: float | None = None  # seconds to read a token
        self._num_slower = 0
        self._waiting: LastKept[Session, float] = LastKept(MAX_WAITING)  # by when they are due
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="stored-kv", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    # Writing

    def note_idle(self, session: Session) -> None:
        """Write the session's cache unless another turn begins soon. Returns at once."""
        with self._wake:
            self._waiting.keep(session, time.monotonic() + self._idle_s)
            self._wake.notify()

    def _run(self) -> None:
        while (session := self._next()) is not None:
            try:
                self._write(session)
            except (OSError, DamagedRecord, HandlerError) as exc:
                self._counters.add("stored_kv_failed")
                logger.warning("KV cache not written session=%s error=%s", session.hash, exc)
            except Exception:
                self._counters.add("stored_kv_failed")
                logger.exception("KV cache not written session=%s", session.hash)

    def _next(self) -> Session | None:
        """Wait for a session that is due; None at the end."""
        with self._wake:
            while not self._is_stopping:
                wait_s = None
                if self._waiting:
                    session, due_at = next(iter(self._waiting.items()))
                    wait_s = due_at - time.monotonic()
                    if wait_s <= 0:
                        del self._waiting[session]
                        return session
                self._wake.wait(wait_s)
            return None

    def _write(self, session: Session) -> None:
        """Write the parts of the session's cache that the journal does not have."""
        if session.turn is not None or session.end is not None:
            return
        variant, keys = session.cache.variant, self._parts.keys(session.cache)
        digests = {image.key: image.digest for image in session.images}
        for number, part in enumerate(self._parts.split(self._parts.name(keys, digests, variant))):
            if session.stored_kv[number : number + 1] == [part]:
                continue
            content = self._parts.read(session.cache, keys, part, variant)
            if content is None:
                return
            data = self._codec.encode(session.id.text, number, part.name, content)
            try:
                if not self._journal.put_kv(session.id.text, number, data, session.owner):
                    return  # the session has ended
            except JournalFull as exc:
                self._counters.add("stored_kv_limited" if isinstance(exc, OwnerFull) else "stored_kv_refused")
                return
            session.stored_kv[number:] = [part]
            self._counters.add("stored_kv_written")

    # Reading

    def has_more(self, session: Session) -> bool:
        """Return whether the journal has more of the session's cache than this worker."""
        return bool(session.stored_kv) and session.cache.length < session.stored_kv[-1].end

    def restore(self, session: Session, keys: Sequence[int], images: Sequence[Image]) -> None:
        """Extend the session's cache, which a turn has matched with its prompt, by parts from the journal.

        At least one token of the prompt is left to compute.
        """
        if self._is_slower():
            return
        digests = {image.key: image.digest for image in images}
        names = self._parts.name(keys[: len(keys) - 1], digests, session.cache.variant)
        num_kept, begun_at = session.cache.length, time.monotonic()
        try:
            self._read(session, keys, names)
        except OutOfMemory:
            logger.info("KV cache not read session=%s: no room", session.hash)
        except (OSError, DamagedRecord) as exc:
            is_damaged = isinstance(exc, DamagedRecord)
            self._counters.add("stored_kv_damaged" if is_damaged else "stored_kv_failed")
            logger.warning("KV cache not read session=%s error=%s", session.hash, exc)
        num_restored = session.cache.length - num_kept
        if num_restored > 0:
            self._counters.add("tokens_restored", num_restored)
            token_s = (time.monotonic() - begun_at) / num_restored
            mean = token_s if self._token_s is None else self._token_s
            self._token_s = mean + WEIGHT * (token_s - mean)

    def _is_slower(self) -> bool:
        """Return whether computing tokens takes less time than reading them."""
        computing_s = self._parts.token_s
        if self._token_s is None or computing_s is None or self._token_s <= computing_s:
            return False
        self._num_slower += 1
        return self._num_slower % TRIED_EVERY != 0

    def _read(self, session: Session, keys: Sequence[int], names: Sequence[bytes]) -> None:
        sid, cache = session.id.text, session.cache
        length = self._parts.length
        first, known = cache.length // length, self._parts.split(names)
        session.stored_kv = known[:first]
        for start in range(first, len(known), PARTS_READ):
            count = min(PARTS_READ, len(known) - start)
            found = self._journal.read_kv(sid, start, count, HEAD_BYTES + self._parts.max_bytes)
            for number, data in enumerate(found, start):
                name, content = self._codec.decode(data, sid, number)
                part = self._parts.find(names, number, len(content))
                if part is None or part.name != name:
                    self._counters.add("stored_kv_stale")
                    return
                if part.end > cache.length:
                    self._parts.write(cache, keys, part, content)
                    self._counters.add("stored_kv_read")
                session.stored_kv.append(part)
                if part.end - part.start < length:
                    return
            if len(found) < count:
                return

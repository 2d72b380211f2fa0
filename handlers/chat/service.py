"""One chat request from wire to engine and back: opens, asks, closes, and the worker's status."""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime

import torch
from PIL import Image

from handlers.chat.counters import Counters
from handlers.chat.intake import ImageIntake
from handlers.chat.recorder import SessionRecorder, digests
from handlers.chat.reply import Reply
from handlers.chat.session_id import SessionId, SessionIds
from handlers.chat.sessions import LoadedImage, Session, SessionImage, SessionStore
from handlers.chat.turn import Turn, TurnParts
from handlers.chat.wire import (
    AddImages,
    Ask,
    CloseSession,
    Command,
    ImageReference,
    Incoming,
    OpenSession,
    Status,
    parse,
)
from handlers.engine.engine import Engine
from handlers.engine.kv_cache import SequenceCache
from handlers.errors import HandlerError, InternalError, InvalidRequest, OutOfMemory, SessionLost, TurnConflict
from handlers.journal.event import Event, image_hash
from handlers.journal.journal import Journal
from handlers.models.text import TextModel
from handlers.settings import HandlerSettings

logger = logging.getLogger(__name__)
JSON = {"Content-Type": "application/json"}
MAX_LISTED_SESSIONS = 1000
SWEEP_INTERVAL_S = 600.0  # between two looks for journals of sessions that have expired


class ChatService:
    """`start` never raises and never waits: what takes time happens on the worker's own threads.

    wall: seconds since 1970, for expiries.
    """

    def __init__(
        self,
        settings: HandlerSettings,
        model: TextModel,
        engine: Engine,
        ids: SessionIds,
        intake: ImageIntake,
        wall: Callable[[], float] = time.time,
        journal: Journal | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._engine = engine
        self._ids = ids
        self._intake = intake
        self._wall = wall
        self._counters = Counters()
        self._loading: Executor = ThreadPoolExecutor(settings.intake.num_threads, "intake")
        self._preparing: Executor = ThreadPoolExecutor(2, "prepare")
        self.store = SessionStore(settings.session, ids, wall)
        self._recorder = SessionRecorder(journal, self.store, self._encode, settings.journal.max_replays)
        self._turn_parts = TurnParts(
            settings=settings.engine,
            model=model,
            engine=engine,
            store=self.store,
            preparing=self._preparing,
            loading=self._loading,
            counters=self._counters,
            load_images=self._load_images,
            recorder=self._recorder,
        )
        self._stopping = threading.Event()
        self._janitor = threading.Thread(target=self._expire_sessions, name="janitor", daemon=True)
        self._janitor.start()

    def stop(self) -> None:
        """End the service's threads and the engine."""
        self._stopping.set()
        self._janitor.join()
        self._loading.shutdown()  # before the engine, which encodes the images that are still being loaded
        self._preparing.shutdown()
        self._engine.stop()

    def _expire_sessions(self) -> None:
        next_sweep = 0.0
        while not self._stopping.wait(1.0):
            try:
                self.store.expire()
                if self._wall() >= next_sweep:
                    next_sweep = self._wall() + SWEEP_INTERVAL_S
                    self._recorder.sweep(int(self._wall() - self._settings.session.tombstone_s))
            except Exception:
                logger.exception("sessions could not be expired")

    def start(self, incoming: Incoming, reply: Reply) -> None:
        """Answer a request; every outcome, errors too, goes through `reply`."""
        try:
            self._dispatch(parse(incoming), reply)
        except HandlerError as error:
            reply.fail(error)
        except Exception:
            logger.exception("request failed")
            reply.fail(InternalError("the request could not be handled; the worker's log has the reason"))

    def _dispatch(self, command: Command, reply: Reply) -> None:
        match command:
            case Status():
                reply.finish(JSON, json.dumps(self.status()).encode())
            case OpenSession():
                self._in_background(reply, lambda: self._open(command, reply))
            case AddImages():
                self._in_background(reply, lambda: self._add_images(command, reply))
            case Ask():
                self._ask(command, reply)
            case CloseSession():
                self._in_background(reply, lambda: self._close(command, reply))

    def _ask(self, command: Ask, reply: Reply) -> None:
        caller = command.caller
        try:
            session = self.store.get(command.session_id, caller.endpoint, caller.principal)
        except SessionLost:
            self._in_background(reply, lambda: Turn(self._turn_parts, self._find(command), command, reply).start())
        else:
            Turn(self._turn_parts, session, command, reply).start()

    def _find(self, command: Ask | AddImages) -> Session:
        """The session, taken over from its journal if another worker held it. Raises the SessionGone family."""
        endpoint, principal = command.caller.endpoint, command.caller.principal
        try:
            return self.store.get(command.session_id, endpoint, principal)
        except SessionLost:
            if not self._recorder.is_known(command.session_id):
                raise
        cache = SequenceCache(self._engine.runner.cache_shape)
        return self.store.adopt(command.session_id, cache, endpoint, principal)

    def _close(self, command: CloseSession, reply: Reply) -> None:
        """A session that only its journal knows is closed there, without taking it in first."""
        session = None
        try:
            session = self.store.get(command.session_id, command.caller.endpoint, command.caller.principal)
        except SessionLost:
            if not self._recorder.is_known(command.session_id):
                raise
        self._recorder.close(command.session_id)
        if session is not None:
            self.store.close(session)
        self._counters.add("sessions_closed")
        reply.finish({**JSON, "X-Amzn-SageMaker-Closed-Session-Id": command.session_id}, b'{"success": true}')

    def _in_background(self, reply: Reply, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                action()
            except HandlerError as error:
                reply.fail(error)
            except Exception:
                logger.exception("request failed")
                reply.fail(InternalError("the request could not be handled; the worker's log has the reason"))

        self._loading.submit(run)

    def _open(self, command: OpenSession, reply: Reply) -> None:
        limits = self._settings.session
        ttl_s = command.ttl_s or limits.ttl_s
        if ttl_s > limits.max_ttl_s:
            raise InvalidRequest(f"'ttl_s' must be at most {limits.max_ttl_s}")
        loaded = self._load_images(command.images)
        cache = SequenceCache(self._engine.runner.cache_shape)
        session = self.store.open(cache, ttl_s, command.caller.endpoint, command.caller.principal)
        try:
            self._add(session, "open", loaded, command.invocation_id)
        except Exception:
            self._discard(session)
            raise
        reply.on_cancel(lambda: self._discard(session))  # the client left before it could read the id
        self._counters.add("sessions_opened")
        stamp = _stamp(session.id)
        headers = {"X-Amzn-SageMaker-Session-Id": stamp, "X-Amzn-SageMaker-New-Session-Id": stamp}
        reply.finish({**JSON, **headers}, json.dumps({"session_id": session.id.text}).encode())

    def _discard(self, session: Session) -> None:
        """Undo an opening, in memory now and in the journal soon. Any thread, the pump's too."""
        self.store.discard(session)
        with suppress(RuntimeError):  # the worker is stopping: the sweep will find it
            self._loading.submit(self._recorder.discard, session.id.text)

    def _add_images(self, command: AddImages, reply: Reply) -> None:
        session = self._find(command)
        loaded = self._load_images(command.images)
        images = digests([item.image for item in loaded])
        with session.recording:
            self._recorder.catch_up(session)
            try:
                if not self._recorder.has_added(session, command.invocation_id, images):
                    self._add(session, "images", loaded, command.invocation_id)
            except TurnConflict:
                self._recorder.catch_up(session)
                if not self._recorder.has_added(session, command.invocation_id, images):
                    raise
        reply.finish(JSON, json.dumps({"success": True, "images": len(command.images)}).encode())

    def _add(self, session: Session, kind: str, loaded: Sequence[LoadedImage], invocation_id: str) -> None:
        """Give images to a session, in memory and in its journal. Raises OutOfMemory, TurnConflict, ..."""
        images = [item.image for item in loaded]
        with session.recording:  # no turn may take up an image that is not recorded
            self.store.add_images(session, images)
            try:
                event = Event(kind=kind, images=digests(images), invocation_id=invocation_id)
                self._recorder.record(session, event, [item.encoded for item in loaded])
            except Exception:
                self.store.drop_images(session, images)
                raise

    def _load_images(self, references: Sequence[ImageReference]) -> list[LoadedImage]:
        """References to images on the device, encoded. Raises the BadImage family, OutOfMemory."""
        if references and self._model.image_token_id is None:
            raise InvalidRequest("this model reads text only; open the session without an image")
        limit = self._settings.session.max_images
        if len(references) > limit:
            raise InvalidRequest(f"a session may have {limit} images, not {len(references)}")
        return [self._load_image(reference) for reference in references]

    def _load_image(self, reference: ImageReference) -> LoadedImage:
        self._counters.add("images_received")
        encoded = self._intake.read(reference)
        return LoadedImage(self._encode(encoded), encoded)

    def _encode(self, encoded: bytes) -> SessionImage:
        """An encoded image on the device, with its features. Raises the BadImage family, OutOfMemory."""
        picture = self._intake.decode(encoded)
        try:
            pixels = self._model.preprocess(picture).to(self._model.device, self._model.dtype)
        except torch.OutOfMemoryError as exc:
            raise OutOfMemory("the device ran out of memory while taking in this image") from exc
        features = self._engine.encode_image(pixels)
        self._counters.add("images_encoded")
        return SessionImage(_content_key(picture), image_hash(encoded), pixels, features)

    def status(self) -> dict[str, object]:
        """What the worker holds and has done, for the proxy and for operators."""
        count = self._counters.get
        started, finished = count("turns_started"), count("turns_finished")
        cancelled, failed = count("turns_cancelled"), count("turns_failed")
        repeated = count("turns_repeated")
        return {
            "instance": self._ids.instance,
            "device": str(self._model.device),
            "sessions": {
                "open": len(self.store),
                "max": self._settings.session.max_sessions,
                "bytes": self.store.used_bytes,
                "budget_bytes": self._settings.session.budget_bytes,
                "opened": count("sessions_opened"),
                "closed": count("sessions_closed"),
                "adopted": self.store.num_adopted,
                "demoted": self.store.num_demoted,
            },
            "turns": {
                **self.store.turn_counts(),
                "in_progress": started - finished - cancelled - failed - repeated,
                "started": started,
                "finished": finished,
                "cancelled": cancelled,
                "failed": failed,
                "repeated": repeated,
            },
            "tokens": {"prefilled": count("tokens_prefilled"), "generated": count("tokens_generated")},
            "images": {
                "received": count("images_received"),
                "fetched": self._intake.num_fetched,
                "encoded": count("images_encoded"),
            },
            "session_ids": self.store.session_ids()[:MAX_LISTED_SESSIONS],
        }


def _stamp(sid: SessionId) -> str:
    """The session header's value: the id and its expiry."""
    return f"{sid.text}; Expires={datetime.fromtimestamp(sid.expires_at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _content_key(picture: Image.Image) -> int:
    """A negative number that names the decoded pixels."""
    digest = hashlib.sha256(f"{picture.size}".encode() + picture.tobytes()).digest()
    return -1 - int.from_bytes(digest[:8])

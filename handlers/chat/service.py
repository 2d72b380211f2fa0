"""One chat request from wire to engine and back: opens, asks, closes, and the worker's status."""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime

from PIL import Image
from torch import Tensor

from handlers.chat.commands import (
    ActOnSession,
    AddImages,
    Ask,
    CloseSession,
    Command,
    Generate,
    ListSessions,
    OpenSession,
    Status,
)
from handlers.chat.dialects.requests import parse
from handlers.chat.messages import ImageReference
from handlers.chat.pictures.loader import ImageIntake
from handlers.chat.pictures.store import ImageStore
from handlers.chat.sessions.operation import describe, get_session, list_sessions
from handlers.chat.sessions.recorder import SessionRecorder, digests
from handlers.chat.sessions.session_id import SessionIds
from handlers.chat.sessions.store import Session, SessionStore, sharing_scope
from handlers.chat.turns.admission import Room
from handlers.chat.turns.completion import Completion
from handlers.chat.turns.generation import GenerationParts, LoadedImage
from handlers.chat.turns.turn import Turn
from handlers.counters import Counters
from handlers.engine.engine import Engine
from handlers.errors import HandlerError, InternalError, InvalidRequest, OutOfMemory, SessionLost, TurnConflict
from handlers.journal.event import Event
from handlers.journal.journal import Journal
from handlers.models.text import TextModel
from handlers.reply import Reply
from handlers.requests import Incoming
from handlers.settings import HandlerSettings
from torchmoor.wire import headers as wire
from torchmoor.wire import operations
from torchmoor.wire.session_ids import SessionId

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
        self._preparing: Executor = ThreadPoolExecutor(settings.engine.prepare_threads, "prepare")
        self.images = ImageStore(
            settings.session.features_bytes,
            settings.session.host_bytes,
            journal is not None,
            intake.decode,
            self._encode,
            self._counters,
        )
        self.store = SessionStore(settings.session, ids, engine.runner.pool, self.images, wall)
        self._recorder = SessionRecorder(journal, self.store, self.images, settings.journal.max_replays)
        self._parts = GenerationParts(
            engine_settings=settings.engine,
            session_settings=settings.session,
            model=model,
            engine=engine,
            images=self.images,
            room=Room(),
            preparing=self._preparing,
            loading=self._loading,
            counters=self._counters,
            load_images=self._load_images,
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
            self._dispatch(parse(incoming, self._settings.request, self._wall), reply)
        except HandlerError as error:
            reply.fail(error)
        except Exception:
            logger.exception("request failed %s", reply.ids)
            reply.fail(InternalError("the request could not be handled; the worker's log has the reason"))

    def _dispatch(self, command: Command, reply: Reply) -> None:
        match command:
            case Status():
                reply.finish(JSON, json.dumps(self.status()).encode())
            case ListSessions():
                reply.finish(JSON, json.dumps(list_sessions(self.store, command)).encode())
            case ActOnSession():
                self._in_background(reply, lambda: self._act_on(command, reply))
            case OpenSession():
                self._in_background(reply, lambda: self._open(command, reply))
            case AddImages():
                self._in_background(reply, lambda: self._add_images(command, reply))
            case Ask():
                self._ask(command, reply)
            case Generate():
                Completion(self._parts, command, reply).start()
            case CloseSession():
                self._in_background(reply, lambda: self._close(command, reply))

    def _ask(self, command: Ask, reply: Reply) -> None:
        caller = command.caller
        try:
            session = self.store.get(command.session_id, caller.endpoint, caller.principal)
        except SessionLost:
            self._in_background(reply, lambda: self._start_turn(self._find(command), command, reply))
        else:
            self._start_turn(session, command, reply)

    def _start_turn(self, session: Session, command: Ask, reply: Reply) -> None:
        Turn(self._parts, self.store, self._recorder, session, command, reply).start()

    def _find(self, command: Ask | AddImages) -> Session:
        """The session, taken over from its journal if another worker held it. Raises the SessionGone family."""
        endpoint, principal = command.caller.endpoint, command.caller.principal
        try:
            return self.store.get(command.session_id, endpoint, principal)
        except SessionLost:
            if not self._recorder.is_known(command.session_id):
                raise
        return self.store.adopt(command.session_id, endpoint, principal)

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
        reply.finish({**JSON, wire.CLOSED_SESSION_ID: command.session_id}, b'{"success": true}')

    def _act_on(self, command: ActOnSession, reply: Reply) -> None:
        """What an operator wants done to a session that this worker holds. It is closed as its client would."""
        session = get_session(self.store, command.session)
        match command.action:
            case operations.CLOSE:
                self._recorder.close(session.id.text)
                self.store.close(session)
                self._counters.add("sessions_closed")
            case operations.PIN:
                self.store.pin(session)
            case operations.UNPIN:
                self.store.unpin(session)
        reply.finish(JSON, json.dumps(describe(self.store, session)).encode())

    def _in_background(self, reply: Reply, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                action()
            except HandlerError as error:
                reply.fail(error)
            except Exception:
                logger.exception("request failed %s", reply.ids)
                reply.fail(InternalError("the request could not be handled; the worker's log has the reason"))

        self._loading.submit(run)

    def _open(self, command: OpenSession, reply: Reply) -> None:
        limits = self._settings.session
        ttl_s = command.ttl_s or limits.ttl_s
        if ttl_s > limits.max_ttl_s:
            raise InvalidRequest(f"'ttl_s' must be at most {limits.max_ttl_s}")
        self._model.template.check()
        endpoint, principal = command.caller.endpoint, command.caller.principal
        loaded = self._load_images(sharing_scope(endpoint, principal), command.images, reply)
        try:
            session = self.store.open(ttl_s, endpoint, principal)
        except HandlerError:
            self._let_go(loaded)
            raise
        try:
            self._add(session, "open", loaded, command.invocation_id)
            first = self._recorder.claim_opening(
                command.caller, command.invocation_id, digests([item.image for item in loaded]), session.id.text
            )
        except Exception:
            self._discard(session)
            raise
        sid = session.id
        if first == session.id.text:
            reply.on_cancel(lambda reason: self._discard(session))  # the client left before it could read the id
            self._counters.add("sessions_opened")
        else:  # a request that is sent again gets the session that it opened the first time, perhaps elsewhere
            self._discard(session)
            again = self._ids.verify(first, endpoint, principal)
            assert again is not None
            sid = again
        stamp = _stamp(sid)
        headers = {wire.SESSION_ID: stamp, wire.NEW_SESSION_ID: stamp}
        reply.finish({**JSON, **headers}, json.dumps({"session_id": sid.text}).encode())

    def _discard(self, session: Session) -> None:
        """Undo an opening, in memory now and in the journal soon. Any thread, the pump's too."""
        if not self._recorder.openings.try_undo(session.id.text, lambda: self.store.discard(session)):
            return
        with suppress(RuntimeError):  # the worker is stopping: the sweep will find it
            self._loading.submit(self._recorder.discard, session.id.text)

    def _add_images(self, command: AddImages, reply: Reply) -> None:
        session = self._find(command)
        loaded = self._load_images(session.scope, command.images, reply)
        images = digests([item.image for item in loaded])
        with session.recording:
            try:
                self._recorder.catch_up(session)
            except HandlerError:
                self._let_go(loaded)
                raise
            if self._recorder.has_added(session, command.invocation_id, images):
                self._let_go(loaded)
            else:
                self._add_once(session, loaded, command.invocation_id)
        reply.finish(JSON, json.dumps({"success": True, "images": len(command.images)}).encode())

    def _add_once(self, session: Session, loaded: Sequence[LoadedImage], invocation_id: str) -> None:
        """Add images; fine also if another instance, which got the same request, was faster."""
        try:
            self._add(session, "images", loaded, invocation_id)
        except TurnConflict:
            self._recorder.catch_up(session)
            if not self._recorder.has_added(session, invocation_id, digests([item.image for item in loaded])):
                raise

    def _add(self, session: Session, kind: str, loaded: Sequence[LoadedImage], invocation_id: str) -> None:
        """Give images to a session, in memory and in its journal. Raises TurnConflict, the session's end, ..."""
        images = [item.image for item in loaded]
        with session.recording:  # no turn may take up an image that is not recorded
            try:
                self.store.add_images(session, images)
            except HandlerError:
                self._let_go(loaded)
                raise
            try:
                event = Event(kind=kind, images=digests(images), invocation_id=invocation_id)
                self._recorder.record(session, event, [item.encoded for item in loaded])
            except Exception:
                self.store.drop_images(session, images)
                raise

    def _let_go(self, loaded: Sequence[LoadedImage]) -> None:
        for item in loaded:
            self.images.release(item.image)

    def _load_images(self, scope: str, references: Sequence[ImageReference], reply: Reply) -> list[LoadedImage]:
        """The pictures of these references, each held once.

        Raises the BadImage family, OutOfMemory, and why the reply was cancelled, should it be.
        """
        if references and self._model.image_token_id is None:
            raise InvalidRequest("this model reads text only; ask without an image")
        limit = self._settings.session.max_images
        if len(references) > limit:
            raise InvalidRequest(f"a conversation may have {limit} images, not {len(references)}")
        loaded: list[LoadedImage] = []
        try:
            for reference in references:
                reply.raise_if_cancelled()
                self._counters.add("images_received")
                encoded = self._intake.read(reference, reply)
                reply.raise_if_cancelled()
                loaded.append(LoadedImage(self.images.take_in(scope, encoded), encoded))
        except BaseException:
            self._let_go(loaded)
            raise
        return loaded

    def _encode(self, picture: Image.Image) -> Tensor:
        """A picture's features, on the device. Raises OutOfMemory."""
        try:
            pixels = self._model.preprocess(picture)
        except (MemoryError, RuntimeError) as exc:
            if isinstance(exc, RuntimeError) and "can't allocate memory" not in str(exc):  # torch's, which has no class
                raise
            raise OutOfMemory("this machine ran out of memory while reading an image; try again later") from exc
        return self._engine.encode_image(pixels)

    def status(self) -> dict[str, object]:
        """What the worker holds and has done, for the proxy and for operators."""
        return {
            "instance": self._ids.instance,
            "device": str(self._model.device),
            **self.numbers(),
            "session_ids": self.store.session_ids()[:MAX_LISTED_SESSIONS],
        }

    def numbers(self) -> dict[str, dict[str, int]]:
        """The status as numbers alone: what the metrics are made of (handlers/metrics.py). Any thread."""
        count = self._counters.get
        started = count("turns_started")
        ended = {name: count(f"turns_{name}") for name in ("finished", "cancelled", "timed_out", "failed", "repeated")}
        pool, scheduler = self._engine.runner.pool, self._engine.scheduler
        return {
            "sessions": {
                "open": len(self.store),
                "max": self._settings.session.max_sessions,
                "opened": count("sessions_opened"),
                "closed": count("sessions_closed"),
                "adopted": self.store.num_adopted,
            },
            "memory": {
                "kv_bytes": pool.used_bytes,
                "kv_capacity_bytes": pool.capacity_bytes,
                "kv_evicted": pool.num_evicted,
                "features_bytes": self.images.features_bytes,
                "features_capacity_bytes": self.images.max_features_bytes,
                "host_bytes": self.images.host_bytes,
                "host_capacity_bytes": self.images.max_host_bytes,
            },
            "turns": {
                **self.store.turn_counts(),
                "in_progress": started - sum(ended.values()),
                "started": started,
                **ended,
            },
            "tokens": {name: count(f"tokens_{name}") for name in ("prefilled", "reused", "generated")},
            "images": {
                "received": count("images_received"),
                "fetched": self._intake.num_fetched,
                **{name: count(f"images_{name}") for name in ("encoded", "shared", "demoted")},
            },
            "engine": {
                "steps": self._engine.num_steps,
                "rows": len(scheduler.running),
                "queued": len(scheduler.waiting),
            },
        }

    def drain_times(self, name: str) -> list[float]:
        """The times of a histogram since the last call."""
        return self._counters.drain(name)


def _stamp(sid: SessionId) -> str:
    """The session header's value: the id and its expiry."""
    return f"{sid.text}; Expires={datetime.fromtimestamp(sid.expires_at, UTC):%Y-%m-%dT%H:%M:%SZ}"

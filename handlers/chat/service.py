"""The chat service: passes each request to the part that answers it."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from handlers.chat.adapters import AdapterLease, Adapters
from handlers.chat.commands import (
    ActOnSession,
    AddImages,
    Ask,
    BranchSession,
    CloseInJournal,
    CloseSession,
    Command,
    EndClosed,
    Generate,
    OpenAndAsk,
    OpenSession,
    QueueResponse,
    ReportStatus,
    Resource,
    SessionChange,
    StopAnswer,
)
from handlers.chat.dialects.table import parse
from handlers.chat.images.fetch_pool import FetchPool
from handlers.chat.images.loader import ImageLoader
from handlers.chat.images.receiver import ImageReceiver
from handlers.chat.images.store import ImageStore
from handlers.chat.metrics import count_everything
from handlers.chat.resources.service import ResourceService, find_fetches
from handlers.chat.sessions.additions import SessionAdditions
from handlers.chat.sessions.expiry import ExpiryThread
from handlers.chat.sessions.inspection import describe, list_sessions
from handlers.chat.sessions.journal_failures import JournalFailures
from handlers.chat.sessions.journaled_sessions import JournaledSessions
from handlers.chat.sessions.known_sessions import KnownSessions
from handlers.chat.sessions.lifecycle import SessionLifecycle
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.chat.sessions.session_images import SessionImages
from handlers.chat.sessions.store import SessionStore
from handlers.chat.sessions.stored_kv import StoredKv
from handlers.chat.sessions.turn_queues import TurnQueues
from handlers.chat.sessions.unjournaled_sessions import UnjournaledSessions
from handlers.chat.turns.admission import Admission
from handlers.chat.turns.choices import Choices
from handlers.chat.turns.completion import Completion
from handlers.chat.turns.context_limits import ContextLimits
from handlers.chat.turns.generation_parts import GenerationParts
from handlers.chat.turns.turn import Turn
from handlers.engine.contract import ChatEngine
from handlers.errors import InvalidRequest, SessionLost
from handlers.journal.journal import Journal
from handlers.models.prompt_format import PromptFormat
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from handlers.settings.handler import HandlerSettings
from handlers.worker.fair_threads import FairThreads
from torchmoor.wire import headers as wire
from torchmoor.wire import operations
from torchmoor.wire.session_header import write_session_header
from torchmoor.wire.session_query import SessionQuery

MAX_LISTED_SESSIONS = 1000
FINGERPRINT_CHARS = 10  # as long as OpenAI's


class ChatService:
    """Answers requests. `start` never raises and never waits; slow work runs on the worker's own threads.

    wall: seconds since 1970, for expiries.
    """

    def __init__(
        self,
        settings: HandlerSettings,
        model: PromptFormat,
        engine: ChatEngine,
        ids: SessionIdMinter,
        loader: ImageLoader,
        wall: Callable[[], float] = time.time,
        journal: Journal | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._engine = engine
        self._ids = ids
        self._loader = loader
        self._wall = wall
        self.counters = counters = engine.counters
        self._intake = FairThreads(settings.intake.num_threads, "intake")
        self._fetching = FetchPool(settings.intake)
        self._preparing = FairThreads(settings.engine.prepare_threads, "prepare")
        session = settings.session
        is_durable = journal is not None
        kv_parts = engine.kv_parts if is_durable and settings.journal.max_kv_bytes > 0 else None
        self.images = ImageStore(
            session.features_bytes,
            session.host_bytes,
            is_durable,
            partial(loader.decoded, side=engine.capabilities.image_side),
            engine.encode,
            counters,
            defers=kv_parts is not None and engine.capabilities.has_equal_images,
        )
        self.store = SessionStore(session, ids, engine.pool, self.images, counters, wall, is_durable=is_durable)
        failures = JournalFailures(self.store, counters)
        self.known: KnownSessions
        if journal is None:
            self.known = UnjournaledSessions(self.store)
        else:
            self.known = JournaledSessions(journal, self.store, failures, counters)
        self._session_images = SessionImages(self.store)
        self.queues = TurnQueues(self.store)
        self.recorder = SessionRecorder(
            self.known, self.store, self._session_images, self.images, failures, settings.journal.max_replays
        )
        can_see = model.image_token_id is not None
        receiver = ImageReceiver(
            loader, self._fetching, self.images, counters, can_see=can_see, max_images=session.max_images
        )
        self._additions = SessionAdditions(self.recorder, receiver, self._session_images)
        self._sessions = SessionLifecycle(
            ids, self.store, self.queues, self.known, self.recorder, self._additions, receiver, self._intake
        )
        self.stored_kv = None
        if journal is not None and kv_parts is not None:
            self.stored_kv = StoredKv(journal, kv_parts, ids.keys, settings.journal.kv_idle_s, counters)
        self.admission = Admission()
        self._parts = GenerationParts(
            limits=ContextLimits(settings.engine, session, engine.capabilities.max_context, engine.pool),
            model=model,
            engine=engine,
            images=self.images,
            adapters=adapters,
            admission=self.admission,
            receiver=receiver,
            preparing=self._preparing,
            loading=self._intake,
            fetching=self._fetching,
            stored_kv=self.stored_kv,
            counters=counters,
        )
        self._resources = ResourceService(self._parts, self._sessions, self._additions, self.known, self.recorder, self)
        self._expiry = ExpiryThread(self.store.expire, self.known, wall)

    def stop(self) -> None:
        """End the service's threads and the engine."""
        self._expiry.stop()
        if self.stored_kv is not None:
            self.stored_kv.stop()
        self._fetching.shutdown()
        self._intake.shutdown()  # before the engine, which encodes the images that are still being loaded
        self._preparing.shutdown()
        self._engine.stop()

    def start(self, incoming: Incoming, reply: PendingReply) -> None:
        """Answer a request; every outcome, errors included, goes through `reply`."""
        reply.line = incoming.caller.line
        if self._parts.adapters is not None:
            reply.adapter = incoming.adapter
        with reply.guarded():
            begun = reply.continuation
            reply.received_at = self._wall() if begun is None else begun.start.received_at
            fingerprint = f"fp_{self._model.fingerprint[:FINGERPRINT_CHARS]}"
            incoming = replace(incoming, received_at=reply.received_at, fingerprint=fingerprint)
            self.dispatch(parse(incoming, self._settings.request), reply)

    def _in_background(self, reply: PendingReply, action: Callable[[], None], line: str | None = None) -> None:
        """Run an action on another thread. line: the queue for its downloads; None if there are none."""

        def run() -> None:
            with reply.guarded():
                action()

        self._parts.threads_for(reply, is_slow=True, line=line)(run)

    def dispatch(self, command: Command, reply: PendingReply) -> None:
        """Answer a command. Any thread; returns at once."""
        match command:
            case ReportStatus():
                reply.finish_json(self.status())
            case SessionQuery():
                reply.finish_json(list_sessions(self.store, command))
            case Ask():
                self._ask(command, reply)
            case Generate() if command.num_answers > 1:
                Choices(self._parts, command, reply).start()
            case Generate():
                Completion(self._parts, command, reply).start()
            case StopAnswer():
                self._end_answer(command, reply)
            case OpenSession() | QueueResponse() if reply.adapter and self._parts.adapters is not None:
                self._begin_with_adapter(command, reply.adapter, self._parts.adapters, reply)
            case _:
                self._handle_in_background(command, reply)

    def _ask(self, command: Ask, reply: PendingReply) -> None:
        try:
            turn = self.make_turn(self.store.get(command.session_id, command.caller), command, reply)
            turn.enqueue()
        except SessionLost:  # the session may be in the journal, which takes time to read
            self._in_background(reply, lambda: self._adopt_and_ask(command, reply))
            return
        turn.start()

    def _adopt_and_ask(self, command: Ask, reply: PendingReply) -> None:
        with self._sessions.hold(command.session_id, command.caller) as session:
            turn = self.make_turn(session, command, reply)
            turn.enqueue()
        turn.start()

    def make_turn(self, session: Session, command: Ask, reply: PendingReply) -> Turn:
        return Turn(self._parts, self.queues, self._session_images, self.recorder, session, command, reply)

    def _handle_in_background(self, command: SessionChange | Resource, reply: PendingReply) -> None:
        self._in_background(reply, lambda: self._handle(command, reply), find_fetches(command))

    def _begin_with_adapter(
        self, command: OpenSession | QueueResponse, name: str, adapters: Adapters, reply: PendingReply
    ) -> None:
        """Open a session, or queue a response, once its adapter is known to be usable."""

        def ready(lease: AdapterLease) -> None:
            lease.release()
            self._handle_in_background(command, reply)

        end_wait = adapters.acquire(name, ready, reply.fail)
        reply.on_cancel(lambda reason: end_wait())

    def _handle(self, command: SessionChange | Resource, reply: PendingReply) -> None:
        """Answer a command on a thread for slow work."""
        match command:
            case OpenAndAsk():
                self._open_and_ask(command, reply)
            case OpenSession():
                reply.finish_json({"session_id": self.open(command, reply)})
            case BranchSession():
                reply.finish_json({"session_id": self._branch(command, reply)})
            case AddImages():
                with self._sessions.hold(command.session_id, command.caller) as session:
                    self._additions.add_images(session, command, reply)
                reply.finish_json({"success": True, "images": len(command.images)})
            case CloseSession():
                self._sessions.close(command)
                reply.finish_json({"success": True}, {wire.CLOSED_SESSION_ID: command.session_id})
            case ActOnSession():
                session = self._sessions.act(command)
                reply.finish_json(describe(self.store, session))
            case CloseInJournal():
                self._sessions.close_in_journal(command.session)
                reply.finish_json({"session": command.session})
            case EndClosed():
                reply.finish_json({operations.NUM_ENDED: self._sessions.end_closed(command)})
            case _:
                self._resources.handle(command, reply)

    def _end_answer(self, command: StopAnswer, reply: PendingReply) -> None:
        """End the session's running answer. Raises the SessionGone family."""
        try:
            turn = self.store.get(command.session_id, command.caller).turn
        except SessionLost:  # the session may be in the journal, which takes time to read
            self._in_background(reply, lambda: self._find_no_answer(command, reply))
            return
        reply.finish_json({"success": True, "stopped": turn is not None and turn.end_early()})

    def _find_no_answer(self, command: StopAnswer, reply: PendingReply) -> None:
        """Report that this worker generates no answer in a session that only the journal has."""
        if not self.known.is_known(command.session_id):
            raise SessionLost()
        reply.finish_json({"success": True, "stopped": False})

    def _branch(self, command: BranchSession, reply: PendingReply) -> str:
        with self._sessions.hold(command.session_id, command.opening.caller) as source:
            self.recorder.catch_up(source)
            num_turns = len(source.order)
            if command.num_turns > num_turns:
                raise InvalidRequest(f"'turns' must be at most {num_turns}, the turns that the session has")
            return self.open(command.opening, reply, (source, command.num_turns))

    def open(self, command: OpenSession, reply: PendingReply, source: tuple[Session, int] | None = None) -> str:
        """Open a session and set the answer's header with its id and expiry. Return the id. Worker threads only.

        source: a session that the caller holds, and how many of its entries the new one begins with.
        """
        self._model.template.check()
        sid = self._sessions.open(command, reply, source)
        stamp = write_session_header(sid.text, self.store.expires_at(sid))
        reply.session_stamps |= {wire.SESSION_ID: stamp, wire.NEW_SESSION_ID: stamp}
        return sid.text

    def _open_and_ask(self, command: OpenAndAsk, reply: PendingReply) -> None:
        session_id = self.open(command.opening, reply)
        self._ask(replace(command.ask, session_id=session_id), reply)

    def status(self) -> dict[str, object]:
        """Return the worker's status: current use and counts since the start."""
        return {
            "instance": self._ids.instance,
            "device": self._engine.capabilities.device,
            "capabilities": self._capabilities(),
            **self.numbers(),
            **({} if self._parts.adapters is None else self._parts.adapters.status()),
            "session_ids": self.store.session_ids()[:MAX_LISTED_SESSIONS],
        }

    def _capabilities(self) -> dict[str, object]:
        """Describe what model and engine can do, by the names of docs/instance-protocol.md."""
        model, engine = self._model, self._engine.capabilities
        return {
            "engine": engine.engine,
            "max_context": self._parts.limits.max_context,
            "can_see": model.image_token_id is not None,
            "max_images": self._parts.limits.session.max_images,
            "can_pin": self._engine.pool.can_pin,
            "has_grammars": engine.has_grammars,
            "has_tools": model.template.style.call is not None,
            "is_packed": engine.is_packed,
            "refused": sorted(engine.refused),
        }

    def numbers(self) -> dict[str, dict[str, int]]:
        """Return the status as numbers alone, for the metrics. Any thread."""
        return count_everything(self.counters, self.store, self.known, self._loader, self._engine)

"""Opens, holds, closes and pins sessions, for clients and operators. What is added to them: additions.py."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from handlers.chat.commands import ActOnSession, CloseSession, EndClosed, OpenSession
from handlers.chat.images.receiver import ImageReceiver, ReceivedImage
from handlers.chat.images.store import digests
from handlers.chat.sessions.additions import SessionAdditions
from handlers.chat.sessions.known_sessions import KnownSessions
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.chat.sessions.store import SessionStore
from handlers.chat.sessions.turn_queues import TurnQueues
from handlers.errors import (
    HandlerError,
    InvalidRequest,
    JournalUnavailable,
    SessionClosed,
    SessionGone,
    SessionLost,
    SessionUnknown,
)
from handlers.journal.event import Event
from handlers.requests.incoming import Caller
from handlers.requests.reply import PendingReply
from handlers.worker.fair_threads import FairThreads
from torchmoor.wire import headers as wire
from torchmoor.wire import operations
from torchmoor.wire.response_ids import Place
from torchmoor.wire.session_ids import SessionId

MAX_UNREAD = 3  # unreadable journals in one batch: each may take a whole time-out


class SessionLifecycle:
    """Changes sessions in memory and in their journals. Worker threads only: all methods may take long.

    background: runs the deletion of a discarded session's journal.
    """

    def __init__(
        self,
        ids: SessionIdMinter,
        store: SessionStore,
        queues: TurnQueues,
        known: KnownSessions,
        recorder: SessionRecorder,
        additions: SessionAdditions,
        receiver: ImageReceiver,
        background: FairThreads,
    ) -> None:
        self._ids = ids
        self._store = store
        self._queues = queues
        self._known = known
        self._recorder = recorder
        self._additions = additions
        self._receiver = receiver
        self._background = background

    @contextmanager
    def hold(self, session_id: str, caller: Caller) -> Iterator[Session]:
        """Hold the session. If this worker does not have it, take it over from its journal.

        Raises the SessionGone family, Overloaded.
        """
        session = self._find(session_id, caller)
        try:
            yield session
        finally:
            self._store.unhold(session)

    @contextmanager
    def hold_resource(
        self, place: Place | None, caller: Caller, unknown: HandlerError, kind: str = ""
    ) -> Iterator[Session]:
        """Hold the session of one of OpenAI's resources, with all its events in the journal applied.

        Worker threads only.

        place: None for a malformed id. unknown: raised if there is no such session, or another caller owns it. kind:
        the resource's; "" accepts any session. Raises Overloaded, JournalUnavailable.
        """
        if place is None:
            raise unknown
        try:
            with self.hold(place.session_id, caller) as session:
                with session.recording:
                    self._recorder.catch_up(session)
                if kind and (session.resource is None or session.resource.get("object") != kind):
                    raise unknown
                yield session
        except SessionGone as error:
            raise unknown from error

    def is_own(self, session_id: str, caller: Caller) -> bool:
        """Return whether this fleet opened the session for this caller and this worker has no record of its end."""
        try:
            self._store.get(session_id, caller)
        except SessionLost:  # perhaps the journal has it
            return True
        except SessionGone:
            return False
        return True

    def _find(self, session_id: str, caller: Caller) -> Session:
        try:
            return self._store.hold(session_id, caller)
        except SessionLost:
            if not self._known.is_known(session_id):
                raise
        return self._store.adopt(session_id, caller)

    def _choose_ttl_s(self, command: OpenSession) -> int:
        """Return the time to live that the client asks for, or the default.

        Above the limit, a file gets the limit, which its `expires_at` shows. Raises InvalidRequest for a session.
        """
        limits = self._store.settings
        ttl_s = command.ttl_s or limits.ttl_s
        if ttl_s > limits.max_ttl_s:
            if command.resource:
                return limits.max_ttl_s
            raise InvalidRequest(f"'ttl_s' must be at most {limits.max_ttl_s}")
        return ttl_s

    def open(self, command: OpenSession, reply: PendingReply, source: tuple[Session, int] | None) -> SessionId:
        """Open a session with the command's images.

        source: a session that the caller holds, and how many of its entries the new one begins with. A retried request
        gets the session that its first attempt opened, perhaps on another instance.
        """
        ttl_s = self._choose_ttl_s(command)
        self._known.check_room(command.caller)
        received = self._receiver.receive(command.caller.scope, command.images, reply)
        with self._receiver.released_on_error(received):
            session = self._store.open(ttl_s, command.caller)
        try:
            return self._record_opening(session, command, received, reply, source)
        finally:
            self._store.unhold(session)

    def _record_opening(
        self,
        session: Session,
        command: OpenSession,
        received: Sequence[ReceivedImage],
        reply: PendingReply,
        source: tuple[Session, int] | None,
    ) -> SessionId:
        """Record the new session, or discard it if the same request opened another one before."""
        names = digests(item.image for item in received)
        parent, num_entries = source or (session, 0)
        event = Event(
            kind="open",
            images=names,
            question=str(num_entries or ""),
            invocation_id=command.invocation_id,
            response=command.resource,
            adapter=parent.choose_adapter(reply.adapter),
        )
        try:
            self._additions.record(session, event, received)
            if source is not None:
                self._recorder.copy(parent, num_entries, session)
                names = (parent.id.text, event.question)
            names = (*names, *filter(None, (command.question, reply.adapter)))
            claimed = self._known.claim_opening(command.caller, command.invocation_id, names, session.id.text)
        except Exception:
            self._discard(session)
            raise
        first = self._ids.verify(claimed, command.caller)
        if first is None or first == session.id:  # None: the claim of another key or fleet
            self._discard_if_unread(session, reply)
            self._store.counters.add("sessions_opened")
            return session.id
        self._discard(session)
        return first

    def _discard_if_unread(self, session: Session, reply: PendingReply) -> None:
        """Undo the opening if the client does not receive the id: its first question fails, or it disconnects."""

        def on_end() -> None:
            if reply.is_streaming:  # its head has the id
                return
            if reply.error is not None:
                self._discard(session)
            else:
                reply.on_cancel(lambda reason: self._discard(session))

        reply.on_end(on_end)

    def _discard(self, session: Session) -> None:
        """Undo an opening: in memory at once, in the journal later. Any thread, the pump's included."""
        if not self._known.try_undo(session.id.text):
            return
        self._store.lose(session.id.text, SessionLost())
        with suppress(RuntimeError):  # the worker is stopping: the sweep will find the journal
            self._background.submit("", partial(self._known.discard, session.id.text))

    def delete_entry(self, session: Session, number: int, invocation_id: str, reply: PendingReply) -> None:
        """Hide the response of an entry, and close the session after its last one. Raises TurnConflict, SessionGone."""
        with session.recording:
            self._recorder.catch_up(session)
            self._recorder.record(session, Event(kind="delete", question=str(number), invocation_id=invocation_id))
        is_used = session.resource is not None or session.turn is not None
        if len(session.deleted) >= len(session.entries) and not is_used:
            self.end(session, "", reply)

    def end(self, session: Session, invocation_id: str, reply: PendingReply) -> None:
        """Close a held session, and set the header that reports it."""
        self._try_close(session.id.text, session, invocation_id)
        reply.receipts[wire.CLOSED_SESSION_ID] = session.id.text

    def close(self, command: CloseSession) -> None:
        """Close a session for its client, only once if the client retries the request.

        A session that exists only in its journal is closed there, without adopting it.
        """
        with suppress(SessionClosed):
            if self._try_close(command.session_id, self._find_open(command), command.invocation_id):
                return
        if not self._known.has_closed(command.session_id, command.invocation_id):
            raise SessionClosed()

    def _find_open(self, command: CloseSession) -> Session | None:
        """Return the session; None if only its journal has it. Raises the SessionGone family."""
        try:
            return self._store.get(command.session_id, command.caller)
        except SessionLost:
            if not self._known.is_known(command.session_id):
                raise
            return None

    def _try_close(self, session_id: str, session: Session | None, invocation_id: str = "") -> bool:
        """Return False if another request closed the session first."""
        is_first = self._known.try_close(session_id, session, invocation_id)
        if session is not None:
            self._store.close(session)
        if is_first:
            self._store.counters.add("sessions_closed")
        return is_first

    def end_closed(self, command: EndClosed) -> int:
        """Free the memory of sessions that another instance has closed. Return how many this worker held.

        A session stays if its journal says that it is open, or cannot be read. Raises JournalUnavailable at the end if
        one could not be read, or at once after MAX_UNREAD of them.
        """
        held = [session for session in map(self._store.find, command.session_ids) if session is not None]
        num_ended = 0
        unread: list[JournalUnavailable] = []
        for session in held:
            try:
                self._known.is_known(session.id.text)
            except SessionClosed:
                self._store.close(session)
                num_ended += 1
            except SessionLost:  # its journal is damaged, so it has ended
                num_ended += 1
            except JournalUnavailable as exc:
                unread.append(exc)
                if len(unread) == MAX_UNREAD:
                    break
        if unread:
            raise unread[0]
        return num_ended

    def close_in_journal(self, name: str) -> None:
        """Close a session that may exist only in the journal, for an operator, by its hash.

        Raises SessionUnknown if the journal has none that is open, JournalUnavailable.
        """
        session_id = self._known.find(name)
        if session_id is None or not self._try_close(session_id, self._store.find(session_id)):
            raise SessionUnknown("the journal has no open session of this hash")

    def get_by_hash(self, name: str) -> Session:
        """Return a session that this worker holds. Raises SessionUnknown, also if two have this hash."""
        found = [session for session in self._store.snapshot() if session.hash == name]
        if len(found) != 1:
            raise SessionUnknown("this worker holds no session of this hash")
        return found[0]

    def act(self, command: ActOnSession) -> Session:
        """Close, pin or unpin a session that this worker holds, for an operator. Raises SessionUnknown."""
        session = self.get_by_hash(command.session)
        match command.action:
            case operations.CLOSE:
                self._try_close(session.id.text, session)
            case operations.PIN:
                self._queues.pin(session)
            case operations.UNPIN:
                self._queues.unpin(session)
        return session

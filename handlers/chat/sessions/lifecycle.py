"""What clients and operators do to sessions: open, add images, close, pin."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress

from handlers.chat.commands import ActOnSession, AddImages, Ask, CloseSession, EndClosed, OpenSession
from handlers.chat.pictures.receiver import ImageReceiver, ReceivedImage
from handlers.chat.pictures.store import digests
from handlers.chat.sessions.recorder import CLOSED, SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.chat.sessions.store import SessionStore
from handlers.counters import Counters
from handlers.errors import (
    HandlerError,
    InvalidRequest,
    JournalUnavailable,
    SessionClosed,
    SessionLost,
    SessionUnknown,
    TurnConflict,
)
from handlers.journal.event import Event
from handlers.reply import PendingReply
from torchmoor.wire import operations
from torchmoor.wire.session_ids import SessionId

MAX_UNREAD = 3  # journals of a batch, each of which may take a whole time-out


class SessionLifecycle:
    """Changes sessions in memory and in their journals. Worker threads only: all methods may take long.

    background: runs the deletion of a discarded session's journal.
    """

    def __init__(
        self,
        ids: SessionIdMinter,
        store: SessionStore,
        recorder: SessionRecorder,
        receiver: ImageReceiver,
        counters: Counters,
        background: Executor,
    ) -> None:
        self._ids = ids
        self._store = store
        self._recorder = recorder
        self._receiver = receiver
        self._counters = counters
        self._background = background

    @contextmanager
    def hold(self, command: Ask | AddImages) -> Iterator[Session]:
        """Hold the session, taken over from its journal if this worker does not have it.

        Raises the SessionGone family, Overloaded.
        """
        session = self._find(command)
        try:
            yield session
        finally:
            self._store.unhold(session)

    def _find(self, command: Ask | AddImages) -> Session:
        try:
            return self._store.hold(command.session_id, command.caller)
        except SessionLost:
            if not self._recorder.is_known(command.session_id):
                raise
        return self._store.adopt(command.session_id, command.caller)

    def choose_ttl_s(self, command: OpenSession) -> int:
        """Return the time to live that the client asks for, or the default. Raises InvalidRequest above the limit."""
        limits = self._store.settings
        ttl_s = command.ttl_s or limits.ttl_s
        if ttl_s > limits.max_ttl_s:
            raise InvalidRequest(f"'ttl_s' must be at most {limits.max_ttl_s}")
        return ttl_s

    def open(self, command: OpenSession, ttl_s: int, reply: PendingReply) -> SessionId:
        """Open a session with the command's images.

        A request that the client sends again gets the session that it opened the first time, perhaps elsewhere.
        """
        self._recorder.check_room()
        received = self._receiver.receive(command.caller.scope, command.images, reply)
        try:
            session = self._store.open(ttl_s, command.caller)
        except HandlerError:
            self._receiver.release(received)
            raise
        try:
            return self._record_opening(session, command, received, reply)
        finally:
            self._store.unhold(session)

    def _record_opening(
        self, session: Session, command: OpenSession, received: Sequence[ReceivedImage], reply: PendingReply
    ) -> SessionId:
        """Record the new session, or discard it if the same request opened another one before."""
        try:
            self._add(session, "open", received, command.invocation_id)
            images = digests(item.image for item in received)
            claimed = self._recorder.claim_opening(command.caller, command.invocation_id, images, session.id.text)
        except Exception:
            self._discard(session)
            raise
        first = self._ids.verify(claimed, command.caller)
        if first is None or first == session.id:  # None: the claim is damaged
            reply.on_cancel(lambda reason: self._discard(session))  # the client left before it could read the id
            self._counters.add("sessions_opened")
            return session.id
        self._discard(session)
        return first

    def _discard(self, session: Session) -> None:
        """Undo an opening, in memory now and in the journal soon. Any thread, the pump's too."""
        if not self._recorder.openings.try_undo(session.id.text, lambda: self._store.discard(session)):
            return
        with suppress(RuntimeError):  # the worker is stopping: the sweep will find the journal
            self._background.submit(self._recorder.discard, session.id.text)

    def add_images(self, command: AddImages, reply: PendingReply) -> None:
        """Add images for the session's next question, once even if the client sends the request again."""
        with self.hold(command) as session:
            self._add_once(session, command, self._receiver.receive(session.scope, command.images, reply))

    def _add_once(self, session: Session, command: AddImages, received: Sequence[ReceivedImage]) -> None:
        """Add received images unless this request has added them before."""
        with session.recording:
            try:
                self._recorder.catch_up(session)
            except HandlerError:
                self._receiver.release(received)
                raise
            if self._has_added(session, command.invocation_id, received):
                self._receiver.release(received)
                return
            try:
                self._add(session, "images", received, command.invocation_id)
            except TurnConflict:  # perhaps with this very request, which another instance got too
                self._recorder.catch_up(session)
                if not self._has_added(session, command.invocation_id, received):
                    raise

    def _has_added(self, session: Session, invocation_id: str, received: Sequence[ReceivedImage]) -> bool:
        return self._recorder.has_added(session, invocation_id, digests(item.image for item in received))

    def _add(self, session: Session, kind: str, received: Sequence[ReceivedImage], invocation_id: str) -> None:
        """Add images to the session and to its journal. Raises TurnConflict, the session's end, InvalidRequest."""
        images = [item.image for item in received]
        with session.recording:  # no turn may use an image before it is recorded
            try:
                self._store.add_images(session, images)
            except HandlerError:
                self._receiver.release(received)
                raise
            try:
                event = Event(kind=kind, images=digests(images), invocation_id=invocation_id)
                self._recorder.record(session, event, [item.encoded for item in received])
            except Exception:
                self._store.drop_images(session, images)
                raise

    def close(self, command: CloseSession) -> None:
        """Close a session at its client's request, once even if the client sends the request again.

        A session that only its journal knows is not adopted first.
        """
        with suppress(SessionClosed):
            if self._try_close(command.session_id, self._find_open(command), command.invocation_id):
                return
        if not self._recorder.has_closed(command.session_id, command.invocation_id):
            raise SessionClosed(CLOSED)

    def _find_open(self, command: CloseSession) -> Session | None:
        """Return the session; None if only its journal has it. Raises the SessionGone family."""
        try:
            return self._store.get(command.session_id, command.caller)
        except SessionLost:
            if not self._recorder.is_known(command.session_id):
                raise
            return None

    def _try_close(self, session_id: str, session: Session | None, invocation_id: str = "") -> bool:
        """Return False if another request closed the session first."""
        is_first = self._recorder.try_close(session_id, invocation_id)
        if session is not None:
            self._store.close(session)
        if is_first:
            self._counters.add("sessions_closed")
        return is_first

    def end_closed(self, command: EndClosed) -> int:
        """Free the memory of sessions that another instance has closed. Return how many this worker held.

        The journal decides: a session that is still open stays. One that cannot be read stays, too, and others
        are still ended. Raises JournalUnavailable at the end if there was one, or after MAX_UNREAD of them.
        """
        held = [session for session in map(self._store.find, command.session_ids) if session is not None]
        num_ended = 0
        unread: list[JournalUnavailable] = []
        for session in held:
            try:
                self._recorder.is_known(session.id.text)
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
        """Close a session that no worker may hold, for an operator, by its hash.

        Raises SessionUnknown if the journal has none that is open, JournalUnavailable.
        """
        session_id = self._recorder.find(name)
        if session_id is None or not self._try_close(session_id, self._store.find(session_id)):
            raise SessionUnknown("the journal has no open session of this hash")

    def act(self, command: ActOnSession) -> Session:
        """Close, pin or unpin a session that this worker holds, for an operator. Raises SessionUnknown."""
        session = self._store.find_by_hash(command.session)
        if session is None:
            raise SessionUnknown("this worker holds no session of this hash")
        match command.action:
            case operations.CLOSE:
                self._try_close(session.id.text, session)
            case operations.PIN:
                self._store.pin(session)
            case operations.UNPIN:
                self._store.unpin(session)
        return session

"""A turn of a session: its place in the session's queue.

A turn waits behind the session's earlier turns, and when it is over the next one begins. A turn that does not finish
leaves no trace in the conversation.
"""

from handlers.chat.commands import Ask
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.store import SessionStore
from handlers.chat.turns.generation import Generation, GenerationParts
from handlers.chat.turns.session_question import SessionQuestion
from handlers.errors import HandlerError
from handlers.reply import PendingReply


class Turn:
    """One question in a session's queue, and the generation that answers it."""

    def __init__(
        self,
        parts: GenerationParts,
        store: SessionStore,
        recorder: SessionRecorder,
        session: Session,
        ask: Ask,
        reply: PendingReply,
    ) -> None:
        self._counters = parts.counters
        self._store = store
        self._recorder = recorder
        self._session = session
        self._ask = ask
        self._reply = reply
        self._question = SessionQuestion(parts, store, recorder, session, ask, reply)
        self._generation = Generation(parts, self._question, session.cache, ask, reply, self._release)

    def start(self) -> None:
        """Begin now or wait for the session's earlier turns. Raises Overloaded, the session's end."""
        may_begin = self._store.enqueue(self._session, self)
        self._counters.add("turns_started")
        if may_begin:
            self.begin()
        self._reply.on_cancel(self.stop)

    def begin(self) -> None:
        """Start the generation."""
        is_slow = bool(self._ask.images) or self._recorder.must_rebuild(self._session)
        self._generation.begin(is_slow=is_slow)

    def stop(self, error: HandlerError) -> None:
        """End the turn early, also while it waits in the queue. Any thread."""
        self._generation.stop(error)
        if self._store.is_waiting(self._session, self):
            self._generation.fail(error)

    def _release(self) -> None:
        self._question.release()
        following = self._store.dequeue(self._session, self)
        if following is not None:
            following.begin()

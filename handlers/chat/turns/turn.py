"""A turn of a session: waits in the session's queue, makes a prompt of the whole conversation, and records the answer.

A turn waits for the session's earlier turns, and when it ends the next one begins. A turn that does not finish does not
change the conversation.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from handlers.chat.commands import Ask
from handlers.chat.forms import Summary
from handlers.chat.identity import name_request
from handlers.chat.images.fetch_pool import find_line
from handlers.chat.images.receiver import ReceivedImage
from handlers.chat.images.store import Image, digests
from handlers.chat.sessions.entries import entries_of, messages_added, messages_answered, messages_asked
from handlers.chat.sessions.journal_failures import CONFLICT
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.session_images import SessionImages
from handlers.chat.sessions.turn_queues import TurnQueues
from handlers.chat.turns.generation import Generation
from handlers.chat.turns.generation_parts import GenerationParts
from handlers.chat.turns.history import count_turns, without_oldest
from handlers.chat.turns.question import AnsweredBefore, Prompt
from handlers.chat.turns.question_content import content_of
from handlers.errors import ContextTooLong, HandlerError, TurnConflict
from handlers.journal.event import Event
from handlers.models.answer_style import AnswerStyle
from handlers.requests.reply import PendingReply
from torchmoor.wire.receipt import DROPPED_TURNS, REBUILT_EVENTS, TURN

DROP_STEP = 4  # turns dropped at once: fewer would change the prompt's beginning, and so its cached blocks, more often


class Turn:
    """Implements `Question` for a session, and holds the generation that answers it."""

    def __init__(
        self,
        parts: GenerationParts,
        queues: TurnQueues,
        session_images: SessionImages,
        recorder: SessionRecorder,
        session: Session,
        ask: Ask,
        reply: PendingReply,
    ) -> None:
        self._parts = parts
        self._queues = queues
        self._session_images = session_images
        self._recorder = recorder
        self._session = session
        self._ask = ask
        self._reply = reply
        self._content = content_of(ask, parts)
        self._text = ""  # the question's text, as it is recorded
        self._history: list[dict[str, Any]] = []  # the conversation before the question
        self._messages: list[dict[str, Any]] = []  # the conversation with the question
        self._num_dropped = 0
        self._own_images: list[ReceivedImage] = []  # received with this question
        self._new_images: list[Image] = []  # that this question is the first to ask about; held until the turn is over
        self._images: list[Image] = []  # of the prompt
        self._may_begin = False  # no earlier turn runs
        self._is_rebuilt = False  # the session has turns that this worker did not compute
        self._generation = Generation(parts, self, session.cache, ask, reply, self._release)

    def is_answered(self) -> bool:
        """Return whether the session already has the answer, from an earlier attempt of this request."""
        text = self._read_text()
        return self._recorder.find_answer(self._session, self._name, text) is not None

    @cached_property
    def _name(self) -> str:
        return name_request(self._ask.invocation_id, self._ask.images)

    def enqueue(self) -> None:
        """Take a place in the session's queue. `start` must follow.

        Raises Overloaded, or the session's error if it has ended.
        """
        self._may_begin = self._queues.enqueue(self._session, self)

    def try_enqueue(self) -> bool:
        """Take the session's queue unless another turn runs. If this returns True, `start` must follow.

        Raises SessionLost, or the session's error if it has ended.
        """
        self._may_begin = self._queues.enqueue(self._session, self, may_wait=False)
        return self._may_begin

    def start(self) -> None:
        """Begin now or wait for the session's earlier turns.

        Call this without a hold on the session, which the turn's place in the queue keeps: with a hold, a full worker
        could not evict the session as soon as its client has the answer.
        """
        self._parts.counters.add("turns_started")
        if self._may_begin:
            self.begin()
        self._reply.on_cancel(self.stop)

    def begin(self) -> None:
        is_slow = bool(self._ask.images) or self._recorder.must_rebuild(self._session)
        self._generation.begin(is_slow=is_slow, line=find_line(self._ask.caller, self._ask.images))

    def stop(self, error: HandlerError) -> None:
        """End the turn early, even while it waits in the queue. Any thread."""
        self._generation.stop(error)
        if self._queues.is_waiting(self._session, self):
            self._generation.fail(error)

    def end_early(self) -> bool:
        """End the answer with its next token. Return False if no answer is being generated."""
        return self._generation.end_early()

    def compose(self, raise_if_stopped: Callable[[], None]) -> Prompt:
        """Catch up with the journal, read the question's images and render the conversation."""
        session = self._session
        if session.end is not None:
            raise session.end
        self._text = self._read_text()
        receipt = self._catch_up()
        raise_if_stopped()
        if self._ask.images:
            self._add_images(self._parts.receiver.receive(session.scope, self._ask.images, self._reply))
        self._read_conversation()
        ids = self._render([image.num_tokens for image in self._images])
        num_dropped = session.num_dropped + self._num_dropped
        if num_dropped and self._content.may_drop:
            receipt[DROPPED_TURNS] = str(num_dropped)
        adapter = session.choose_adapter(self._reply.adapter)
        return Prompt(ids, self._images, self._parts.model.style_after(ids), adapter, receipt)

    def _catch_up(self) -> dict[str, str]:
        """Catch up with the journal, and find the turn's place in the session. Return the receipt of both."""
        session = self._session
        with session.recording:
            num_caught_up = self._recorder.catch_up(session)
            self._raise_if_ended()
            self._raise_if_answered()
            self._recorder.check_history(session, self._num_chars)
            self._content.place(session, self._number)
            receipt = {TURN: str(self._number)}
            self._note_begun()
        self._is_rebuilt = num_caught_up > 0
        if num_caught_up:
            receipt[REBUILT_EVENTS] = str(num_caught_up)
        return receipt

    def _read_conversation(self) -> None:
        """Read the session's messages and images; add those of the question."""
        session = self._session
        with session.recording:  # waits until another request's change is complete
            self._new_images = session.images_for(self._ask.queued)
            for image in self._new_images:  # those of a response in the background leave the session with its end
                self._parts.images.share(image)
            self._images = [*session.images, *self._new_images]
            self._history = session.messages
            num_images = len(self._new_images)
            added = self._content.messages(self._text, self._history, session.num_dropped, num_images)
            self._messages = [*self._history, *added]

    @property
    def _entry(self) -> int:
        """The number of the entry that a response in the background has reserved; 0 for any other turn."""
        return 0 if self._ask.queued is None else self._ask.queued.entry

    @property
    def _number(self) -> int:
        return self._entry or len(self._session.entries) + 1

    def _note_begun(self) -> None:
        """Record what a response in a conversation follows, so that all attempts give the same answer.

        Raises TurnConflict if an earlier attempt had another conversation.
        """
        queued = self._ask.queued
        if queued is not None and queued.entry:
            queued.raise_if_changed()
            if not queued.has_begun:
                self._recorder.record(self._session, Event(kind="begin", entry=queued.event.entry))

    def _add_images(self, received: list[ReceivedImage]) -> None:
        session, images = self._session, [item.image for item in received]
        with session.recording:
            with self._parts.receiver.released_on_error(received):
                self._session_images.add(session, images)
            session.unrecorded = images
        self._own_images = received

    def _render(self, sizes: Sequence[int]) -> list[int]:
        """Render the conversation; drop its oldest turns if it exceeds the context and the settings allow that."""
        model = self._parts.model
        messages = [*self._content.instructions, *self._messages]
        tools, variables = self._ask.parameters.tool_definitions, self._ask.parameters.template_variables
        limit = self._parts.limits.max_prompt_beside_answer(self._ask.parameters.max_new_tokens)
        num_turns = count_turns(messages) - 1

        def render(messages: Sequence[dict[str, Any]]) -> list[int]:
            return model.render(messages, sizes, tools, variables)

        if not self._content.may_drop or num_turns < 1:
            return render(messages)

        def try_render(num_dropped: int) -> list[int] | None:
            try:
                ids = render(without_oldest(messages, num_dropped))
            except ContextTooLong:
                return None
            return ids if len(ids) <= limit else None

        if (ids := try_render(0)) is not None:
            return ids
        steps = [*range(DROP_STEP, num_turns, DROP_STEP), num_turns]
        place = bisect_left(steps, True, hi=len(steps) - 1, key=lambda number: try_render(number) is not None)
        self._num_dropped = steps[place]
        left = without_oldest(messages, self._num_dropped)
        if self._content.drops_for_good:
            self._messages = left
        return render(left)

    def fetch(self, image: Image) -> bytes:
        """Return an image's bytes, from the request or from the journal."""
        own = next((item.encoded for item in self._own_images if item.image == image), None)
        return own if own is not None else self._recorder.fetch(self._session, image.digest)

    def restore(self, keys: Sequence[int]) -> int:
        session, stored = self._session, self._parts.stored_kv
        if stored is not None and (self._is_rebuilt or stored.has_more(session)):
            stored.restore(session, keys, self._images)
        return session.cache.length

    def _raise_if_answered(self) -> None:
        """Raise AnsweredBefore if the client retries a question whose answer is recorded."""
        if self._entry:
            turn = self._session.find_turn(self._entry)
        else:
            turn = self._recorder.find_answer(self._session, self._name, self._text)
        if turn is None:
            return
        number = self._entry or self._session.entries.index(turn) + 1
        style = self._find_style(turn, number)
        raise AnsweredBefore(self._content.restore(self._session, number, turn), number, style)

    def _find_style(self, turn: Event, number: int) -> AnswerStyle:
        """Return the style of a recorded answer, from the prompt that it answers."""
        model, session, parameters = self._parts.model, self._session, self._ask.parameters
        if model.template.style.thought is None:
            return model.template.style
        earlier = [m for each in entries_of(session, session.order.index(number)) for m in messages_added(each)]
        messages = [*self._content.instructions, *earlier, *messages_asked(turn)]
        return model.find_style(messages, parameters.tool_definitions, parameters.template_variables)

    def _raise_if_ended(self) -> None:
        """Raise ResponseCancelled if this is a response in the background that was ended meanwhile."""
        if self._ask.queued is not None:
            self._ask.queued.raise_if_ended()

    @property
    def _num_chars(self) -> int:
        """Characters of the question, and of the tools that it offers."""
        return self._content.num_chars + self._ask.parameters.num_tool_chars

    def _read_text(self) -> str:
        self._parts.limits.check_chars(self._num_chars, "the question has {} characters")
        return self._content.read()

    def commit(self, summary: Summary) -> None:
        """Add question and answer to the journal and to the conversation."""
        with self._session.recording:
            self._commit(summary)
            self._session_images.drop_repeated(self._session)
            self._session.unrecorded, self._own_images = [], []

    def _commit(self, summary: Summary) -> None:
        session, content = self._session, self._content
        self._raise_if_ended()
        answer, response = content.record(summary)
        event = Event(
            kind="turn",
            images=digests(self._new_images),
            question=self._text,
            answer=answer,
            system=content.system,
            response=response,
            asked_by=content.asked_by,
            entry=str(self._entry or ""),
            invocation_id=self._name,
        )
        try:
            if session.messages is not self._history:  # another request has caught up with the journal
                raise TurnConflict(CONFLICT)
            self._session_images.check(session)
            self._recorder.record(session, event, [item.encoded for item in self._own_images])
        except TurnConflict:  # perhaps by this same request, retried on another instance
            self._recorder.catch_up(session)
            self._raise_if_ended()
            self._raise_if_answered()
            raise
        self._session_images.commit(session, [*self._messages, *messages_answered(event)], self._new_images)
        if content.drops_for_good:
            session.num_dropped += self._num_dropped

    def _release(self) -> None:
        """Remove the images of a question that was not answered, and begin the session's next turn."""
        if self._own_images:
            self._session_images.drop_unrecorded(self._session)
        for image in self._new_images:
            self._parts.images.release(image)
        following = self._queues.dequeue(self._session, self)
        if following is not None:
            following.begin()
        elif self._parts.stored_kv is not None:
            self._parts.stored_kv.note_idle(self._session)

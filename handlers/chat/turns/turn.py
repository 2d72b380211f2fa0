"""One question of a session and its answer.

A turn waits behind the session's earlier ones, and when it is over the next one begins. A turn that does not finish
leaves no trace in the conversation.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from handlers.chat.commands import Ask
from handlers.chat.pictures.store import Image
from handlers.chat.sessions.recorder import CONFLICT, SessionRecorder, answer_message, digests, question_message
from handlers.chat.sessions.store import Session, SessionStore
from handlers.chat.turns.generation import AnsweredBefore, Generation, GenerationParts, LoadedImage, Prompt
from handlers.errors import ContextTooLong, HandlerError, TurnConflict
from handlers.journal.event import Event
from handlers.models.text import TextModel
from handlers.reply import Reply
from torchmoor.wire import headers as wire

DROP_STEP = 4  # turns dropped at once, so that not every later question computes the conversation anew


class Turn(Generation):
    """Created for each question; `start` returns at once."""

    def __init__(
        self,
        parts: GenerationParts,
        store: SessionStore,
        recorder: SessionRecorder,
        session: Session,
        ask: Ask,
        reply: Reply,
    ) -> None:
        super().__init__(parts, session.cache, ask.parameters, ask.form, reply, is_streaming=ask.is_streaming)
        self._store = store
        self._recorder = recorder
        self._session = session
        self._ask = ask
        self._said: list[dict[str, Any]] = []  # the conversation that the question belongs to
        self._messages: list[dict[str, Any]] = []  # the same with the question, without the turns that are dropped
        self._num_dropped = 0
        self._own_images: list[LoadedImage] = []  # those that came with this question
        self._new_images: list[Image] = []  # those that this question is the first to be about
        self._text = ""

    def start(self) -> None:
        """Run now or wait for the session's earlier turns. Raises Overloaded, the session's end."""
        may_run = self._store.enqueue(self._session, self)
        self._parts.counters.add("turns_started")
        if may_run:
            self.begin()
        self._reply.on_cancel(self.stop)

    def begin(self) -> None:
        """The turn's time has come."""
        self._schedule(is_slow=bool(self._ask.images) or self._recorder.must_rebuild(self._session))

    def stop(self, error: HandlerError) -> None:
        super().stop(error)
        if self._store.is_waiting(self._session, self):
            self._fail(error)

    def _compose(self) -> Prompt:
        session = self._session
        if session.end is not None:
            raise session.end
        self._text = self._question_text()
        with session.recording:
            num_caught_up = self._recorder.catch_up(session)
            self._raise_if_answered()
        if num_caught_up:
            self._answer.receipt[wire.REBUILT_EVENTS] = str(num_caught_up)
        self._raise_if_stopped()
        if self._ask.images:
            self._take_in(self._parts.load_images(session.scope, self._ask.images, self._reply))
        with session.recording:  # not between the two halves of what another request does to it
            self._new_images = list(session.pending_images)
            images = [*session.images, *self._new_images]
            self._said = session.messages
            self._messages = [*self._said, question_message(self._text, len(self._new_images))]
        return self._render(images)

    def _take_in(self, loaded: list[LoadedImage]) -> None:
        images = [item.image for item in loaded]
        try:
            self._store.add_images(self._session, images)
        except HandlerError:
            for image in images:
                self._parts.images.release(image)
            raise
        self._own_images = loaded

    def _render(self, images: Sequence[Image]) -> Prompt:
        """The conversation, without its oldest turns if it is longer than the model reads and the settings allow it."""
        sizes = [image.num_tokens for image in images]
        model = self._parts.model
        ids = model.render(self._messages, sizes)
        if self._parts.session_settings.overflow == "drop_oldest":
            limit = self._limits.max_prompt_beside_answer(self._parameters.max_new_tokens)
            num_turns = len(self._messages) // 2
            if len(ids) > limit and num_turns:
                steps = [*range(DROP_STEP, num_turns, DROP_STEP), num_turns]

                def fits(num_dropped: int) -> bool:
                    return len(model.render(without_oldest(self._messages, num_dropped), sizes)) <= limit

                self._num_dropped = steps[bisect_left(steps, True, hi=len(steps) - 1, key=fits)]
                self._messages = without_oldest(self._messages, self._num_dropped)
                ids = model.render(self._messages, sizes)
            num_dropped = self._session.num_dropped + self._num_dropped
            if num_dropped:
                self._answer.receipt[wire.DROPPED_TURNS] = str(num_dropped)
        return Prompt(ids, images)

    def _fetch(self, image: Image) -> bytes:
        own = next((item.encoded for item in self._own_images if item.image == image), None)
        return own if own is not None else self._recorder.fetch(self._session, image.digest)

    def _raise_if_answered(self) -> None:
        """A question that a client sends again, because it did not hear of the answer, is not asked twice."""
        answer = self._recorder.find_answer(self._session, self._ask.invocation_id, self._text)
        if answer is not None:
            raise AnsweredBefore(answer)

    def _question_text(self) -> str:
        limits = self._parts.engine_settings
        text = self._ask.prompt_text
        if len(text) > limits.max_question_chars:
            raise ContextTooLong(f"'prompt_text' has {len(text)} characters, more than {limits.max_question_chars}")
        return truncated(self._parts.model, text, self._parameters.truncate)

    def _commit(self, text: str) -> None:
        """The answer becomes part of the conversation."""
        event = Event(
            kind="turn",
            images=digests(self._new_images),
            question=self._text,
            answer=text,
            invocation_id=self._ask.invocation_id,
        )
        session = self._session
        with session.recording:
            try:
                if session.messages is not self._said:  # another request has caught up with the journal
                    raise TurnConflict(CONFLICT)
                self._recorder.record(session, event, [loaded.encoded for loaded in self._own_images])
            except TurnConflict:  # perhaps with this very request, which was sent again while it ran elsewhere
                self._recorder.catch_up(session)
                self._raise_if_answered()
                raise
            self._store.commit(session, [*self._messages, answer_message(text)], self._new_images)
            session.num_dropped += self._num_dropped
        self._own_images = []

    def _release(self) -> None:
        self._store.drop_images(self._session, [loaded.image for loaded in self._own_images])
        following = self._store.dequeue(self._session, self)
        if following is not None:
            following.begin()


def without_oldest(messages: Sequence[dict[str, Any]], num_turns: int) -> list[dict[str, Any]]:
    """The conversation without its first turns, whose images stand before the first question that is left."""
    dropped, left = messages[: 2 * num_turns], list(messages[2 * num_turns :])
    images = [part for message in dropped for part in message["content"] if part["type"] == "image"]
    return [{**left[0], "content": [*images, *left[0]["content"]]}, *left[1:]]


def truncated(model: TextModel, text: str, max_tokens: int | None, *, is_raw: bool = False) -> str:
    """The text's last tokens, if it has more than so many. is_raw: with its special tokens, which mean something."""
    if max_tokens is None:
        return text
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) <= max_tokens:
        return text
    return str(model.tokenizer.decode(ids[-max_tokens:], skip_special_tokens=not is_raw))

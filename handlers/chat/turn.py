"""One question of a session and its answer.

    waiting -> preparing -> generating -> over

A turn waits behind the session's earlier ones; it is prepared on a worker thread (images, template, room in the
cache), then the engine's thread drives it token by token. Whatever happens, `_over` runs once and lets the next
turn start. A turn that does not finish leaves no trace in the conversation.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from handlers.chat.counters import Counters
from handlers.chat.recorder import CONFLICT, SessionRecorder, answer_message, digests, question_message
from handlers.chat.reply import Reply
from handlers.chat.sessions import LoadedImage, Session, SessionImage, SessionStore
from handlers.chat.streams import Summary, Token, stream_writer
from handlers.chat.wire import Ask, ImageReference, StreamFormat
from handlers.engine.detokenizer import Detokenizer
from handlers.engine.engine import Engine
from handlers.engine.sequence import FinishReason, ImageSpan, TokenEvent
from handlers.engine.sequence import Sequence as TokenSequence
from handlers.errors import ContextTooLong, HandlerError, InternalError, InvalidRequest, TurnConflict
from handlers.journal.event import Event
from handlers.models.text import TextModel
from handlers.settings import EngineSettings

logger = logging.getLogger(__name__)


class ClientGone(HandlerError):
    """The client left; nobody reads this."""

    status = 499


class _AnsweredBefore(Exception):
    """The question's answer is in the conversation already."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParts:
    """What every turn of a worker works with."""

    settings: EngineSettings
    model: TextModel
    engine: Engine
    store: SessionStore
    preparing: Executor  # for turns that bring no images, and for the ends of all
    loading: Executor  # for turns that bring images, which may be slow to fetch, or must take in a whole session
    counters: Counters
    load_images: Callable[[Sequence[ImageReference]], list[LoadedImage]]
    recorder: SessionRecorder


class Turn:
    """Created for each question; `start` returns at once and everything else goes through the reply."""

    def __init__(self, parts: TurnParts, session: Session, ask: Ask, reply: Reply) -> None:
        self._parts = parts
        self._session = session
        self._ask = ask
        self._reply = reply
        self._lock = threading.Lock()
        self._sequence: TokenSequence | None = None
        self._stopped: HandlerError | None = None
        self._is_over = False
        self._received = time.monotonic()
        self._detokenizer = Detokenizer(parts.model.tokenizer, ask.parameters.stop)
        self._writer = stream_writer(ask.stream) if ask.stream else None
        self._messages: list[dict[str, Any]] = []
        self._images: list[SessionImage] = []  # of the whole conversation, this question's included
        self._own_images: list[LoadedImage] = []  # those that came with this question
        self._new_images: list[SessionImage] = []  # those that this question is the first to be about
        self._text = ""
        self._receipt: dict[str, str] = {}

    def start(self) -> None:
        """Run now or wait for the session's earlier turns. Raises Overloaded, the session's end."""
        may_run = self._parts.store.enqueue(self._session, self)
        self._parts.counters.add("turns_started")
        if may_run:
            self._schedule()
        self._reply.on_cancel(lambda: self.stop(ClientGone("the client left")))

    def _schedule(self) -> None:
        """The turn's time has come. A slow image server holds up only other turns with images."""
        is_slow = bool(self._ask.images) or self._parts.recorder.must_rebuild(self._session)
        self._run_on(self._parts.loading if is_slow else self._parts.preparing, self._prepare)

    def _run_on(self, executor: Executor, action: Callable[[], None]) -> None:
        try:
            executor.submit(action)
        except RuntimeError:  # it has been shut down
            self._fail(InternalError("the worker is stopping"))

    def stop(self, error: HandlerError) -> None:
        """End the turn early, within one step of the engine. Any thread."""
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = error
            sequence = self._sequence
        if sequence is not None:
            self._parts.engine.cancel(sequence, error)
        elif self._parts.store.is_waiting(self._session, self):
            self._fail(error)

    def _prepare(self) -> None:
        """On a worker thread: everything that must be known before the first token."""
        try:
            sequence = self._make_sequence()
            with self._lock:
                if self._stopped is not None:
                    raise self._stopped
                self._sequence = sequence
                self._parts.engine.submit(sequence)
        except _AnsweredBefore as answered:
            self._answer_again(answered.text)
        except HandlerError as error:
            self._fail(error)
        except Exception:
            logger.exception("turn could not be prepared")
            self._fail(InternalError("the question could not be prepared; the worker's log has the reason"))

    def _make_sequence(self) -> TokenSequence:
        session, model, settings = self._session, self._parts.model, self._parts.settings
        if self._stopped is not None:
            raise self._stopped
        if session.end is not None:
            raise session.end
        self._text = self._question_text()
        with session.recording:
            num_caught_up = self._parts.recorder.catch_up(session)
            self._raise_if_answered()
        if self._ask.images:
            self._own_images = self._parts.load_images(self._ask.images)
            self._parts.store.add_images(session, [loaded.image for loaded in self._own_images])
        with session.recording:  # not between the two halves of what another request does to it
            self._new_images = list(session.pending_images)
            self._images = images = [*session.images, *self._new_images]
            self._messages = [*session.messages, question_message(self._text, len(self._new_images))]
        prompt = model.render(self._messages, [len(image.features) for image in images])
        spans = _place_images(prompt, images, model.image_token_id)
        max_new_tokens = self._max_new_tokens(len(prompt))
        kept = min(session.cache.common_prefix(prompt), len(prompt) - 1)
        self._parts.store.reserve(session, len(prompt) + max_new_tokens)
        session.cache.truncate(kept)
        self._receipt = {
            "X-Torchmoor-Cache-Tier": "kv" if kept else "features" if images else "none",
            "X-Torchmoor-Prefill-Tokens": str(len(prompt) - kept),
            "X-Torchmoor-Context-Tokens": str(len(prompt)),
        }
        if num_caught_up:
            self._receipt["X-Torchmoor-Rebuilt-Events"] = str(num_caught_up)
        self._parts.counters.add("tokens_prefilled", len(prompt) - kept)
        params = self._ask.parameters.sampling(max_new_tokens)
        deadline = self._received + settings.turn_timeout_s
        return TokenSequence(prompt, spans, session.cache, params, deadline, self._on_event)

    def _raise_if_answered(self) -> None:
        """A question that a client sends again, because it did not hear of the answer, is not asked twice."""
        answer = self._parts.recorder.find_answer(self._session, self._ask.invocation_id, self._text)
        if answer is not None:
            raise _AnsweredBefore(answer)

    def _answer_again(self, text: str) -> None:
        """The stored answer of the turn that this request asked for already."""
        summary = Summary(
            text=self._whole_text(text),
            finish_reason=FinishReason.EOS.value,
            num_tokens=0,
            num_prompt_tokens=0,
            seed=None,
        )
        self._receipt = {"X-Torchmoor-Cache-Tier": "answer"}
        self._over("turns_repeated")
        if self._writer is not None:
            self._show(Token(0, text, 0.0, False), summary)
        else:
            self._answer(summary)

    def _question_text(self) -> str:
        text = self._ask.prompt_text
        max_chars = self._parts.settings.max_question_chars
        if len(text) > max_chars:
            raise ContextTooLong(f"'prompt_text' has {len(text)} characters, more than {max_chars}")
        limit = self._ask.parameters.truncate
        if limit is not None:
            tokenizer = self._parts.model.tokenizer
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > limit:
                text = tokenizer.decode(ids[-limit:], skip_special_tokens=True)
        for reserved in self._parts.model.reserved_text():
            if reserved in self._ask.prompt_text or reserved in text:
                raise InvalidRequest(f"'prompt_text' must not contain {reserved!r}, which stands for an image")
        return text

    def _max_new_tokens(self, num_prompt_tokens: int) -> int:
        settings = self._parts.settings
        room = self._parts.model.max_context - num_prompt_tokens
        if room < 1:
            raise ContextTooLong(
                f"the conversation has {num_prompt_tokens} tokens and the model reads {self._parts.model.max_context}; "
                "open a new session"
            )
        wanted = self._ask.parameters.max_new_tokens or settings.max_new_tokens
        if wanted > settings.max_new_tokens_limit:
            raise InvalidRequest(f"parameters.max_new_tokens must be at most {settings.max_new_tokens_limit}")
        return min(wanted, room)

    def _on_event(self, event: TokenEvent) -> bool:
        """The engine's thread: one more token, or the end. False ends the generation here."""
        if event.token_id is None:
            error = event.error
            self._fail(error if isinstance(error, HandlerError) else InternalError("the answer could not be computed"))
            return False
        assert self._sequence is not None
        reason = event.finish_reason
        is_special = event.token_id in self._parts.model.eos_token_ids
        text = self._detokenizer.push(event.token_id)
        if reason is not None:
            text += self._detokenizer.finish()
        if self._detokenizer.is_stopped:
            reason = FinishReason.STOP
        if len(self._sequence.output) == 1:
            self._receipt["X-Torchmoor-Ttft-Ms"] = f"{(time.monotonic() - self._received) * 1000:.1f}"
        token = Token(event.token_id, text, event.logprob, is_special)
        if reason is not None:
            summary = self._summarise(reason)
            self._run_on(self._parts.preparing, lambda: self._finish(token, summary))
            return False
        if self._writer is not None:
            self._show(token, None)
        return True

    def _finish(self, token: Token, summary: Summary) -> None:
        """On a worker thread, since the journal may take its time: record the turn, then tell the client of its end."""
        try:
            self._commit()
            if self._writer is not None:
                self._show(token, summary)
            else:
                self._answer(summary)
        except HandlerError as error:
            self._fail(error)
        except Exception:
            logger.exception("turn could not be finished")
            self._fail(InternalError("the answer could not be recorded; the worker's log has the reason"))

    def _summarise(self, reason: FinishReason) -> Summary:
        assert self._sequence is not None
        return Summary(
            text=self._whole_text(self._detokenizer.text),
            finish_reason=reason.value,
            num_tokens=len(self._sequence.output),
            num_prompt_tokens=len(self._sequence.prompt),
            seed=self._ask.parameters.seed,
        )

    def _whole_text(self, answer: str) -> str:
        """The answer, after the question if the client wants that."""
        return self._ask.prompt_text + answer if self._ask.parameters.return_full_text else answer

    def _commit(self) -> None:
        """The answer is complete: it becomes part of the conversation before the client hears of its end."""
        assert self._sequence is not None
        text = self._detokenizer.text
        for reserved in self._parts.model.reserved_text():
            text = text.replace(reserved, " ")  # spelled out by the model, it would be read as one more image
        event = Event(
            kind="turn",
            images=digests(self._new_images),
            question=self._text,
            answer=text,
            invocation_id=self._ask.invocation_id,
        )
        session = self._session
        with session.recording:
            if len(session.messages) != len(self._messages) - 1:  # another request has caught up with the journal
                raise TurnConflict(CONFLICT)
            self._parts.recorder.record(session, event, [loaded.encoded for loaded in self._own_images])
            self._parts.store.commit(session, [*self._messages, answer_message(text)], self._images)
        self._parts.counters.add("tokens_generated", len(self._sequence.output))
        self._over("turns_finished")

    def _show(self, token: Token, summary: Summary | None) -> None:
        assert self._writer is not None
        if not self._reply.is_streaming:
            headers = {"Content-Type": self._writer.content_type, **self._receipt}
            self._reply.begin(headers, self._writer.error)
            if self._ask.parameters.return_full_text and self._ask.stream is StreamFormat.TEXT:
                self._reply.write(self._ask.prompt_text.encode())
        self._reply.write(self._writer.token(token, summary), is_end=summary is not None)

    def _answer(self, summary: Summary) -> None:
        body: dict[str, Any] = {"response_text": summary.text}
        if self._ask.parameters.details:
            body["details"] = summary.details()
        headers = {
            "Content-Type": "application/json",
            **self._receipt,
            "X-Torchmoor-Generated-Tokens": str(summary.num_tokens),
        }
        self._reply.finish(headers, json.dumps(body, ensure_ascii=False).encode())

    def _fail(self, error: HandlerError) -> None:
        self._parts.store.drop_images(self._session, [loaded.image for loaded in self._own_images])
        self._over("turns_cancelled" if isinstance(error, ClientGone) else "turns_failed")
        self._reply.fail(error)

    def _over(self, outcome: str) -> None:
        """Counts the turn's outcome, once; the session is free for its next turn."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._parts.counters.add(outcome)
        following = self._parts.store.dequeue(self._session, self)
        if following is not None:
            following._schedule()


def _place_images(prompt: list[int], images: Sequence[SessionImage], image_token_id: int | None) -> list[ImageSpan]:
    """Put each image's key in the prompt where its tokens stand, and say where that is."""
    spans = []
    start = 0
    for image in images:
        assert image_token_id is not None
        start = prompt.index(image_token_id, start)
        prompt[start : start + len(image.features)] = [image.key] * len(image.features)
        spans.append(ImageSpan(start, image.features))
    return spans

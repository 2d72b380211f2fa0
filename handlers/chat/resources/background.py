"""Responses in the background: accepted, generated, followed and ended.

The proxy's queue requests the generation of each (docs/decisions/0052-background-responses.md). The session of a
response stores the request until the answer becomes one of its entries. A response is a session of its own, or reserves
an entry in the session of its conversation.
"""

import json
from contextlib import ExitStack
from typing import Any, Protocol

from handlers.chat.commands import Ask, EndResponse, OpenSession, QueueResponse, RunResponse, ShowResponse, opening_of
from handlers.chat.dialects.background_form import BackgroundForm
from handlers.chat.dialects.response_form import show_response
from handlers.chat.dialects.responses import resume_response, unknown_response
from handlers.chat.identity import name_request
from handlers.chat.images.receiver import ImageReceiver
from handlers.chat.items import check_results, read_items, write_items
from handlers.chat.queued_response import QueuedResponse
from handlers.chat.resources.conversations import Conversations
from handlers.chat.resources.responses import StoredResponses
from handlers.chat.sessions.additions import SessionAdditions
from handlers.chat.sessions.lifecycle import SessionLifecycle
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.chat.turns.turn import Turn
from handlers.errors import InvalidRequest
from handlers.journal.event import Event
from handlers.requests.reply import PendingReply
from torchmoor.wire import headers as wire
from torchmoor.wire.response_ids import response_id


class BackgroundService(Protocol):
    """The methods of the chat service that responses in the background need."""

    def open(self, command: OpenSession, reply: PendingReply, source: tuple[Session, int] | None = None) -> str: ...

    def make_turn(self, session: Session, command: Ask, reply: PendingReply) -> Turn: ...


class BackgroundResponses:
    """Worker threads only: all methods may read a journal."""

    def __init__(
        self,
        sessions: SessionLifecycle,
        additions: SessionAdditions,
        recorder: SessionRecorder,
        receiver: ImageReceiver,
        responses: StoredResponses,
        conversations: Conversations,
        service: BackgroundService,
    ) -> None:
        self._sessions = sessions
        self._additions = additions
        self._recorder = recorder
        self._receiver = receiver
        self._responses = responses
        self._conversations = conversations
        self._service = service

    def queue(self, command: QueueResponse, reply: PendingReply) -> None:
        """Accept a response in its conversation or a session of its own; answer with its object or its stream."""
        ask = command.ask
        if command.conversation_id:
            with self._conversations.found(ask.caller, command.conversation_id) as session:
                self._queue_in(session, command, reply)
            return
        if command.previous:
            with self._responses.found(ask.caller, command.previous, "previous_response_id") as found:
                session_id = self._service.open(opening_of(ask), reply, (found.session, found.num_turns))
        else:
            session_id = self._service.open(opening_of(ask), reply)
        with self._sessions.hold(session_id, ask.caller) as session:
            self._queue_in(session, command, reply)

    def _queue_in(self, session: Session, command: QueueResponse, reply: PendingReply) -> None:
        """Accept a response in a held session."""
        ask, session_id = command.ask, session.id.text
        queued = self._record(session, command, reply)
        name = response_id(session_id, queued.number)
        if not ask.is_streaming:
            fields, form = json.loads(queued.event.response), ask.form
            assert isinstance(form, BackgroundForm)
            shown = show_response(fields, [], session_id, queued.number, len(form.items))
            reply.finish_json(shown, {wire.BACKGROUND: name})
            return
        with ExitStack() as stack:
            self._follow(stack, ShowResponse(caller=ask.caller, response_id=name), reply, {wire.BACKGROUND: name})

    def _record(self, session: Session, command: QueueResponse, reply: PendingReply) -> QueuedResponse:
        """Record the request, only once if the client retries it."""
        ask, form = command.ask, command.ask.form
        assert isinstance(form, BackgroundForm)
        event = Event(
            kind="queue",
            question=write_items(form.items),
            answer=command.request,
            response=form.queued(),
            adapter=session.choose_adapter(reply.adapter),
            invocation_id=name_request(ask.invocation_id, ask.images),
        )
        with session.recording:
            self._recorder.catch_up(session)
            if (queued := _find_first(session, event)) is not None:
                return queued
            check_results(form.items, session.messages)
        received = self._receiver.receive(session.scope, ask.images, reply)
        return self._additions.queue_response(session, event, received, lambda: _find_first(session, event))

    def run(self, command: RunResponse, reply: PendingReply) -> None:
        """Generate a response, unless it has ended. Raises ResponseCancelled."""
        with self._responses.found(command.caller, command.response_id) as found:
            session = found.session
            queued = session.queued.get(found.number)
            if queued is None:
                raise InvalidRequest("this response was not created with 'background': true")
            queued.raise_if_ended()
            if queued.entry:  # else its session's adapter answers
                reply.adapter = queued.event.adapter
            turn = self._service.make_turn(session, resume_response(command, queued, session.id.text), reply)
            queued.turns.append(turn)
            reply.on_end(lambda: queued.forget(turn))
            turn.enqueue()
        turn.start()
        queued.stop_if_ended()  # a cancel that came before found no turn in the queue

    def stream(self, command: ShowResponse, reply: PendingReply) -> None:
        """Stream the events of a response: those that exist, then new ones as they come."""
        with ExitStack() as stack:
            self._follow(stack, command, reply, {})

    def _follow(self, stack: ExitStack, command: ShowResponse, reply: PendingReply, headers: dict[str, str]) -> None:
        """Let a client follow a response. stack: holds its session until the client has all events."""
        after = -1 if command.stream_after is None else command.stream_after
        found = stack.enter_context(self._responses.found(command.caller, command.response_id))
        session, queued = found.session, found.queued
        if queued is not None:
            form = BackgroundForm(json.loads(queued.event.response), read_items(queued.event.question))
            form.place(session.id.text, queued.number)
            with session.recording:  # the turn becomes an entry, or the response ends, before or after this
                if session.end is not None:
                    raise unknown_response(command.response_id)
                is_pending = queued.ended is None and session.find_turn(queued.number) is None
                if is_pending:
                    queued.feed.follow(reply, form, after, headers)
            if is_pending:
                reply.on_end(stack.pop_all().close)
                return
            if queued.ended is not None:
                own, data = form.follow(after, is_running=True)
                reply.begin({"Content-Type": own.content_type, **headers}, own.error)
                reply.write(data + own.fail(queued.ended), is_end=True)
                return
            found = stack.enter_context(self._responses.found(command.caller, command.response_id))
        self._responses.repeat_stream(found, reply, after)

    def end(self, command: EndResponse) -> dict[str, Any]:
        """End a response without an answer, unless it has one; return its object. Raises InvalidRequest."""
        with self._responses.found(command.caller, command.response_id) as found:
            if not found.fields.get("background"):
                raise InvalidRequest("Cannot cancel a synchronous response.")
            if found.queued is not None:
                self._responses.end(found.session, found.queued, dict(command.ended))
        return self._responses.show(ShowResponse(caller=command.caller, response_id=command.response_id))


def _find_first(session: Session, event: Event) -> QueuedResponse | None:
    """Return the response that an earlier attempt of the request queued. A session of its own has only one."""
    for queued in session.queued.values():
        is_same = (queued.event.invocation_id, queued.event.question) == (event.invocation_id, event.question)
        if not queued.entry or (event.invocation_id and is_same and queued.ended is None):
            return queued
    return None

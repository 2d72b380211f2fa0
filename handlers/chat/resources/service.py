"""The service of OpenAI's resources: responses, conversations and files, which are sessions and their turns."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from handlers.chat.commands import (
    AddImages,
    AddItems,
    Ask,
    Command,
    Compact,
    CountTokens,
    DeleteConversation,
    DeleteFile,
    DeleteResponse,
    Detokenize,
    DropResponse,
    EndResponse,
    Generate,
    ListFiles,
    OpenFile,
    OpenSession,
    QueueResponse,
    ResolveInput,
    Resource,
    Respond,
    RespondInConversation,
    RunResponse,
    SessionChange,
    ShowConversation,
    ShowFile,
    ShowResponse,
    Tokenize,
    UpdateConversation,
    opening_of,
)
from handlers.chat.dialects.response_form import ResponseForm, show_compaction
from handlers.chat.dialects.responses import generate
from handlers.chat.dialects.turns import limit_reached
from handlers.chat.images.fetch_pool import find_line
from handlers.chat.images.receiver import check_num_images
from handlers.chat.items import Item, Referred, images_in
from handlers.chat.messages import SYSTEM, first_address, images_of
from handlers.chat.resources.background import BackgroundResponses, BackgroundService
from handlers.chat.resources.conversations import Conversations, unknown_conversation
from handlers.chat.resources.files import Files
from handlers.chat.resources.responses import StoredResponse, StoredResponses
from handlers.chat.sessions.additions import SessionAdditions
from handlers.chat.sessions.known_sessions import KnownSessions
from handlers.chat.sessions.lifecycle import SessionLifecycle
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.chat.turns.completion import Completion
from handlers.chat.turns.generation_parts import GenerationParts
from handlers.errors import InvalidRequest
from handlers.requests.reply import PendingReply
from torchmoor.wire.response_ids import conversation_id, file_id


class SessionService(BackgroundService, Protocol):
    """The methods of the chat service that resources need."""

    def dispatch(self, command: Command, reply: PendingReply) -> None: ...


class ResourceService:
    """Answers requests for resources. Worker threads only: all of them may read a journal."""

    def __init__(
        self,
        parts: GenerationParts,
        sessions: SessionLifecycle,
        additions: SessionAdditions,
        known: KnownSessions,
        recorder: SessionRecorder,
        service: SessionService,
    ) -> None:
        self._parts = parts
        self._sessions = sessions
        self._service = service
        self._responses = StoredResponses(sessions, recorder)
        self._conversations = Conversations(sessions, additions, recorder, parts.receiver)
        self._background = BackgroundResponses(
            sessions, additions, recorder, parts.receiver, self._responses, self._conversations, service
        )
        self._files = Files(sessions, known, recorder)

    def handle(self, command: Resource, reply: PendingReply) -> None:
        """Answer a command. Raises HandlerError."""
        match command:
            case Respond():
                self._respond(command, reply)
            case RespondInConversation():
                self._respond_in_conversation(command, reply)
            case ResolveInput():
                self._resolve(command, reply)
            case QueueResponse():
                self._background.queue(command, reply)
            case RunResponse():
                self._background.run(command, reply)
            case ShowResponse(stream_after=int()):
                self._background.stream(command, reply)
            case ShowFile(has_content=True):
                content = self._files.read(command.caller, command.file_id)
                reply.finish({"Content-Type": "application/octet-stream"}, content)
            case _:
                reply.finish_json(self._answer(command, reply))

    def _answer(self, command: Resource, reply: PendingReply) -> dict[str, Any]:
        match command:
            case ShowResponse():
                return self._responses.show(command)
            case DeleteResponse():
                return self._responses.delete(command, reply)
            case DropResponse():
                return self._responses.drop(command, reply)
            case EndResponse():
                return self._background.end(command)
            case CountTokens():
                num_tokens = len(self._completion(command.request, reply).tokenize())
                return {"object": "response.input_tokens", "input_tokens": num_tokens}
            case Tokenize():
                return self._tokenize(command, reply)
            case Detokenize():
                return {"prompt": self._detokenize(command)}
            case Compact():
                return self._compact(command, reply)
            case AddItems():
                return self._add_items(command, reply)
            case ShowConversation():
                return self._conversations.show(command)
            case UpdateConversation():
                return self._conversations.update(command)
            case DeleteConversation():
                return self._conversations.delete(command, reply)
            case OpenFile():
                text = file_id(self._service.open(command.opening, reply))
                return self._files.show(ShowFile(caller=command.opening.caller, file_id=text))
            case ShowFile():
                return self._files.show(command)
            case ListFiles():
                return self._files.list(command)
            case DeleteFile():
                return self._files.delete(command, reply)
            case _:
                raise AssertionError(f"{command!r} is not a resource")

    def _respond(self, command: Respond, reply: PendingReply) -> None:
        """Continue after a stored response: in its session if that has no later turn, else in a branch."""
        with self._responses.found(command.ask.caller, command.previous, "previous_response_id") as found:
            start = self._prepare(found, command, reply)
        start()

    def _prepare(self, found: StoredResponse, command: Respond, reply: PendingReply) -> Callable[[], None]:
        """Decide where a held response is continued. Return the function that starts the answer."""
        ask = command.ask
        if not command.is_stored:
            return self._complete_after(found.session, found.num_turns, ask, reply).start
        turn = self._service.make_turn(found.session, ask, reply)
        is_last = len(found.session.entries) == found.number and found.session.resource is None
        if turn.is_answered():
            turn.enqueue()
            return turn.start
        if is_last and turn.try_enqueue():
            return turn.start
        if not command.may_open:
            raise limit_reached()
        session_id = self._service.open(opening_of(ask), reply, (found.session, found.num_turns))
        assert ask.draft is not None
        ask.draft.branch(found.num_turns)
        return partial(self._service.dispatch, replace(ask, session_id=session_id), reply)

    def _respond_in_conversation(self, command: RespondInConversation, reply: PendingReply) -> None:
        reply.gone = unknown_conversation(command.conversation_id)  # also if it is deleted while the answer runs
        with self._conversations.found(command.ask.caller, command.conversation_id) as session:
            turn = self._service.make_turn(session, command.ask, reply)
            turn.enqueue()
        turn.start()

    def _add_items(self, command: AddItems, reply: PendingReply) -> dict[str, Any]:
        """Add items to a conversation, which is opened first if the command says so."""
        if command.opening is None:
            return self._conversations.add(command, reply)
        opened = replace(command, conversation_id=conversation_id(self._service.open(command.opening, reply)))
        if command.items:
            self._conversations.add(opened, reply)
        return self._conversations.show(ShowConversation(caller=command.caller, conversation_id=opened.conversation_id))

    def _completion(self, request: Generate | Respond | RespondInConversation, reply: PendingReply) -> Completion:
        """Return the Completion for a request that is not stored, without starting it."""
        match request:
            case Generate():
                return Completion(self._parts, request, reply)
            case Respond(ask=ask):
                with self._responses.found(ask.caller, request.previous, "previous_response_id") as found:
                    return self._complete_after(found.session, found.num_turns, ask, reply)
            case RespondInConversation(ask=ask):
                with self._conversations.found(ask.caller, request.conversation_id) as session:
                    return self._complete_after(session, len(session.order), ask, reply)

    def _tokenize(self, command: Tokenize, reply: PendingReply) -> dict[str, Any]:
        ids = list(self._completion(command.request, reply).tokenize())
        texts = self._parts.model.tokenizer.convert_ids_to_tokens(ids) if command.has_texts else None
        return {
            "count": len(ids),
            "max_model_len": self._parts.limits.max_context,
            "tokens": ids,
            "token_strs": texts,
        }

    def _detokenize(self, command: Detokenize) -> str:
        model = self._parts.model
        if any(each >= model.vocabulary for each in command.ids):
            raise InvalidRequest(f"'tokens' must be below {model.vocabulary}, the vocabulary's size", param="tokens")
        text: str = model.tokenizer.decode(list(command.ids))
        return text

    def _resolve(self, command: ResolveInput, reply: PendingReply) -> None:
        references, caller = command.references, command.caller
        compacted = self._responses.read_compacted(caller, references.compaction) if references.compaction else []
        check_num_images(len(references.files), self._parts.limits.session.max_images)
        files = {text: self._files.find_image(caller, text) for text in references.files}
        items = self._responses.find_items(caller, references)
        self._service.dispatch(command.resume(Referred(compacted, files, items)), reply)

    def _compact(self, command: Compact, reply: PendingReply) -> dict[str, Any]:
        """Store a conversation, without its system messages, in a new session.

        The client sends system messages again.
        """
        request, opening = command.request, command.opening
        items: list[Item] = []
        if isinstance(request, Respond):
            with self._responses.found(opening.caller, request.previous, "previous_response_id") as found:
                items = self._responses.repeat(found.session, found.num_turns, opening.caller)
        form = request.ask.form if isinstance(request, Respond) else request.form
        assert isinstance(form, ResponseForm)
        items += form.items
        num_tokens = len(self._completion(request, reply).tokenize())
        session_id = self._service.open(opening, reply)
        kept = tuple(item for item in items if item.message.role != SYSTEM)
        adding = AddItems(caller=opening.caller, conversation_id="", items=kept, invocation_id=opening.invocation_id)
        with self._sessions.hold(session_id, opening.caller) as session:
            self._conversations.add_items(session, adding, reply)
        instructions = [item for item in items if item.message.role == SYSTEM]
        return show_compaction(session_id, instructions, num_tokens, command.created_at)

    def _complete_after(self, session: Session, num_turns: int, ask: Ask, reply: PendingReply) -> Completion:
        """Return the Completion that continues a held session's first turns. The session does not record its answer."""
        assert ask.draft is not None
        earlier = self._responses.repeat(session, num_turns, ask.caller)
        return Completion(self._parts, generate(ask, ask.draft.instructions, earlier), reply)


def find_fetches(command: SessionChange | Resource) -> str | None:
    """Return the queue in which a command waits for its downloads of images; None if it has none."""
    match command:
        case OpenSession() | AddImages():
            return find_line(command.caller, command.images)
        case AddItems():
            return find_line(command.caller, images_in(command.items))
        case QueueResponse():
            return find_line(command.ask.caller, command.ask.images)
        case Tokenize(request=given):
            parts = [part for message in given.messages for part in message.parts]
            images = images_of(parts) if given.prompt is None else first_address(given.prompt)
            return find_line(given.caller, images)
        case CountTokens() | Compact():
            request = command.request
            ask = request if isinstance(request, Generate) else request.ask
            assert isinstance(ask.form, ResponseForm)
            return find_line(ask.caller, images_in(ask.form.items))
    return None

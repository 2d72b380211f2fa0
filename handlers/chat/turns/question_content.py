"""The content of a turn's question: a text, or items of the Responses API, and what each adds to a session."""

from typing import Any

from handlers.chat.commands import Ask
from handlers.chat.forms import ResponseDraft, Summary
from handlers.chat.items import check_results, messages_of, write_items
from handlers.chat.messages import TOOL
from handlers.chat.sessions.entries import ask_messages
from handlers.chat.sessions.journal_failures import CONFLICT
from handlers.chat.sessions.session import Session
from handlers.chat.turns.context_limits import truncate
from handlers.chat.turns.generation_parts import GenerationParts
from handlers.chat.turns.history import read_system
from handlers.errors import TurnConflict
from handlers.journal.event import Event

Messages = list[dict[str, Any]]  # of the chat template


class QuestionText:
    """A question as a text, and the messages before it that the client repeats.

    instructions: messages that precede the conversation in this turn's prompt only. may_drop: whether the oldest turns
    may be left out of a prompt that is too long; drops_for_good: later prompts leave them out, too. system: the system
    message of a session's first question, once `messages` has found it. asked_by: a role other than the user's.
    """

    drops_for_good = True

    def __init__(self, ask: Ask, parts: GenerationParts) -> None:
        self.instructions: Messages = []
        self.num_chars = len(ask.prompt_text)
        self.may_drop = parts.limits.session.overflow == "drop_oldest"
        self.asked_by = TOOL if ask.are_results else ""
        self.system = ""
        self._ask = ask
        self._model = parts.model

    def read(self) -> str:
        """Return the question as it is recorded."""
        ask = self._ask
        return ask.prompt_text if ask.are_results else truncate(self._model, ask.prompt_text, ask.parameters.truncate)

    def place(self, session: Session, number: int) -> None:
        """Note the turn's number, which only a response shows."""

    def messages(self, text: str, history: Messages, num_dropped: int, num_images: int) -> Messages:
        """Return what the question adds to the conversation. Raises InvalidRequest.

        text: as recorded. history: the conversation, without its first num_dropped turns. num_images: the question's.
        """
        self.system = read_system(self._ask.history, history, num_dropped, self._model.template.style)
        return ask_messages(text, self.asked_by, self.system, num_images)

    def restore(self, session: Session, number: int, turn: Event) -> str:
        """Return the text of the answer that an earlier attempt has recorded."""
        return turn.answer

    def record(self, summary: Summary) -> tuple[str, str]:
        """Return the answer and the response for the journal."""
        return summary.text, ""


class QuestionItems:
    """The input of a response, with the same methods. Each request decides what its prompt leaves out."""

    drops_for_good = False
    system = asked_by = ""

    def __init__(self, draft: ResponseDraft) -> None:
        self.num_chars = sum(item.message.num_chars for item in draft.items)
        self.instructions = [each.for_template() for each in draft.instructions]
        self.may_drop = draft.may_drop
        self._draft = draft

    def read(self) -> str:
        return write_items(self._draft.items)

    def place(self, session: Session, number: int) -> None:
        """Note the turn's number. Raises TurnConflict if the session has turns after the one that it follows."""
        if self._draft.after not in (None, len(session.entries)):
            raise TurnConflict(CONFLICT)
        self._draft.place(session.id.text, number)

    def messages(self, text: str, history: Messages, num_dropped: int, num_images: int) -> Messages:
        check_results(self._draft.items, history)
        return messages_of(self._draft.items, num_images)

    def restore(self, session: Session, number: int, turn: Event) -> str:
        self._draft.place(session.id.text, number)
        return self._draft.restore(turn.answer, turn.response)

    def record(self, summary: Summary) -> tuple[str, str]:
        return self._draft.record(summary)


def content_of(ask: Ask, parts: GenerationParts) -> QuestionText | QuestionItems:
    """Return the content of a question."""
    return QuestionText(ask, parts) if ask.draft is None else QuestionItems(ask.draft)

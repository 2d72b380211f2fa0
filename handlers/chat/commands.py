"""Commands: the requests of clients and operators as types, independent of the dialect."""

from dataclasses import dataclass

from handlers.chat.forms import AnswerForm
from handlers.chat.messages import ImageReference, Message
from handlers.chat.parameters import Parameters
from handlers.requests import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    caller: Caller
    images: tuple[ImageReference, ...]
    ttl_s: int | None
    invocation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddImages:
    caller: Caller
    session_id: str
    images: tuple[ImageReference, ...]
    invocation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask a question in a session."""

    caller: Caller
    session_id: str
    prompt_text: str
    images: tuple[ImageReference, ...]
    parameters: Parameters
    invocation_id: str
    form: AnswerForm
    is_streaming: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Answer without a session: a raw prompt, or a conversation that the request carries whole.

    prompt: passed to the tokenizer unchanged; a model with vision finds its images with `split_images`. None if
    there are `messages`, which the model's chat template renders.
    """

    caller: Caller
    prompt: str | None
    messages: tuple[Message, ...]
    parameters: Parameters
    invocation_id: str
    form: AnswerForm
    is_streaming: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    caller: Caller
    session_id: str
    invocation_id: str = ""


@dataclass(frozen=True, slots=True)
class ReportStatus:
    """Report what the worker holds: an operation for the proxy and for operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSessions:
    """List a page of the worker's sessions, in the order of their hashes: an operation for operators.

    after: a hash, empty for the first page. prefix: of the hashes to list.
    """

    after: str
    prefix: str
    limit: int


@dataclass(frozen=True, slots=True)
class ActOnSession:
    """Act on a session for an operator. action: close, pin or unpin. session: its hash."""

    action: str
    session: str


@dataclass(frozen=True, slots=True)
class CloseInJournal:
    """Close a session that perhaps only the journal has, for an operator. session: its hash."""

    session: str


@dataclass(frozen=True, slots=True)
class EndClosed:
    """End the sessions of these ids that another instance has closed: an operation for the proxy."""

    session_ids: tuple[str, ...]


Command = (
    OpenSession
    | AddImages
    | Ask
    | Generate
    | CloseSession
    | ReportStatus
    | ListSessions
    | ActOnSession
    | CloseInJournal
    | EndClosed
)

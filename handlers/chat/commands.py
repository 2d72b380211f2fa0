"""Commands: the requests of clients and operators as types, independent of the dialect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from handlers.chat.forms import AnswerForm, ResponseDraft
from handlers.chat.identity import identify
from handlers.chat.items import Item, References, Referred
from handlers.chat.messages import ImageReference, Message
from handlers.chat.parameters import Parameters
from handlers.chat.queued_response import QueuedResponse
from handlers.requests.incoming import Caller
from torchmoor.wire.session_query import SessionQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Open a session. question: identifies the rest of the request, such as its first question, for retries."""

    caller: Caller
    invocation_id: str
    images: tuple[ImageReference, ...] = ()
    ttl_s: int | None = None  # None: the worker's setting; a file's may be above session.max_ttl_s, which then counts
    question: str = ""
    resource: str = ""  # as JSON, if the session is an OpenAI conversation or file


@dataclass(frozen=True, slots=True, kw_only=True)
class AddImages:
    caller: Caller
    session_id: str
    images: tuple[ImageReference, ...]
    invocation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask a question in a session.

    history: the messages before the question that the client repeats; they must equal the session's. are_results:
    prompt_text has the results of tools, as `write_results` encodes them. queued: the response in the background
    that this turn answers.
    """

    caller: Caller
    session_id: str
    prompt_text: str
    images: tuple[ImageReference, ...]
    parameters: Parameters
    invocation_id: str
    form: AnswerForm
    is_streaming: bool
    history: tuple[Message, ...] = ()
    are_results: bool = False
    queued: QueuedResponse | None = None

    @property
    def draft(self) -> ResponseDraft | None:
        """The form of a turn of the Responses API, which has its input instead of prompt_text and history."""
        return self.form if isinstance(self.form, ResponseDraft) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAnswer:
    """End the session's running answer with its next token; the text up to there becomes the turn's answer."""

    caller: Caller
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSession:
    """Open a session that begins with the first turns of another one, images included."""

    opening: OpenSession
    session_id: str
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RespondInConversation:
    """Answer at the end of a conversation."""

    ask: Ask
    conversation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Respond:
    """Continue after a stored response, in its session or in a branch of it.

    previous: the response's id. is_stored: the answer is stored, too. may_open: a branch may be opened.
    """

    ask: Ask
    previous: str
    is_stored: bool
    may_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueResponse:
    """Accept a response in the background, after a stored response or in a conversation.

    previous, conversation_id: "" if the request does not name one. ask: the question; its reply gets the response's
    object or its stream. request: the other fields, for `resume_response`.
    """

    ask: Ask
    previous: str
    conversation_id: str
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResponse:
    """Generate a response in the background, for the proxy's queue."""

    caller: Caller
    response_id: str
    invocation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndResponse:
    """End a response in the background without an answer. ended: fields of its object."""

    caller: Caller
    response_id: str
    ended: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemQuery:
    """A page of items. after: the id of the item before the page; empty for the first page."""

    after: str
    limit: int
    is_ascending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowResponse:
    """Show a stored response, or the items of its input if there is an ItemQuery.

    stream_after: repeat the response's stream instead, from after the event with this sequence number. included:
    OpenAI's names of what to show besides.
    """

    caller: Caller
    response_id: str
    items: ItemQuery | None = None
    stream_after: int | None = None
    included: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResponse:
    caller: Caller
    response_id: str
    invocation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddItems:
    """Add items to a conversation, which is opened first if there is an `opening`."""

    caller: Caller
    conversation_id: str
    items: tuple[Item, ...]
    invocation_id: str
    opening: OpenSession | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConversation:
    """Show a conversation, one of its items, or a page of them. included: as of ShowResponse."""

    caller: Caller
    conversation_id: str
    item_id: str = ""
    page: ItemQuery | None = None
    included: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConversation:
    """Replace the metadata of a conversation, or delete one of its items."""

    caller: Caller
    conversation_id: str
    item_id: str = ""
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteConversation:
    caller: Caller
    conversation_id: str
    invocation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokens:
    """Count the tokens of a prompt. No answer is generated."""

    request: "Generate | Respond | RespondInConversation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenize:
    """List the tokens of a prompt. No answer is generated. has_texts: include each token's text."""

    request: "Generate"
    has_texts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Detokenize:
    """Show the text of tokens."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Store a conversation and answer with a compaction item that refers to it. created_at: seconds since 1970."""

    request: "Generate | Respond"
    opening: OpenSession
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveInput:
    """Read the stored objects that an input refers to. resume: makes the request's command from them."""

    caller: Caller
    references: References
    resume: Callable[[Referred], "Command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFile:
    """Store an image as a file."""

    opening: OpenSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowFile:
    """Show a file. has_content: return its bytes instead."""

    caller: Caller
    file_id: str
    has_content: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFiles:
    """Show a page of the caller's files. purpose: list only files with this purpose; "" lists all."""

    caller: Caller
    page: ItemQuery
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteFile:
    caller: Caller
    file_id: str
    invocation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAndAsk:
    """Open a session and answer its first question. ask: without the session's id."""

    opening: OpenSession
    ask: Ask


def opening_of(ask: Ask) -> OpenSession:
    """Return the command that opens a session for this first question."""
    items = () if ask.draft is None else ask.draft.items
    return OpenSession(
        caller=ask.caller,
        invocation_id=ask.invocation_id,
        question=identify(ask.prompt_text, ask.history, items, *ask.images),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Answer without a session: a raw prompt, or a conversation that the request contains whole.

    prompt: passed to the tokenizer unchanged; a model with vision finds its images with `split_images`. None if
    there are `messages`, which the model's chat template renders. more_prompts: further raw prompts, each with answers
    of its own. num_choices: answers to each prompt. If there are several answers, the form is a `ChoicesForm`.
    """

    caller: Caller
    prompt: str | None
    messages: tuple[Message, ...]
    parameters: Parameters
    invocation_id: str
    form: AnswerForm
    is_streaming: bool
    num_choices: int = 1
    more_prompts: tuple[str, ...] = ()

    @property
    def num_answers(self) -> int:
        return self.num_choices * (1 + len(self.more_prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    caller: Caller
    session_id: str
    invocation_id: str = ""


@dataclass(frozen=True, slots=True)
class ReportStatus:
    """Report what the worker holds: an operation for the proxy and for operators."""


@dataclass(frozen=True, slots=True)
class ActOnSession:
    """Act on a session for an operator. action: close, pin or unpin. session: its hash."""

    action: str
    session: str


@dataclass(frozen=True, slots=True)
class DropResponse:
    """Delete a response in the background that the proxy could not queue. session: its hash. entry: its number."""

    session: str
    entry: int


@dataclass(frozen=True, slots=True)
class CloseInJournal:
    """Close a session that may exist only in the journal, for an operator. session: its hash."""

    session: str


@dataclass(frozen=True, slots=True)
class EndClosed:
    """End sessions, by their ids, that another instance has closed. An operation for the proxy."""

    session_ids: tuple[str, ...]


Resource = (
    Respond
    | RespondInConversation
    | QueueResponse
    | RunResponse
    | EndResponse
    | ResolveInput
    | ShowResponse
    | DeleteResponse
    | DropResponse
    | CountTokens
    | Tokenize
    | Detokenize
    | Compact
    | AddItems
    | ShowConversation
    | UpdateConversation
    | DeleteConversation
    | OpenFile
    | ShowFile
    | ListFiles
    | DeleteFile
)
"""Requests for OpenAI's resources."""

SessionChange = (
    OpenSession | OpenAndAsk | BranchSession | AddImages | CloseSession | ActOnSession | CloseInJournal | EndClosed
)
"""Changes of sessions other than questions."""

Command = Ask | Generate | StopAnswer | ReportStatus | SessionQuery | SessionChange | Resource

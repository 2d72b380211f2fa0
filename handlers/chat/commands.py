"""What a client says, in types. Nothing here knows sessions, models or TorchServe, nor how a dialect spells it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers.chat.forms import AnswerForm
from handlers.chat.messages import ImageReference, Message
from handlers.chat.parameters import Parameters
from torchmoor.wire import headers as wire

MAX_INVOCATION_ID = 128


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as the adapter hands it over: header names in lower case, the body as TorchServe left it."""

    headers: Mapping[str, str]
    body: bytes | str | dict[str, Any] | list[Any] | None

    def accepts(self, media_type: str) -> bool:
        """True if the Accept header names this type itself."""
        accepted = self.headers.get("accept", "").split(",")
        return media_type in [item.partition(";")[0].strip().lower() for item in accepted]

    @property
    def caller(self) -> "Caller":
        headers = self.headers
        return Caller(headers.get(wire.ENDPOINT, ""), headers.get(wire.PRINCIPAL, ""))

    @property
    def invocation_id(self) -> str:
        """The client's own id of the request, the same when it sends the request again; empty if it gave none."""
        return self.headers.get(wire.INVOCATION_ID, "")[:MAX_INVOCATION_ID]


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf: both empty when no proxy stands in front."""

    endpoint: str
    principal: str


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
    """One question of a session."""

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
    """An answer without a session: to a raw prompt, or to a conversation that the request carries whole.

    prompt: given to the tokenizer as it is; a model that sees finds its images with `messages.split_images`. None if
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


@dataclass(frozen=True, slots=True)
class Status:
    """What the worker holds: an operation for the proxy and for operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSessions:
    """A page of the worker's sessions, in the order of their hashes: an operation for operators.

    after: a hash, empty for the first page. prefix: of the hashes that are wanted.
    """

    after: str
    prefix: str
    limit: int


@dataclass(frozen=True, slots=True)
class ActOnSession:
    """What an operator does to a session. action: close, pin or unpin."""

    action: str
    session: str


Command = OpenSession | AddImages | Ask | Generate | CloseSession | Status | ListSessions | ActOnSession

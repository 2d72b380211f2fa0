"""The protocol of a question: makes the prompt, and records the answer."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from handlers.chat.forms import Summary
from handlers.chat.images.store import Image
from handlers.models.answer_style import AnswerStyle


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of the model.

    ids: with `image_token_id` at each position of an image. images: in order. style: how the answer marks its parts.
    adapter: the name of the adapter that answers; "" for the base model. receipt: response headers about how the prompt
    was made.
    """

    ids: list[int]
    images: Sequence[Image]
    style: AnswerStyle
    adapter: str
    receipt: dict[str, str] = field(default_factory=dict)


class Question(Protocol):
    """A question of a session, or a request without a session. Its methods run on worker threads."""

    def compose(self, raise_if_stopped: Callable[[], None]) -> Prompt:
        """Return the prompt. Calls `raise_if_stopped` between slow steps. Raises HandlerError, AnsweredBefore."""
        ...

    def fetch(self, image: Image) -> bytes:
        """Read the encoded bytes of one of the prompt's images that the image store dropped. Raises HandlerError."""
        ...

    def restore(self, keys: Sequence[int]) -> int:
        """Read more of the prompt's KV cache from the journal, if it is there. Return the length of the cache.

        keys: the prompt's, see `AnswerRequest`.
        """
        ...

    def commit(self, summary: Summary) -> None:
        """Record the complete answer before the client sees its end. Raises HandlerError, AnsweredBefore."""
        ...


class AnsweredBefore(Exception):
    """Raised if the conversation already has this question's answer. number: of its turn. style: of the answer."""

    def __init__(self, text: str, number: int, style: AnswerStyle) -> None:
        super().__init__()
        self.text = text
        self.number = number
        self.style = style


def digest_of(about: str, prompt: Prompt) -> str:
    """Return a digest of all that determines an answer; it must be equal where the answer is continued.

    about: everything except the prompt."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    digest.update(array("q", prompt.ids).tobytes())
    for image in prompt.images:
        digest.update(image.digest.encode())
    return digest.hexdigest()

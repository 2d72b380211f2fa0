"""An answer without a session: the request contains the whole conversation, or a raw prompt.

When it ends, the pool keeps its KV cache. If the client sends the conversation again with one more turn, only the new
turn is computed.
"""

from collections.abc import Callable, Sequence

from handlers.chat.commands import Generate
from handlers.chat.forms import Summary
from handlers.chat.images.fetch_pool import find_line
from handlers.chat.images.receiver import ReceivedImage
from handlers.chat.images.store import Image
from handlers.chat.messages import Part, TextPart, first_address, has_markdown_image, images_of, split_images
from handlers.chat.turns.context_limits import truncate
from handlers.chat.turns.generation import Generation
from handlers.chat.turns.generation_parts import GenerationParts
from handlers.chat.turns.question import Prompt
from handlers.errors import InvalidRequest
from handlers.models.answer_style import AnswerStyle
from handlers.requests.reply import PendingReply


class Completion:
    """Implements `Question` for a request without a session, and holds the generation that answers it."""

    def __init__(self, parts: GenerationParts, request: Generate, reply: PendingReply) -> None:
        self._parts = parts
        self._request = request
        self._reply = reply
        self._scope = request.caller.scope
        self._cache = parts.engine.pool.open(self._scope)
        self._received: list[ReceivedImage] = []
        self._generation = Generation(parts, self, self._cache, request, reply, self._release)

    def start(self) -> None:
        """Begin. Raises ContextTooLong early where it can: TorchServe resends a waiting request's body in each step."""
        prompt = self._request.prompt  # searched for images on a worker thread, because it may have megabytes
        if prompt is None:
            images = images_of(self._request_parts())
            has_images = bool(images)
            self._check_length(())
        else:
            has_images = has_markdown_image(prompt)
            images = first_address(prompt) if has_images else ()
            if not has_images:
                self._check_length((TextPart(prompt),))
        self.begin(is_slow=has_images, line=find_line(self._request.caller, images))

    def begin(self, *, is_slow: bool, line: str | None) -> None:
        """Begin the generation; the arguments are its own."""
        self._parts.counters.add("turns_started")
        self._generation.begin(is_slow=is_slow, line=line)
        self._reply.on_cancel(self._generation.stop)

    def _request_parts(self) -> Sequence[Part]:
        """Split the request into texts and images; a model without vision reads a raw prompt as text only."""
        prompt = self._request.prompt
        if prompt is None:
            return [part for message in self._request.messages for part in message.parts]
        return split_images(prompt) if self._parts.model.image_token_id is not None else (TextPart(prompt),)

    def compose(self, raise_if_stopped: Callable[[], None]) -> Prompt:
        """Read the request's images, and render or tokenize its text."""
        request, model = self._request, self._parts.model
        parts = self._request_parts()
        self._check_length(parts)
        if request.prompt is None:
            model.template.check()
        else:
            parts = self._check_raw_prompt(parts)
        self._received = self._parts.receiver.receive(self._scope, images_of(parts), self._reply)
        images = [item.image for item in self._received]
        sizes = [image.num_tokens for image in images]
        if request.prompt is None:
            messages = [message.for_template() for message in request.messages]
            parameters = request.parameters
            ids = model.render(messages, sizes, parameters.tool_definitions, parameters.template_variables)
            style = model.style_after(ids)
        else:
            style = AnswerStyle()  # a raw prompt's answer is all content
            ids = model.encode_prompt([p.text if isinstance(p, TextPart) else None for p in parts], sizes)
        return Prompt(ids, images, style, self._reply.adapter or "")

    def _check_length(self, parts: Sequence[Part]) -> None:
        num_chars = sum(message.num_chars for message in self._request.messages)
        if self._request.prompt is not None:
            num_chars = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        num_chars += self._request.parameters.num_tool_chars
        self._parts.limits.check_chars(num_chars, "the request has {} characters of text")

    def _check_raw_prompt(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Apply `truncate`. Raises InvalidRequest if the prompt contains the model's own image token."""
        model, limit = self._parts.model, self._request.parameters.truncate
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if model.image_token and any(model.image_token in text for text in texts):
            raise InvalidRequest(
                f"'inputs' must not contain {model.image_token!r}; put an image there as ![](address)", param="inputs"
            )
        if limit is None:
            return parts
        if len(texts) < len(parts):
            raise InvalidRequest(
                "parameters.truncate cannot be used with images in 'inputs'", param="parameters.truncate"
            )
        return [TextPart(truncate(model, text, limit, is_raw=True)) for text in texts]

    def tokenize(self) -> Sequence[int]:
        """Return the prompt's tokens, image tokens included. No answer is generated. Raises as `compose`."""
        try:
            return self.compose(self._reply.raise_if_cancelled).ids
        finally:
            self.release_images()

    def fetch(self, image: Image) -> bytes:
        """Return the bytes that came with the request."""
        return next(item.encoded for item in self._received if item.image == image)

    def restore(self, keys: Sequence[int]) -> int:
        """Return the cache's length: only sessions have KV caches in the journal."""
        return self._cache.length

    def commit(self, summary: Summary) -> None:
        """Do nothing: the answer belongs to no conversation."""

    def _release(self) -> None:
        self.release_images()
        self._cache.unpin()

    def release_images(self) -> None:
        """Release the request's images, which no answer needs now."""
        self._parts.receiver.release(self._received, is_kept=True)

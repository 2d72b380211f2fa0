"""An answer without a session: the request carries the whole conversation, or a raw prompt.

Its KV cache is left to the pool when it is over, so that a client that sends the conversation again, one turn longer,
pays for what is new.
"""

from handlers.chat.generation import Generation, GenerationParts, LoadedImage, Prompt
from handlers.chat.images import Image
from handlers.chat.messages import ImageReference, Part, TextPart, images_of, split_images
from handlers.chat.reply import Reply
from handlers.chat.sessions import sharing_scope
from handlers.chat.turn import truncated
from handlers.chat.wire import Generate
from handlers.engine.kv_cache import SequenceCache
from handlers.errors import ContextTooLong


class Completion(Generation):
    """Created for each request; `start` returns at once."""

    def __init__(self, parts: GenerationParts, request: Generate, reply: Reply) -> None:
        self._scope = sharing_scope(request.caller.endpoint, request.caller.principal)
        cache = SequenceCache(parts.engine.runner.pool, self._scope)
        super().__init__(parts, cache, request.parameters, request.form, reply, is_streaming=request.is_streaming)
        self._request = request
        self._loaded: list[LoadedImage] = []

    def start(self) -> None:
        """Begin."""
        self._parts.counters.add("turns_started")
        self._schedule(is_slow=any(images_of(message.parts) for message in self._request.messages))
        self._reply.on_cancel(self.stop)

    def _compose(self) -> Prompt:
        request, model = self._request, self._parts.model
        if request.prompt is not None:
            parts = self._parts_of(request.prompt)
            self._load(images_of(parts))
            sizes = [loaded.image.num_tokens for loaded in self._loaded]
            ids = model.encode_prompt([p.text if isinstance(p, TextPart) else None for p in parts], sizes)
        else:
            self._load([reference for message in request.messages for reference in images_of(message.parts)])
            sizes = [loaded.image.num_tokens for loaded in self._loaded]
            ids = model.render([message.for_template() for message in request.messages], sizes)
        return Prompt(ids, [loaded.image for loaded in self._loaded])

    def _parts_of(self, prompt: str) -> tuple[Part, ...]:
        limit = self._parts.engine_settings.max_question_chars
        parts = split_images(prompt) if self._parts.model.image_token_id is not None else (TextPart(prompt),)
        num_chars = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        if num_chars > limit:
            raise ContextTooLong(f"'inputs' has {num_chars} characters, more than {limit}")
        if len(parts) == 1 and isinstance(parts[0], TextPart):
            return (TextPart(truncated(self._parts.model, parts[0].text, self._parameters.truncate)),)
        return parts

    def _load(self, references: list[ImageReference] | tuple[ImageReference, ...]) -> None:
        self._loaded = self._parts.load_images(self._scope, references, self._reply)

    def _fetch(self, image: Image) -> bytes:
        return next(loaded.encoded for loaded in self._loaded if loaded.image == image)

    def _commit(self, text: str) -> None:
        """There is no conversation to add it to."""

    def _release(self) -> None:
        for loaded in self._loaded:
            self._parts.images.release(loaded.image, is_kept=True)
        self._cache.pool.unpin(self._cache)

"""An answer without a session: the request carries the whole conversation, or a raw prompt.

Its KV cache is left to the pool when it is over, so that a client that sends the conversation again, one turn longer,
pays for what is new.
"""

from collections.abc import Sequence

from handlers.chat.generation import ClientGone, Generation, GenerationParts, LoadedImage, Prompt
from handlers.chat.images import Image
from handlers.chat.messages import Part, TextPart, images_of, split_images
from handlers.chat.reply import Reply
from handlers.chat.sessions import sharing_scope
from handlers.chat.turn import truncated
from handlers.chat.wire import Generate
from handlers.engine.kv_cache import SequenceCache
from handlers.errors import ContextTooLong, InvalidRequest


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
        has_images = any(images_of(message.parts) for message in self._request.messages)
        self._schedule(is_slow=has_images or "![](" in (self._request.prompt or ""))
        self._reply.on_cancel(lambda: self.stop(ClientGone("the client left")))

    def _compose(self) -> Prompt:
        request, model = self._request, self._parts.model
        prompt_parts = self._prompt_parts()
        every = [prompt_parts, *(message.parts for message in request.messages)]
        for text in texts_of(*every):
            for reserved in model.reserved_text():
                if reserved in text:
                    raise InvalidRequest(f"texts must not contain {reserved!r}, which stands for an image")
        references = [reference for parts in every for reference in images_of(parts)]
        self._loaded = self._parts.load_images(self._scope, references, self._parts.request_settings.max_images)
        sizes = [loaded.image.num_tokens for loaded in self._loaded]
        if request.prompt is not None:
            ids = model.encode_prompt([p.text if isinstance(p, TextPart) else None for p in prompt_parts], sizes)
        else:
            ids = model.render([message.for_template() for message in request.messages], sizes)
        return Prompt(ids, [loaded.image for loaded in self._loaded])

    def _prompt_parts(self) -> tuple[Part, ...]:
        """The raw prompt's texts and images, cut as the client wants it; none if the request has messages."""
        prompt = self._request.prompt
        if prompt is None:
            return ()
        parts = split_images(prompt) if self._parts.model.image_token_id is not None else (TextPart(prompt),)
        limit = self._parts.engine_settings.max_question_chars
        num_chars = sum(map(len, texts_of(parts)))
        if num_chars > limit:
            raise ContextTooLong(f"'inputs' has {num_chars} characters, more than {limit}")
        max_tokens = self._parameters.truncate
        if max_tokens is None:
            return parts
        if images_of(parts):
            raise InvalidRequest("parameters.truncate is for prompts without images", param="parameters.truncate")
        (text,) = texts_of(parts)
        return (TextPart(truncated(self._parts.model, text, max_tokens, is_raw=True)),)

    def _fetch(self, image: Image) -> bytes:
        return next(loaded.encoded for loaded in self._loaded if loaded.image == image)

    def _commit(self, text: str) -> None:
        """There is no conversation to add it to."""

    def _release(self) -> None:
        for loaded in self._loaded:
            self._parts.images.release(loaded.image, is_kept=True)
        self._cache.pool.unpin(self._cache)


def texts_of(*groups: Sequence[Part]) -> list[str]:
    """The texts among the parts, in order."""
    return [part.text for parts in groups for part in parts if isinstance(part, TextPart)]

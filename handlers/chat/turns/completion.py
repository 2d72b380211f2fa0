"""An answer without a session: the request carries the whole conversation, or a raw prompt.

Its KV cache is left to the pool when it is over, so that a client that sends the conversation again, one turn longer,
pays for what is new.
"""

from collections.abc import Sequence

from handlers.chat.commands import Generate
from handlers.chat.messages import MARKDOWN_IMAGE, ImageReference, Part, TextPart, images_of, split_images
from handlers.chat.pictures.store import Image
from handlers.chat.sessions.store import sharing_scope
from handlers.chat.turns.generation import Generation, GenerationParts, LoadedImage, Prompt
from handlers.chat.turns.turn import truncated
from handlers.engine.kv_cache import SequenceCache
from handlers.errors import ContextTooLong, InvalidRequest
from handlers.reply import Reply


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
        prompt = self._request.prompt  # searched for its images on a worker's thread, it may have megabytes
        brings_images = bool(images_of(self._parts_of_request())) if prompt is None else MARKDOWN_IMAGE in prompt
        self._schedule(is_slow=brings_images)
        self._reply.on_cancel(self.stop)

    def _parts_of_request(self) -> Sequence[Part]:
        """Texts and images in order; a model that does not see reads the mention of one in a raw prompt as text."""
        prompt = self._request.prompt
        if prompt is None:
            return [part for message in self._request.messages for part in message.parts]
        return split_images(prompt) if self._parts.model.image_token_id is not None else (TextPart(prompt),)

    def _compose(self) -> Prompt:
        request, model = self._request, self._parts.model
        parts = self._parts_of_request()
        self._check_length(parts)
        if request.prompt is None:
            model.template.check()
        else:
            parts = self._as_raw_prompt(parts)
        self._load(images_of(parts))
        sizes = [loaded.image.num_tokens for loaded in self._loaded]
        if request.prompt is None:
            ids = model.render([message.for_template() for message in request.messages], sizes)
        else:
            ids = model.encode_prompt([p.text if isinstance(p, TextPart) else None for p in parts], sizes)
        return Prompt(ids, [loaded.image for loaded in self._loaded])

    def _check_length(self, parts: Sequence[Part]) -> None:
        """Before anything is tokenized, which takes a second a megabyte."""
        limit = self._parts.engine_settings.max_question_chars
        num_chars = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        if num_chars > limit:
            raise ContextTooLong(f"the request has {num_chars} characters of text, more than {limit}")

    def _as_raw_prompt(self, parts: Sequence[Part]) -> Sequence[Part]:
        """What is left after `truncate`. Raises InvalidRequest if the prompt speaks of images in another way."""
        model, limit = self._parts.model, self._parameters.truncate
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
        return [TextPart(truncated(model, text, limit, is_raw=True)) for text in texts]

    def _load(self, references: Sequence[ImageReference]) -> None:
        self._loaded = self._parts.load_images(self._scope, references, self._reply)

    def _fetch(self, image: Image) -> bytes:
        return next(loaded.encoded for loaded in self._loaded if loaded.image == image)

    def _commit(self, text: str) -> None:
        """There is no conversation to add it to."""

    def _release(self) -> None:
        for loaded in self._loaded:
            self._parts.images.release(loaded.image, is_kept=True)
        self._cache.pool.unpin(self._cache)

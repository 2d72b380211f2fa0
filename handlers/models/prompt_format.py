"""How a checkpoint's prompts are written and its answers end: template, tokenizer, special tokens. Needs no weights."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from handlers.errors import PROMPT_TOO_LONG, ContextTooLong, InvalidRequest
from handlers.models.answer_style import AnswerStyle
from handlers.models.chat_template import ChatTemplate
from handlers.models.tokenizer import check_known

END_TOKENS = 32  # of a prompt; they include a mark of reasoning, with white space, even if each has one character


class PromptFormat:
    """The text of a Hugging Face checkpoint.

    A message is {"role": "user" or another, "content": [{"type": "image"}, {"type": "text", "text": ...}]}.
    fingerprint: a name that depends on weights, float types and layers. vocabulary: the number of logits.
    processor: of a model that reads images; a rendered prompt of such a model gets the tokenizer's
    beginning-of-sequence token, which templates of text models write themselves.
    """

    fingerprint: str
    max_context: int
    vocabulary: int

    def __init__(self, config: Any, generation_config: Any, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))
        self.image_token_id: int | None = None
        self.image_token = ""
        self._image_text = ""  # in raw prompts
        self._can_see = processor is not None
        if processor is not None:
            self.image_token = processor.image_token
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self._image_text = self.image_token
            if hasattr(config, "vision_start_token_id"):  # Qwen's templates write marks around each image
                marks = [config.vision_start_token_id, self.image_token_id, config.vision_end_token_id]
                self._image_text = "".join(tokenizer.convert_ids_to_tokens(marks))
        self.template = ChatTemplate(processor or tokenizer, tokenizer, config.model_type, self.image_token)
        self._configured_eos = getattr(generation_config, "eos_token_id", None)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer, by the generation config and the tokenizer, without those that have no logit."""
        configured = self._configured_eos
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None and i < self.vocabulary)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        image_sizes: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the assistant's next answer.

        image_sizes: the number of tokens of each image, in order; each of its positions holds `image_token_id`.
        tools: the answer may call them; in OpenAI's form. variables: for the template.
        Raises InvalidRequest without a template, or if it refuses the messages; ContextTooLong.
        """
        text = self.template.render(self._as_template_expects(messages), tools, variables)
        return self._encode(text, image_sizes, adds_special=self._can_see)

    def style_after(self, ids: Sequence[int]) -> AnswerStyle:
        """Return the style of the answer to a rendered prompt. ids: its tokens."""
        style = self.template.style
        if style.thought is None:
            return style
        end = self.tokenizer.decode(ids[-END_TOKENS:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return style.after(end)

    def find_style(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> AnswerStyle:
        """Return the style of the answer to a conversation of any length. Raises as `ChatTemplate.render`."""
        return self.template.style.after(self.template.render(self._as_template_expects(messages), tools, variables))

    def encode_prompt(self, pieces: Sequence[str | None], image_sizes: Sequence[int]) -> list[int]:
        """Return the token ids of a raw prompt, with the tokenizer's prefix unless the prompt has it.

        pieces: its texts in order, None for each image; image_sizes: as for `render`.
        """
        text = "".join(self._image_text if piece is None else piece for piece in pieces)
        return self._encode(text, image_sizes, adds_special=True)

    def _encode(self, text: str, image_sizes: Sequence[int], *, adds_special: bool) -> list[int]:
        """Tokenize a text, which takes a second per megabyte. Raises ContextTooLong before, if that cannot fit.

        Raises InvalidRequest for a text without tokens, a token that the model does not have, and unless each image has
        a place.
        """
        if len(text) > self.max_context * self._max_token_chars:
            raise ContextTooLong(
                f"{PROMPT_TOO_LONG}: the conversation has {len(text)} characters and this model reads at most "
                f"{self.max_context} tokens; shorten it or open a new session"
            )
        bos = self.tokenizer.bos_token
        is_complete = bos is not None and text.startswith(bos)
        ids: list[int] = self.tokenizer(text, add_special_tokens=adds_special and not is_complete)["input_ids"]
        if not ids:  # nothing would precede the answer: the engine would read its first token from another row
            raise InvalidRequest("the prompt has no tokens: it is empty, or has only ignored characters")
        check_known(ids, self.vocabulary, self.tokenizer, self.image_token_id if image_sizes else None)
        if not image_sizes:
            return ids
        num_places = sum(token == self.image_token_id for token in ids)
        if num_places != len(image_sizes):
            raise InvalidRequest(
                f"the model's chat template has {num_places} places for {len(image_sizes)} images: ask about other "
                "images in another conversation, or correct the template"
            )
        sizes = iter(image_sizes)
        expanded: list[int] = []
        for token in ids:
            expanded.extend([token] * (next(sizes) if token == self.image_token_id else 1))
        return expanded

    def _as_template_expects(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Convert messages for the template; those of text models expect plain strings as content."""
        if self._can_see:
            return list(messages)
        return [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]

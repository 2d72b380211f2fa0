"""A causal language model as the engine sees it: render, embed, forward, logits."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from handlers.errors import ContextTooLong
from handlers.models.attention import RAGGED, PackedBatch, PackedStep
from handlers.models.chat_template import ChatTemplate
from handlers.models.fingerprint import fingerprint
from handlers.models.packed_linear import PackedLinear, can_pack, pack_linears, rows_are_independent

logger = logging.getLogger(__name__)
_LAYERS = {"full_attention", "sliding_attention"}  # the kinds that packed attention computes


class TextModel:
    """A Hugging Face causal LM. Only the engine's thread calls the tensor methods.

    A message is {"role": "user" or another, "content": [{"type": "image"}, {"type": "text", "text": ...}]}.
    """

    is_packed = True  # a step computes its sequences together
    image_token_id: int | None = None
    image_token: str = ""
    has_equal_images = False  # every image has the same number of tokens
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocabulary: int

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, tokenizer, model.config.model_type)
        self.decoder = self._find_decoder()
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(self.decoder.parameters()).dtype
        self.eos_token_ids = self._find_eos()
        self.fingerprint = fingerprint(model)
        self._prepare_decoder()
        self.max_context = min([self.max_context, *_constant_rope_lengths(model.config.get_text_config())])
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))

    def _find_decoder(self) -> Any:
        return self.model.model

    def _prepare_decoder(self) -> None:
        """Replace the decoder's attention and read its sizes. Raises NotImplementedError for other kinds of layers."""
        config = self.decoder.config
        others = set(getattr(config, "layer_types", None) or ()) - _LAYERS
        if others:
            raise NotImplementedError(f"layers of kind {', '.join(sorted(others))}")
        self.decoder.set_attn_implementation(RAGGED)
        self.max_context = config.max_position_embeddings
        self.num_layers = config.num_hidden_layers
        self.num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocabulary = config.vocab_size

    def pack_weights(self) -> None:
        """Pack the linear layers' weights if the device supports it. Call before the first step."""
        head = self.model.get_output_embeddings()
        if not can_pack(self.dtype, self.device):
            return
        pack_linears(self.decoder)
        if type(head) is torch.nn.Linear:
            self.model.set_output_embeddings(PackedLinear(head))
        if not rows_are_independent():
            logger.info("On this processor, answers in small batches may differ from others by float32's rounding.")

    def _find_eos(self) -> frozenset[int]:
        """Return the ids that end an answer, by the generation config and the tokenizer."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    def render(
        self, messages: Sequence[dict[str, Any]], image_sizes: Sequence[int], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the assistant's next answer.

        image_sizes: the number of tokens of each image, in order; each of its positions holds `image_token_id`.
        tools: that the answer may call, as OpenAI defines them.
        Raises InvalidRequest without a template, or if it refuses the messages; ContextTooLong.
        """
        text = self.template.render(self._as_template_expects(messages), tools)
        return self._encode(text, image_sizes, adds_special=self._adds_bos())

    def encode_prompt(self, pieces: Sequence[str | None], image_sizes: Sequence[int]) -> list[int]:
        """Return the token ids of a raw prompt, with the tokenizer's prefix unless the prompt has it.

        pieces: its texts in order, None for each image; image_sizes: as for `render`.
        """
        text = "".join(self.image_token if piece is None else piece for piece in pieces)
        return self._encode(text, image_sizes, adds_special=True)

    def _encode(self, text: str, image_sizes: Sequence[int], *, adds_special: bool) -> list[int]:
        """Tokenize a text, which takes a second per megabyte. Raises ContextTooLong before, if that cannot fit."""
        if len(text) > self.max_context * self._max_token_chars:
            raise ContextTooLong(
                f"the conversation has {len(text)} characters and this model reads at most {self.max_context} tokens; "
                "shorten it or open a new session"
            )
        bos = self.tokenizer.bos_token
        is_complete = bos is not None and text.startswith(bos)
        ids: list[int] = self.tokenizer(text, add_special_tokens=adds_special and not is_complete)["input_ids"]
        if not image_sizes:
            return ids
        sizes = iter(image_sizes)
        expanded: list[int] = []
        for token in ids:
            expanded.extend([token] * (next(sizes) if token == self.image_token_id else 1))
        return expanded

    def _adds_bos(self) -> bool:
        """Return whether a rendered prompt gets a beginning-of-sequence token; text models' templates write it."""
        return False

    def _as_template_expects(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Convert messages for the template; those of text models expect plain strings as content."""
        return [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]

    def preprocess(self, image: Image.Image) -> Any:
        """Return the pixel values of an RGB picture for `encode_image`, on the CPU: a Tensor or a Pixels."""
        raise NotImplementedError("this model reads no images")

    def encode_image(self, pixels: Any) -> Tensor:
        """Return (image tokens, hidden size). Runs once per image."""
        raise NotImplementedError("this model reads no images")

    def embed(self, ids: Tensor) -> Tensor:
        """Return (T, hidden size). ids: (T,) int64."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def forward(self, embeds: Tensor, positions: Tensor, batch: PackedBatch, last: Tensor) -> Tensor:
        """Compute one packed step and store the keys and values of its tokens.

        embeds: (T, hidden size), the parts' tokens one after the other; positions: (T,) int64 within each sequence.
        last: (number of parts,) int64, where in T each part ends.
        Returns logits, (number of parts, vocabulary) float32.
        """
        hidden = self.decoder(
            inputs_embeds=embeds[None],
            position_ids=positions[None],
            past_key_values=PackedStep(),
            use_cache=True,
            batch=batch,
        ).last_hidden_state[0]
        logits: Tensor = self.model.get_output_embeddings()(hidden[last])
        return logits.float()


def _constant_rope_lengths(config: Any) -> list[int]:
    """Return the lengths beyond which long rope changes the frequencies of stored keys, too.

    Dynamic rope changes them beyond max_position_embeddings, which is the longest context anyway.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]

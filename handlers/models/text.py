"""A causal language model as the engine sees it: embed, forward, logits."""

import hashlib
import logging
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from handlers.models.attention import RAGGED, PackedBatch, PackedStep
from handlers.models.fast_layers import PackedLinear, can_pack, fuse_norms, pack_linears, rows_are_independent
from handlers.models.lora import AdaptedLayers
from handlers.models.prompt_format import PromptFormat

logger = logging.getLogger(__name__)
_LAYERS = {"full_attention", "sliding_attention"}  # the kinds that packed attention computes
NUM_SAMPLES = 8  # numbers of each parameter


class TextModel(PromptFormat):
    """A Hugging Face causal LM. Only the engine's thread calls the tensor methods."""

    is_packed = True  # a step computes its sequences together
    has_equal_images = False  # every image has the same number of tokens
    image_side: int | None = None  # the preprocessor scales the shorter side of every image to this length
    num_layers: int
    num_kv_heads: int
    head_size: int

    def __init__(self, model: Any, tokenizer: Any, processor: Any = None) -> None:
        super().__init__(model.config, model.generation_config, tokenizer, processor)
        self.model = model
        self.decoder = self._find_decoder()
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(self.decoder.parameters()).dtype
        self.fingerprint = fingerprint(model)
        self.adapted: AdaptedLayers | None = None
        self._prepare_decoder()
        self.max_context = min([self.max_context, *_constant_rope_lengths(model.config.get_text_config())])

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

    def optimize(self) -> None:
        """Replace layers by faster ones that this device has. Call before the first step."""
        head = self.model.get_output_embeddings()
        if self.device.type == "cuda":
            fuse_norms(self.decoder, self.dtype)
        if not can_pack(self.dtype, self.device):
            return
        pack_linears(self.decoder)
        if type(head) is torch.nn.Linear:
            self.model.set_output_embeddings(PackedLinear(head))
        if not rows_are_independent():
            logger.info("On this processor, answers in small batches may differ from others by float32's rounding.")

    def accept_adapters(self, max_rank: int) -> None:
        """Let steps add adapters to the decoder's linear layers. Call after `optimize`. Raises SettingsError."""
        self.adapted = AdaptedLayers(self.decoder, max_rank)

    def preprocess(self, image: Image.Image) -> Any:
        """Return the pixel values of an RGB image for `encode_image`, on the CPU: a Tensor or a Pixels."""
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


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """Return a name of the model's kind, layers, float types and a sample of its weights: equal for equal models.

    Call this before the weights are packed.
    """
    digest = hashlib.blake2b(model.config.model_type.encode(), digest_size=16)
    samples = []
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        samples.append(parameter.reshape(-1)[:NUM_SAMPLES].float())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()

"""Models whose attention stays their own: transformers' forward pass, one sequence after the other.

The model gets a cache (transformers' Cache) that keeps nothing itself: it stores keys and values in the pool's blocks
and returns those of the sequence's earlier positions. Sessions, shared prefixes, eviction and budgets are therefore
the same as for packed steps.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from handlers.errors import SettingsError
from handlers.models.attention import PackedBatch, PackedShare
from handlers.models.text import TextModel

# Names of the longest context in configurations; alibi and recurrence have no limit, but were trained with one.
_CONTEXT = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "n_ctx")
DEFAULT_CONTEXT = 2048  # of a checkpoint that does not state one
MAX_STATED = 10_000_000  # tokenizers without a limit state 1e30


class PlainModel(TextModel):
    """A causal LM that runs as in transformers. A step computes its shares one by one."""

    is_packed = False

    def _find_decoder(self) -> Any:
        return self.model

    def _prepare_decoder(self) -> None:
        """Read the sizes of keys and values from a forward pass, since configurations name them differently."""
        options = inspect.signature(self.model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in options else {}
        seen = _Sizes()
        with torch.inference_mode():
            token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
            logits = self.model(input_ids=token, past_key_values=seen, use_cache=True).logits
        if not seen.sizes:
            raise SettingsError(
                f"models of type {self.model.config.model_type} are not supported: they keep no keys and values"
            )
        self.vocabulary = logits.shape[-1]
        self.num_layers = 1 + max(seen.sizes)
        self.num_kv_heads = max(heads for heads, _ in seen.sizes.values())
        self.head_size = max(size for _, size in seen.sizes.values())
        self.max_context = self._find_max_context()

    def _find_max_context(self) -> int:
        config = self.model.config.get_text_config()
        stated = [getattr(config, name, None) for name in _CONTEXT]
        stated.append(self.tokenizer.model_max_length)
        return next((n for n in stated if isinstance(n, int) and 0 < n <= MAX_STATED), DEFAULT_CONTEXT)

    def optimize(self) -> None:
        """Do nothing: the weights of other families lie in modules of their own."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return the ids: the model embeds them itself."""
        return ids

    def forward(self, embeds: Tensor, positions: Tensor, batch: PackedBatch, last: Tensor) -> Tensor:
        """Compute the shares of a step one by one. embeds: (T,) int64, the token ids."""
        lengths = [share.num_tokens for share in batch.shares]
        found = []
        for share, ids, slots in zip(batch.shares, embeds.split(lengths), batch.slots.split(lengths), strict=True):
            cache = _ShareCache(batch.storage, share, slots)
            logits = self.model(input_ids=ids[None], past_key_values=cache, use_cache=True, **self._options).logits
            found.append(logits[0, -1].float())
        return torch.stack(found)


class _StatelessCache(Cache):
    """A cache without layers. transformers' base class raises an error if the model needs a state in one."""

    def __init__(self, num_stored: int) -> None:
        super().__init__(layers=[])
        self._num_stored = num_stored
        self._num_new: dict[int, int] = {}  # by layer, once it has computed this step

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_stored + self._num_new.get(layer_idx, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0


class _Sizes(_StatelessCache):
    """Notes the number of heads, and the larger size of a key or value, by layer."""

    def __init__(self) -> None:
        super().__init__(0)
        self.sizes: dict[int, tuple[int, int]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        heads = max(key_states.shape[1], value_states.shape[1])
        self.sizes[layer_idx] = heads, max(key_states.shape[3], value_states.shape[3])
        self._num_new[layer_idx] = key_states.shape[2]
        return key_states, value_states


class _ShareCache(_StatelessCache):
    """The stored positions of one share of a step."""

    def __init__(self, storage: Tensor, share: PackedShare, slots: Tensor) -> None:
        super().__init__(share.length - share.num_tokens)
        self._storage = storage
        self._share = share
        self._slots = slots

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._num_new[layer_idx] = key_states.shape[2]
        return self._store(key_states, layer_idx, 0), self._store(value_states, layer_idx, 1)

    def _store(self, states: Tensor, layer: int, kind: int) -> Tensor:
        """Store (1, heads, tokens, size) in the slots; return all positions of the share."""
        heads, size = states.shape[1], states.shape[3]
        stored = self._storage[layer, kind, :heads, :, :size]
        stored.index_copy_(1, self._slots, states[0])
        context = self._share.context
        if isinstance(context, Tensor):
            return stored.index_select(1, context)[None]
        return context[2 * layer + kind][:, :heads, :, :size]

"""What the tasks on texts have in common: tokenizing one text, running several, padded, in one batch."""

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.errors import ContextTooLong
from handlers.many.compute import Row
from handlers.many.tasks.task import Input
from handlers.settings import TaskSettings

UNLIMITED = 1_000_000  # tokenizers that know no limit say a much larger number


class SharedTokenizer:
    """A tokenizer that several models use. Its truncation is a state of its own, so one thread uses it at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, *texts: str, **options: Any) -> Any:
        """transformers' BatchEncoding of one text or one pair."""
        with self._lock:
            return self.tokenizer(*texts, **options)


class TextTask:
    """A model that reads token ids, and its tokenizer."""

    def __init__(self, model: Any, tokenizer: SharedTokenizer, settings: TaskSettings, max_tokens: int = 0) -> None:
        """max_tokens: of one input, what the model can read if 0."""
        self.model = model
        self.shared = tokenizer
        self.tokenizer = tokenizer.tokenizer
        self.settings = settings
        self.max_tokens = max_tokens or find_max_tokens(model.config, self.tokenizer)
        self._read_by_model = set(inspect.signature(model.forward).parameters)
        known = {getattr(model.config, "pad_token_id", None), self.tokenizer.pad_token_id} - {None}
        # Some models look for the padding to find a text's end: where two do not agree what it is, nothing is padded.
        self._can_pad = len(known) == 1
        self._padding = {"input_ids": max(known, default=0), "attention_mask": 0, "token_type_ids": 0}

    def encode(self, *texts: str, is_truncated: bool = False, **options: Any) -> Any:
        """The encoding of a text or a pair. Raises ContextTooLong unless the end may be cut off."""
        if is_truncated:
            return self.shared.encode(*texts, truncation=True, max_length=self.max_tokens, **options)
        encoded = self.shared.encode(*texts, **options)
        if len(encoded["input_ids"]) > self.max_tokens:
            raise ContextTooLong(
                f"a text has {len(encoded['input_ids'])} tokens, and this model reads {self.max_tokens}: send less, or "
                'have its end cut off with the parameter "truncation": true'
            )
        return encoded

    def as_input(self, encoded: Any) -> Input:
        """What the model gets of an encoding."""
        own = {name: encoded[name] for name in self._padding if name in encoded and name in self._read_by_model}
        alone = None if self._can_pad else object()  # of a kind with nobody else
        return Input(own, len(own["input_ids"]), alone)

    def forward(self, rows: Sequence[Row]) -> Any:
        """The model's output for rows, padded at their ends."""
        size = max(row.size for row in rows)
        device = self.model.device
        batch = {
            name: torch.tensor([_pad(row.inputs[name], size, self._padding[name]) for row in rows], device=device)
            for name in rows[0].inputs
        }
        options = {"use_cache": False} if "use_cache" in self._read_by_model else {}
        return self.model(**batch, **options)

    def run(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Logits in float32, one tensor a row; if there are some for each token, only for its own."""
        logits = self.forward(rows).logits.float().cpu()
        if logits.dim() < 3:
            return list(logits)
        return [own[: row.size] for own, row in zip(logits, rows, strict=True)]


def find_max_tokens(config: Any, tokenizer: Any) -> int:
    """How long an input may be, special tokens included."""
    positions = getattr(config, "max_position_embeddings", None) or UNLIMITED
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "xlm-roberta-xl"):
        positions -= config.pad_token_id + 1  # they count from behind the padding's position
    own = tokenizer.model_max_length
    return int(min(positions, own if own < UNLIMITED else UNLIMITED))


def _pad(values: list[int], size: int, padding: int) -> list[int]:
    return values if len(values) == size else values + [padding] * (size - len(values))

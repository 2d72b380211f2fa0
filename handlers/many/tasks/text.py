"""The base of text tasks: reading, tokenizing, and running several texts in one padded batch."""

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.chat.checks import check_unicode
from handlers.errors import ContextTooLong, InvalidRequest
from handlers.many.compute import TaskRow
from handlers.many.request import TaskRequest, texts_of
from handlers.many.tasks.task import Input, TaskWork
from handlers.models.tokenizer import check_known
from handlers.settings.tasks import TaskSettings

UNLIMITED = 1_000_000  # tokenizers without a limit report a much larger number
# From one encoding and its output to one result.
ToAnswer = Callable[[str, Any, Tensor], Any]


class SharedTokenizer:
    """A tokenizer that several models use, one thread at a time, because its truncation is part of its state."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, *texts: str, **options: Any) -> Any:
        """Return transformers' BatchEncoding of one text or one pair. Raises InvalidRequest if it is not Unicode."""
        for text in texts:
            check_unicode(text, "a text", "inputs")
        with self._lock:
            return self.tokenizer(*texts, **options)


class TextTask:
    """A model that reads token ids, and its tokenizer."""

    def __init__(
        self,
        model: Any,
        tokenizer: SharedTokenizer,
        settings: TaskSettings,
        max_answer_bytes: int,
        max_tokens: int = 0,
    ) -> None:
        """max_tokens: limit of one input; 0 for the model's own."""
        self.model = model
        self.shared = tokenizer
        self.tokenizer = tokenizer.tokenizer
        self.settings = settings
        self._max_answer_bytes = max_answer_bytes
        self.max_tokens = max_tokens or find_max_tokens(model, self.tokenizer)
        self.num_tokens = getattr(model.config, "vocab_size", None) or math.inf
        self._read_by_model = set(inspect.signature(model.forward).parameters)
        known = {getattr(model.config, "pad_token_id", None), self.tokenizer.pad_token_id} - {None}
        # Some models find a text's end by its padding: if model and tokenizer disagree on it, nothing is padded.
        self._can_pad = len(known) == 1
        self._padding = {"input_ids": max(known, default=0), "attention_mask": 0, "token_type_ids": 0}

    def read_texts(
        self, request: TaskRequest, answer: ToAnswer, *, is_truncated: bool = False, **options: Any
    ) -> TaskWork:
        """Prepare a text or a list of texts; the reply has the answer of each, in the form of the request.

        is_truncated: the default of the parameter "truncation". options: for the tokenizer.
        """
        texts = texts_of(request.inputs, self.settings)
        is_truncated = request.get("truncation", is_truncated)
        has_parameter = request.form is None  # OpenAI's embeddings have no "truncation"
        encoded = [
            self.encode(text, is_truncated=is_truncated, has_parameter=has_parameter, **options) for text in texts
        ]

        def finish(outputs: Sequence[Tensor]) -> Any:
            found = [answer(*each) for each in zip(texts, encoded, outputs, strict=True)]
            return found if isinstance(request.inputs, list) else found[0]

        return TaskWork([self.as_input(own) for own in encoded], finish)

    def encode(self, *texts: str, is_truncated: bool = False, has_parameter: bool = True, **options: Any) -> Any:
        """Encode a text or a pair. Raises ContextTooLong for a text that is too long, unless it may be truncated.

        has_parameter: the request's form has the parameter "truncation".
        """
        if is_truncated:
            return self.shared.encode(*texts, truncation=True, max_length=self.max_tokens, **options)
        encoded = self.shared.encode(*texts, **options)
        if len(encoded["input_ids"]) > self.max_tokens:
            advice = "send less"
            if has_parameter:
                advice += ', or have its end cut off with the parameter "truncation": true'
            raise ContextTooLong(
                f"a text has {len(encoded['input_ids'])} tokens, and this model reads {self.max_tokens}: {advice}"
            )
        return encoded

    def check_answer(self, what: str, num_bytes: float, advice: str, param: str = "inputs") -> None:
        """Refuse an answer that is too large to send, before it is computed. Raises InvalidRequest.

        what: the answer's parts. num_bytes: an estimate of their size.
        """
        if num_bytes > self._max_answer_bytes:
            raise InvalidRequest(
                f"{what} take about {int(num_bytes)} bytes, and an answer may have {self._max_answer_bytes} "
                f"(handler.pump.max_response_bytes): {advice}",
                param=param,
            )

    def as_input(self, encoded: Any) -> Input:
        """Select what the model reads of an encoding. Raises InvalidRequest if it has no tokens, or unknown ones."""
        if not encoded["input_ids"]:
            raise InvalidRequest("a text has no tokens: it is empty, or has only ignored characters", param="inputs")
        check_known(encoded["input_ids"], self.num_tokens, self.tokenizer)
        own = {name: encoded[name] for name in self._padding if name in encoded and name in self._read_by_model}
        alone = None if self._can_pad else object()  # a kind that no other row shares
        return Input(own, len(own["input_ids"]), alone)

    def forward(self, rows: Sequence[TaskRow]) -> Any:
        """Return the model's output for rows, padded at their ends."""
        size = max(row.size for row in rows)
        batch = {
            name: torch.tensor(
                [row.inputs[name] + [padding] * (size - row.size) for row in rows], device=self.model.device
            )
            for name, padding in self._padding.items()
            if name in rows[0].inputs
        }
        options = {"use_cache": False} if "use_cache" in self._read_by_model else {}
        return self.model(**batch, **options)

    def run(self, rows: Sequence[TaskRow]) -> Sequence[Tensor]:
        """Return float32 logits, one tensor per row; logits per token without the padding."""
        logits = self.forward(rows).logits.float().cpu()
        if logits.dim() < 3:
            return list(logits)
        return [own[: row.size] for own, row in zip(logits, rows, strict=True)]


def find_max_tokens(model: Any, tokenizer: Any) -> int:
    """Return the longest input in tokens, special ones included."""
    limits = [getattr(model.config, "max_position_embeddings", None) or UNLIMITED, tokenizer.model_max_length]
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if padding is not None and name.endswith("position_embeddings"):
            limits.append(len(module.weight) - padding - 1)  # positions begin after the padding's, as in RoBERTa
    return int(min(*limits, UNLIMITED))

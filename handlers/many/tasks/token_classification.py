"""Texts to their tokens' or entities' labels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy

from handlers.errors import InvalidRequest
from handlers.many.request import TaskRequest, texts_of
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.reply import Reply

PARAMETERS: dict[str, type | tuple[type, ...]] = {"aggregation_strategy": str, "ignore_labels": list}
PARAMETERS |= {"truncation": bool}


class TokenClassification(TextTask):
    """{"inputs": text | a list of texts}. Answers a list of entities for each text, in the pipeline's form.

    How tokens are joined to entities is left to transformers' own pipeline, which has many rules for it.
    """

    name = "token-classification"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pipeline = TokenClassificationPipeline(
            model=self.model, tokenizer=self.tokenizer, device=self.model.device
        )  # without a device it would choose one and move the model there

    def read(self, request: TaskRequest, reply: Reply) -> TaskWork:
        request.check_parameters(PARAMETERS)
        strategy = self._choose_strategy(request)
        ignored = request.get("ignore_labels", ["O"])
        texts = texts_of(request.inputs, self.settings.max_inputs, self.settings.max_chars)
        is_truncated = request.get("truncation", True)  # as the pipeline does
        options = {"return_special_tokens_mask": True, "return_offsets_mapping": self.tokenizer.is_fast}
        encoded = [self.encode(text, is_truncated=is_truncated, **options) for text in texts]

        def finish(outputs: Sequence[Tensor]) -> Any:
            found = [
                self._entities(text, own, logits, strategy, ignored)
                for text, own, logits in zip(texts, encoded, outputs, strict=True)
            ]
            return found if isinstance(request.inputs, list) else found[0]

        return TaskWork([self.as_input(own) for own in encoded], finish)

    def _entities(self, text: str, encoded: Any, logits: Tensor, strategy: Any, ignored: list[str]) -> Any:
        offsets = encoded.get("offset_mapping")
        outputs = {
            "logits": logits[None],
            "sentence": text,
            "input_ids": torch.tensor([encoded["input_ids"]]),
            "offset_mapping": None if offsets is None else torch.tensor([offsets]),
            "special_tokens_mask": torch.tensor([encoded["special_tokens_mask"]]),
        }
        found = self._pipeline.postprocess([outputs], aggregation_strategy=strategy, ignore_labels=ignored)
        return [{**entity, "score": float(entity["score"])} for entity in found]

    def _choose_strategy(self, request: TaskRequest) -> AggregationStrategy:
        wanted = request.get("aggregation_strategy", "none").upper()
        if wanted not in AggregationStrategy.__members__:
            known = ", ".join(name.lower() for name in AggregationStrategy.__members__)
            raise InvalidRequest(f"'aggregation_strategy' must be one of {known}", param="aggregation_strategy")
        if wanted not in ("NONE", "SIMPLE") and not self.tokenizer.is_fast:
            raise InvalidRequest("this model's tokenizer knows no words: use 'simple'", param="aggregation_strategy")
        return AggregationStrategy[wanted]

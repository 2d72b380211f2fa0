"""Token classification: texts to the labels of their tokens or entities."""

from typing import Any

import torch
from torch import Tensor
from transformers import TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy

from handlers.errors import InvalidRequest
from handlers.many.request import ParameterTypes, TaskRequest
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.requests.reply import PendingReply

PARAMETERS: ParameterTypes = {"aggregation_strategy": str, "ignore_labels": list, "truncation": bool}
TOKEN_BYTES = 90  # of a token's label in JSON


class TokenClassification(TextTask):
    """{"inputs": text | a list of texts}. Answers a list of entities for each text, in the pipeline's form.

    transformers' pipeline joins the tokens to entities.
    """

    name = "token-classification"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pipeline = TokenClassificationPipeline(
            model=self.model, tokenizer=self.tokenizer, device=self.model.device
        )  # without a device, the pipeline would choose one and move the model

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        request.check_parameters(PARAMETERS)
        strategy = self._choose_strategy(request)
        # A set, because the pipeline looks for each token's label in it.
        ignored = {label for label in request.get("ignore_labels", ["O"]) if isinstance(label, str | None)}

        def answer(text: str, encoded: Any, logits: Tensor) -> Any:
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

        options = {"return_special_tokens_mask": True, "return_offsets_mapping": self.tokenizer.is_fast}
        work = self.read_texts(request, answer, is_truncated=True, **options)
        if strategy is AggregationStrategy.NONE and not any(
            one in ignored for one in self.model.config.id2label.values()
        ):
            num_special = self.tokenizer.num_special_tokens_to_add()
            number = sum(each.size - num_special for each in work.inputs)
            self.check_answer(
                f"the labels of {number} tokens", number * TOKEN_BYTES, "send fewer texts at once, or ignore labels"
            )
        return work

    def _choose_strategy(self, request: TaskRequest) -> AggregationStrategy:
        wanted = request.get("aggregation_strategy", "none").upper()
        if wanted not in AggregationStrategy.__members__:
            known = ", ".join(name.lower() for name in AggregationStrategy.__members__)
            raise InvalidRequest(f"'aggregation_strategy' must be one of {known}", param="aggregation_strategy")
        if wanted not in ("NONE", "SIMPLE") and not self.tokenizer.is_fast:
            raise InvalidRequest("the tokenizer does not mark words: use 'simple'", param="aggregation_strategy")
        return AggregationStrategy[wanted]

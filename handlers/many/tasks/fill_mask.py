"""Fill-mask: texts with gaps to the most likely tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.chat.checks import check_unicode
from handlers.errors import InvalidRequest, ModelBroken
from handlers.many.request import Parameters, TaskRequest, check_text, texts_of
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.reply import PendingReply

PARAMETERS: Parameters = {"top_k": int, "targets": (str, list), "truncation": bool}
DEFAULT_TOP_K = 5


class FillMask(TextTask):
    """{"inputs": text | a list of texts}, each with the tokenizer's mask token.

    Answers, for each gap, the best tokens: {"score", "token", "token_str", "sequence"}.
    """

    name = "fill-mask"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.tokenizer.mask_token_id is None:
            raise ModelBroken("the model's tokenizer has no mask token, which fill-mask needs")

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        request.check_parameters(PARAMETERS)
        top_k = request.top_k(DEFAULT_TOP_K) or DEFAULT_TOP_K
        targets = self._targets(request)
        texts = texts_of(request.inputs, self.settings)
        is_truncated = request.get("truncation", False)
        encoded = [self.encode(text, is_truncated=is_truncated) for text in texts]
        for own in encoded:
            if self.tokenizer.mask_token_id not in own["input_ids"]:
                raise InvalidRequest(
                    f"a text has no {self.tokenizer.mask_token} where a word is wanted", param="inputs"
                )

        def finish(outputs: Sequence[Tensor]) -> Any:
            pairs = zip(encoded, outputs, strict=True)
            found = [self._fill(own["input_ids"], logits, top_k, targets) for own, logits in pairs]
            return found if len(found) > 1 else found[0]  # as the pipeline, also for a list of one text

        return TaskWork([self.as_input(own) for own in encoded], finish)

    def _targets(self, request: TaskRequest) -> list[int]:
        """Return the ids of the requested tokens, empty for all."""
        wanted = request.get("targets", [])
        words = [wanted] if isinstance(wanted, str) else wanted
        ids = set()
        for word in words:
            check_text(word, self.settings.max_chars, "'targets'", "targets")
            check_unicode(word, "'targets'", "targets")
            known = self.tokenizer.convert_tokens_to_ids(word)
            if known is None or known == self.tokenizer.unk_token_id:
                pieces = self.shared.encode(word, add_special_tokens=False)["input_ids"]
                known = pieces[0] if pieces else None
            if known is not None:
                ids.add(known)
        if words and not ids:
            raise InvalidRequest("none of 'targets' is in this model's vocabulary", param="targets")
        return sorted(ids)

    def _fill(self, ids: list[int], logits: Tensor, top_k: int, targets: list[int]) -> Any:
        gaps = [i for i, token in enumerate(ids) if token == self.tokenizer.mask_token_id]
        choices = torch.tensor(targets) if targets else torch.arange(logits.shape[-1])
        found = []
        for gap in gaps:
            scores, order = logits[gap].softmax(-1)[choices].topk(min(top_k, len(choices)))
            row = []
            for score, token in zip(scores.tolist(), choices[order].tolist(), strict=True):
                filled = [*ids[:gap], token, *ids[gap + 1 :]]
                filled = [i for i in filled if i != self.tokenizer.pad_token_id]
                # With several gaps, the mask tokens of the others stay visible, and so do the special tokens.
                sequence = self.tokenizer.decode(filled, skip_special_tokens=len(gaps) == 1)
                word = self.tokenizer.decode([token])
                row.append({"score": score, "token": token, "token_str": word, "sequence": sequence})
            found.append(row)
        return found if len(found) > 1 else found[0]

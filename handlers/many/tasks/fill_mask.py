"""Fill-mask: texts with gaps to the most likely tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.chat.checks import check_unicode
from handlers.errors import InvalidRequest, ModelBroken
from handlers.many.compute import TaskRow
from handlers.many.request import ParameterTypes, TaskRequest, check_text, texts_of
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.models.tokenizer import check_known
from handlers.requests.reply import PendingReply

PARAMETERS: ParameterTypes = {"top_k": int, "targets": (str, list), "truncation": bool}
DEFAULT_TOP_K = 5
RESULT_BYTES = 100  # of a result in JSON, without its text


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
        top_k = request.positive("top_k", DEFAULT_TOP_K)
        targets = self._targets(request)
        texts = texts_of(request.inputs, self.settings)
        is_truncated = request.get("truncation", False)
        encoded = [self.encode(text, is_truncated=is_truncated) for text in texts]
        for own in encoded:
            if self.tokenizer.mask_token_id not in own["input_ids"]:
                raise InvalidRequest(
                    f"a text has no {self.tokenizer.mask_token} where a word is wanted", param="inputs"
                )
        self._check_size(encoded, min(top_k, len(targets) or self.model.config.vocab_size))

        def finish(outputs: Sequence[Tensor]) -> Any:
            pairs = zip(encoded, outputs, strict=True)
            found = [self._fill(own["input_ids"], logits, top_k, targets) for own, logits in pairs]
            return found if len(found) > 1 else found[0]  # as the pipeline, also for a list of one text

        return TaskWork([self.as_input(own) for own in encoded], finish)

    def _check_size(self, encoded: Sequence[Any], num_results: int) -> None:
        """Raise InvalidRequest if the results of all gaps, each with its text, are too large to send."""
        num_gaps = num_bytes = 0
        for own in encoded:
            number = own["input_ids"].count(self.tokenizer.mask_token_id)
            num_gaps += number
            num_bytes += number * num_results * (RESULT_BYTES + len(self.tokenizer.decode(own["input_ids"])))
        what = f"{num_results} results for each of {num_gaps} gaps"
        self.check_answer(what, num_bytes, "send fewer texts at once, or a smaller 'top_k'")

    def run(self, rows: Sequence[TaskRow]) -> Sequence[Tensor]:
        """Return float32 logits of the gaps alone, (gaps, vocabulary) per row: whole texts take gigabytes."""
        logits = self.forward(rows).logits
        gaps = [torch.tensor(row.inputs["input_ids"]) == self.tokenizer.mask_token_id for row in rows]
        return [own[: row.size][at].float().cpu() for own, at, row in zip(logits, gaps, rows, strict=True)]

    def _targets(self, request: TaskRequest) -> list[int]:
        """Return the ids of the requested tokens, empty for all."""
        wanted = request.get("targets", [])
        words = [wanted] if isinstance(wanted, str) else wanted
        if len(words) > self.num_tokens:  # each of them is tokenized
            message = f"'targets' has {len(words)} words, and this model's vocabulary {self.num_tokens}"
            raise InvalidRequest(message, param="targets")
        ids = set()
        for word in words:
            check_text(word, self.settings.max_chars, "'targets'", "targets")
            check_unicode(word, "'targets'", "targets")
            known = self.tokenizer.convert_tokens_to_ids(word)
            if known is None or known == self.tokenizer.unk_token_id:
                pieces = self.shared.encode(word, add_special_tokens=False)["input_ids"]
                known = pieces[0] if pieces else None
            if known is not None:
                check_known([known], self.num_tokens, self.tokenizer)
                ids.add(known)
        if words and not ids:
            raise InvalidRequest("none of 'targets' is in this model's vocabulary", param="targets")
        return sorted(ids)

    def _fill(self, ids: list[int], logits: Tensor, top_k: int, targets: list[int]) -> Any:
        gaps = [i for i, token in enumerate(ids) if token == self.tokenizer.mask_token_id]
        choices = torch.tensor(targets) if targets else torch.arange(logits.shape[-1])
        found = []
        for gap, own in zip(gaps, logits, strict=True):
            scores, order = own.softmax(-1)[choices].topk(min(top_k, len(choices)))
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

"""Question answering: a question and a text to the part of the text that answers it.

Follows transformers' QuestionAnsweringPipeline, which version 5 has removed: a long text is read in overlapping pieces,
and the best part of all pieces is the answer.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.errors import ContextTooLong, InvalidRequest, ModelBroken
from handlers.many.compute import TaskRow
from handlers.many.request import ParameterTypes, TaskRequest, check_text, text_inputs
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.requests.reply import PendingReply

PARAMETERS: ParameterTypes = {
    **dict.fromkeys(("top_k", "doc_stride", "max_answer_len", "max_seq_len", "max_question_len"), int),
    **dict.fromkeys(("handle_impossible_answer", "align_to_words"), bool),
}
MAX_PIECE = 384  # tokens, unless the request says otherwise
MAX_QUESTION = 64
MAX_ANSWER = 15
RESULT_BYTES = 100  # of a result in JSON


class QuestionAnswering(TextTask):
    """{"inputs": {"question", "context"} | a list of those}. Answers {"score", "start", "end", "answer"} for each."""

    name = "question-answering"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.tokenizer.is_fast:
            raise ModelBroken("question-answering needs a tokenizer.json, which says where in the text tokens are")

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        request.check_parameters(PARAMETERS)
        asked = text_inputs(request.inputs, self.settings)
        for item in asked:
            self._check_item(item)
        top_k, longest = request.positive("top_k", 1), request.positive("max_answer_len", MAX_ANSWER)
        encoded, num_pieces, num_results = [], 0, 0
        for item in asked:
            size, stride, num_new = self._plan(item, request)
            num_pieces += num_new
            num_results += num_new * min(top_k, size * min(size, longest))
            if num_pieces > self.settings.max_inputs:
                raise ContextTooLong(
                    f"the texts are at least {num_pieces} pieces, and a request may have {self.settings.max_inputs}: "
                    "send less, or use a smaller 'doc_stride' or a larger 'max_seq_len'"
                )
            encoded.append(self._encode(item, size, stride))
        what = f"{num_results} results of {num_pieces} pieces of text"
        self.check_answer(what, num_results * RESULT_BYTES, "send fewer or shorter texts at once, or a smaller 'top_k'")
        inputs = [self.as_input(_piece(own, i)) for own in encoded for i in range(len(own["input_ids"]))]

        def finish(outputs: Sequence[Tensor]) -> Any:
            answers, at = [], 0
            for item, own in zip(asked, encoded, strict=True):
                number = len(own["input_ids"])
                answers.append(_answer(item["context"], own, outputs[at : at + number], request))
                at += number
            return answers if isinstance(request.inputs, list) else answers[0]

        return TaskWork(inputs, finish)

    def _check_item(self, item: Any) -> None:
        if not isinstance(item, dict) or item.keys() != {"question", "context"}:
            raise InvalidRequest("'inputs' must be an object with 'question' and 'context'", param="inputs")
        for text in item.values():
            check_text(text, self.settings.max_chars, "'question' and 'context'")
            if not text.strip():
                raise InvalidRequest("'question' and 'context' must not be empty", param="inputs")

    def _plan(self, item: dict[str, str], request: TaskRequest) -> tuple[int, int, int]:
        """Return the tokens of a piece, how many of them the next piece repeats, and about how many pieces there are.

        With a large "doc_stride", each token of the text begins a piece.
        """
        size = min(request.positive("max_seq_len", MAX_PIECE), self.max_tokens)
        question = self.shared.encode(item["question"], add_special_tokens=False)["input_ids"]
        if len(question) > min(request.positive("max_question_len", MAX_QUESTION), size // 2):
            raise ContextTooLong(f"the question has {len(question)} tokens, too many for this model; shorten it")
        room = size - len(question) - self.tokenizer.num_special_tokens_to_add(pair=True)
        if room < 1:
            raise ContextTooLong("'max_seq_len' leaves no room for the text")
        stride = min(request.positive("doc_stride", min(size // 2, 128)), room - 1)
        text = self.shared.encode(item["context"], add_special_tokens=False)["input_ids"]
        return size, stride, 1 + max(0, math.ceil((len(text) - room) / (room - stride)))

    def _encode(self, item: dict[str, str], size: int, stride: int) -> Any:
        """Encode the pieces of the text, each after the question."""
        return self.shared.encode(
            item["question"],
            item["context"],
            truncation="only_second",
            max_length=size,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )

    def run(self, rows: Sequence[TaskRow]) -> Sequence[Tensor]:
        """Return (2, tokens) per row: the logits of an answer's begin and end at each token."""
        found = self.forward(rows)
        logits = torch.stack([found.start_logits, found.end_logits], 1).float().cpu()
        return [own[:, : row.size] for own, row in zip(logits, rows, strict=True)]


def _piece(encoded: Any, index: int) -> dict[str, list[int]]:
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: encoded[name][index] for name in names if name in encoded}


def _answer(context: str, encoded: Any, outputs: Sequence[Tensor], request: TaskRequest) -> Any:
    top_k = request.positive("top_k", 1)
    longest = request.positive("max_answer_len", MAX_ANSWER)
    can_align = request.get("align_to_words", True)
    found: dict[tuple[int, int], float] = {}
    nothing = 1.0
    for index, logits in enumerate(outputs):
        spans, of_nothing = _best_spans(logits, encoded.sequence_ids(index), top_k, longest)
        nothing = min(nothing, of_nothing)
        for score, first, last in spans:
            span = _characters(encoded, index, first, last, can_align)
            found[span] = max(found.get(span, 0.0), score)
    answers: list[dict[str, Any]] = [
        {"score": score, "start": start, "end": end, "answer": context[start:end]}
        for (start, end), score in found.items()
    ]
    if request.get("handle_impossible_answer", False):
        answers.append({"score": nothing, "start": 0, "end": 0, "answer": ""})
    best = sorted(answers, key=lambda answer: -answer["score"])[:top_k]
    if top_k > 1:
        return best
    return best[0] if best else {"score": 0.0, "start": 0, "end": 0, "answer": ""}


def _best_spans(
    logits: Tensor, sequence_ids: Sequence[int | None], top_k: int, longest: int
) -> tuple[list[tuple[float, int, int]], float]:
    """Return the best answers in a piece, each with its score and its first and last token; and the score of none.

    sequence_ids: of each token, 1 in the text. longest: tokens of an answer.
    """
    is_context = torch.tensor([s == 1 for s in sequence_ids])
    may_be = is_context.clone()
    may_be[0] = True  # the first token stands for "no answer"
    starts, ends = logits.masked_fill(~may_be, -10_000.0).softmax(-1)
    length = min(longest, len(starts))
    padded = torch.nn.functional.pad(ends * is_context, (0, length - 1))
    # By the first token and the number of others: all pairs of tokens would take much more memory.
    spans = (starts * is_context)[:, None] * padded.unfold(0, length, 1)
    scores, places = spans.flatten().topk(min(top_k, spans.numel()))
    best = []
    for score, place in zip(scores.tolist(), places.tolist(), strict=True):
        if score > 0:
            first, others = divmod(place, length)
            best.append((score, first, first + others))
    return best, float(starts[0] * ends[0])


def _characters(encoded: Any, index: int, first: int, last: int, can_align: bool) -> tuple[int, int]:
    """Return where an answer begins and ends in the text, extended to whole words."""
    offsets = encoded["offset_mapping"][index]
    start, end = offsets[first][0], offsets[last][1]
    words = encoded.word_ids(index)
    if can_align and words[first] is not None and words[last] is not None:
        start = min(start, encoded.word_to_chars(index, words[first], sequence_index=1)[0])
        end = max(end, encoded.word_to_chars(index, words[last], sequence_index=1)[1])
    return int(start), int(end)

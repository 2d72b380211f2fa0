"""Text classification: texts, or pairs of texts, to labels with scores."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from handlers.errors import InvalidRequest
from handlers.many.request import TaskRequest, check_text, text_inputs
from handlers.many.tasks.scores import choose_function, label_scores
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.requests.reply import PendingReply

PARAMETERS = {"top_k": int, "function_to_apply": str, "truncation": bool, "return_all_scores": bool}


class TextClassification(TextTask):
    """{"inputs": text | {"text", "text_pair"} | a list of those}.

    Answers [{"label", "score"}, ...], the best for each input; with `top_k` a list of the best for each input.
    """

    name = "text-classification"

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        request.check_parameters(PARAMETERS)
        inputs = text_inputs(request.inputs, self.settings)
        is_truncated = request.get("truncation", False)
        rows = [self.as_input(self.encode(*self._texts(each), is_truncated=is_truncated)) for each in inputs]
        config = self.model.config
        function = choose_function(request, config)
        are_all = request.get("return_all_scores", False) or "top_k" in request.parameters
        top_k = request.top_k(None)

        def finish(outputs: Sequence[Tensor]) -> Any:
            scored = [label_scores(logits, config, function) for logits in outputs]
            if not are_all:
                return [labels[0] for labels in scored]
            best = [labels[:top_k] for labels in scored]
            return best if isinstance(request.inputs, list) else best[0]

        return TaskWork(rows, finish)

    def _texts(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, dict):
            check_text(value, self.settings.max_chars)
            return (value,)
        if not {"text"} <= value.keys() <= {"text", "text_pair"}:
            raise InvalidRequest("an input that is an object has 'text' and perhaps 'text_pair'", param="inputs")
        for text in value.values():
            check_text(text, self.settings.max_chars, "'text' and 'text_pair'")
        return tuple(value[name] for name in ("text", "text_pair") if name in value)

"""Texts to a vector for each of their tokens."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from handlers.many.compute import Row
from handlers.many.request import TaskRequest, texts_of
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.reply import Reply


class FeatureExtraction(TextTask):
    """{"inputs": text | a list of texts}. Answers (1, tokens, width) for each text, as the pipeline does."""

    name = "feature-extraction"

    def read(self, request: TaskRequest, reply: Reply) -> TaskWork:
        request.check_parameters({"truncation": bool})
        texts = texts_of(request.inputs, self.settings.max_inputs, self.settings.max_chars)
        is_truncated = request.get("truncation", False)

        def finish(outputs: Sequence[Tensor]) -> Any:
            found = [[vectors.tolist()] for vectors in outputs]
            return found if isinstance(request.inputs, list) else found[0]

        return TaskWork([self.as_input(self.encode(text, is_truncated=is_truncated)) for text in texts], finish)

    def run(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """(tokens, width) a row."""
        hidden = self.forward(rows).last_hidden_state.float().cpu()
        return [own[: row.size] for own, row in zip(hidden, rows, strict=True)]

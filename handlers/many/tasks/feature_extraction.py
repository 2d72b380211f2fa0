"""Feature extraction: texts to a vector for each of their tokens."""

from collections.abc import Sequence

from torch import Tensor

from handlers.many.compute import TaskRow
from handlers.many.request import NUMBER_BYTES, ParameterTypes, TaskRequest
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.requests.reply import PendingReply

PARAMETERS: ParameterTypes = {"truncation": bool}


class FeatureExtraction(TextTask):
    """{"inputs": text | a list of texts}. Answers (1, tokens, width) for each text, as the pipeline does."""

    name = "feature-extraction"

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        request.check_parameters(PARAMETERS)
        work = self.read_texts(request, lambda text, encoded, vectors: [vectors.tolist()])
        number, width = sum(each.size for each in work.inputs), self.model.config.hidden_size
        what = f"the {number} tokens' vectors of {width} numbers"
        self.check_answer(what, number * width * NUMBER_BYTES, "send fewer or shorter texts at once")
        return work

    def run(self, rows: Sequence[TaskRow]) -> Sequence[Tensor]:
        """Return (tokens, width) per row."""
        hidden = self.forward(rows).last_hidden_state.float().cpu()
        return [own[: row.size] for own, row in zip(hidden, rows, strict=True)]

"""Text classification: texts, or pairs of texts, to labels with scores."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from handlers.errors import InvalidRequest, ModelBroken
from handlers.many.folder import CONFIG
from handlers.many.request import ParameterTypes, TaskRequest, check_text, text_inputs
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import TextTask
from handlers.requests.reply import PendingReply

PARAMETERS: ParameterTypes = {"top_k": int, "function_to_apply": str, "truncation": bool, "return_all_scores": bool}
RESULT_BYTES = 40  # of a result in JSON, at least
FUNCTIONS = ("sigmoid", "softmax", "none")


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
        top_k = request.positive("top_k", None)
        num_labels = min(top_k or config.num_labels, config.num_labels) if are_all else 1
        what = f"{num_labels} labels of each of {len(rows)} texts"
        self.check_answer(what, len(rows) * num_labels * RESULT_BYTES, "send fewer texts at once, or a smaller 'top_k'")

        def finish(outputs: Sequence[Tensor]) -> Any:
            best = [label_scores(logits, config, function)[:num_labels] for logits in outputs]
            if not are_all:
                return [labels[0] for labels in best]
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


def check_labels(config: Any) -> None:
    """Raise ModelBroken unless each output has a label; transformers' pipelines fail for one without."""
    if any(index not in config.id2label for index in range(config.num_labels)):
        raise ModelBroken(f"'id2label' in {CONFIG} must name the labels 0 to {config.num_labels - 1}")


def choose_function(request: TaskRequest, config: Any) -> str:
    """Return the function from logits to scores: the request's, else the one of the model's training.

    Follows transformers' TextClassificationPipeline. Raises InvalidRequest.
    """
    wanted = request.get("function_to_apply", None)
    if wanted is not None:
        if wanted.lower() not in FUNCTIONS:
            raise InvalidRequest(
                f"'function_to_apply' must be one of {', '.join(FUNCTIONS)}", param="function_to_apply"
            )
        return str(wanted.lower())
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def label_scores(logits: Tensor, config: Any, function: str) -> list[dict[str, Any]]:
    """Return every label with its score, best first, in the form of transformers' pipelines. logits: (labels,)."""
    if function == "softmax":
        logits = logits.softmax(-1)
    elif function == "sigmoid":
        logits = logits.sigmoid()
    found = [{"label": config.id2label[i], "score": score} for i, score in enumerate(logits.tolist())]
    return sorted(found, key=lambda item: -item["score"])

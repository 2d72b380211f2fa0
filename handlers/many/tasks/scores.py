"""Labels with scores from logits, in the form of transformers' pipelines."""

from typing import Any

from torch import Tensor

from handlers.errors import InvalidRequest, ModelBroken
from handlers.many.folder import CONFIG
from handlers.many.request import TaskRequest

FUNCTIONS = ("sigmoid", "softmax", "none")


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
    """Return every label with its score, best first. logits: (labels,)."""
    if function == "softmax":
        logits = logits.softmax(-1)
    elif function == "sigmoid":
        logits = logits.sigmoid()
    found = [{"label": config.id2label[i], "score": score} for i, score in enumerate(logits.tolist())]
    return sorted(found, key=lambda item: -item["score"])

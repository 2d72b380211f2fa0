"""Chooses the task of a model, and transformers' class for it: as named, else by its files and its architecture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from handlers.errors import ModelBroken
from handlers.many.folder import CONFIG, OWN_CONFIG, read_own_config
from handlers.many.openai_bodies import TEXT_GENERATION
from handlers.many.tasks.embeddings import MODULES, Embeddings
from handlers.many.tasks.feature_extraction import FeatureExtraction
from handlers.many.tasks.fill_mask import FillMask
from handlers.many.tasks.image_classification import ImageClassification
from handlers.many.tasks.question_answering import QuestionAnswering
from handlers.many.tasks.text_classification import TextClassification
from handlers.many.tasks.token_classification import TokenClassification

_VARIABLE = "HF_TASK"
# transformers' class for the head of each task.
_HEADS: dict[str, Any] = {
    TextClassification.name: transformers.AutoModelForSequenceClassification,
    TokenClassification.name: transformers.AutoModelForTokenClassification,
    FillMask.name: transformers.AutoModelForMaskedLM,
    QuestionAnswering.name: transformers.AutoModelForQuestionAnswering,
    ImageClassification.name: transformers.AutoModelForImageClassification,
    Embeddings.name: transformers.AutoModel,
    FeatureExtraction.name: transformers.AutoModel,
    TEXT_GENERATION: transformers.AutoModelForCausalLM,
}
_ENDINGS = {
    "ForSequenceClassification": TextClassification.name,
    "ForTokenClassification": TokenClassification.name,
    "ForMaskedLM": FillMask.name,
    "ForQuestionAnswering": QuestionAnswering.name,
    "ForImageClassification": ImageClassification.name,
    "ForCausalLM": TEXT_GENERATION,
    "LMHeadModel": TEXT_GENERATION,
    "ForConditionalGeneration": TEXT_GENERATION,
    "Model": FeatureExtraction.name,
}
# Other names of the tasks in HF_TASK.
_ALIASES = {
    "sentiment-analysis": TextClassification.name,
    "ner": TokenClassification.name,
    "sentence-similarity": Embeddings.name,
    "text-embedding": Embeddings.name,
    "image-text-to-text": TEXT_GENERATION,
}


def choose_task(folder: Path, config: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return the task that torchmoor.json in the folder names, else HF_TASK, else the one of its files.

    Raises ModelBroken if none of them names a task.
    """
    named = read_own_config(folder).get("task") or environ.get(_VARIABLE)
    if named is not None:
        task = _ALIASES.get(str(named), str(named))
        if task not in _HEADS:
            raise ModelBroken(f"there is no task {str(named)[:100]!r}; the tasks are {', '.join(_HEADS)}")
        return task
    if (folder / MODULES).is_file():
        return Embeddings.name
    architecture = _first_architecture(config)
    if not architecture:
        raise ModelBroken(f"{CONFIG} names no architectures: say what the model does in {OWN_CONFIG}, " + _example())
    for ending, task in _ENDINGS.items():
        if architecture.endswith(ending):
            return task
    raise ModelBroken(
        f"models of architecture {architecture[:100]} have no task here: name one in {OWN_CONFIG}, " + _example()
    )


def choose_head(task: str, config: Mapping[str, Any]) -> Any:
    """Return transformers' class for a task of this model."""
    head = _HEADS[task]
    if head is transformers.AutoModel and _first_architecture(config).endswith("EncoderModel"):
        return transformers.AutoModelForTextEncoding  # T5's AutoModel has a decoder, too
    return head


def _first_architecture(config: Mapping[str, Any]) -> str:
    """Return the class that config.json names first; empty if it names none."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _example() -> str:
    return f'{{"task": "{TextClassification.name}"}}, of {", ".join(_HEADS)}'

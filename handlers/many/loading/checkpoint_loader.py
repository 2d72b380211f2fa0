"""Loads a model's folder: chooses its task and transformers' class for it, and makes the parts of the task."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoImageProcessor

from handlers.chat.images.loader import ImageLoader
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.errors import ModelBroken, SettingsError
from handlers.many.compute import Compute, TaskRow
from handlers.many.folder import CONFIG, OWN_CONFIG, read_json, read_own_config
from handlers.many.loading.chat_model import ChatModel
from handlers.many.loading.shared import SharedParts, digest
from handlers.many.loading.task_model import TaskModel
from handlers.many.loading.tensor_placement import Assembled
from handlers.many.loading.transformers_loading import load_model
from handlers.many.model import AnsweringModel, LoadProgress
from handlers.many.openai_bodies import TEXT_GENERATION
from handlers.many.tasks.embeddings import MODULES, Embeddings, read_pooling
from handlers.many.tasks.feature_extraction import FeatureExtraction
from handlers.many.tasks.fill_mask import FillMask
from handlers.many.tasks.image_classification import ImageClassification
from handlers.many.tasks.open_inference import read_inference
from handlers.many.tasks.question_answering import QuestionAnswering
from handlers.many.tasks.task import Task
from handlers.many.tasks.text import SharedTokenizer
from handlers.many.tasks.text_classification import TextClassification, check_labels
from handlers.many.tasks.token_classification import TokenClassification
from handlers.many.tasks.triton import TritonTask, is_triton
from handlers.models.declared_size import check_files
from handlers.models.loader import choose_type
from handlers.models.memory import is_out_of_memory
from handlers.models.tokenizer import load_tokenizer
from handlers.settings.handler import HandlerSettings
from handlers.worker.device import exit_worker
from handlers.worker.fair_threads import FairThreads

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    "spm.model",
)
_TASK_VARIABLE = "HF_TASK"
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


class CheckpointLoader:
    """Loads folders on several threads. Owns what all models share: compute threads, readers, templates, tokenizers."""

    def __init__(
        self, settings: HandlerSettings, device: torch.device, ids: SessionIdMinter, environ: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._device = device
        self._ids = ids
        self._environ = environ
        self.intake = ImageLoader(settings.intake)
        self.shared = SharedParts()
        self.compute = Compute(settings.tasks, device, on_device_lost=exit_worker)
        self._readers = FairThreads(settings.tasks.prepare_threads, "read")
        self._image_readers = FairThreads(settings.intake.num_threads, "read-image")  # may wait for servers
        self.compute.start()

    def stop(self) -> None:
        """End the threads, after the last model was closed."""
        self._readers.shutdown()
        self._image_readers.shutdown()
        self.compute.stop()

    def __call__(self, folder: Path, progress: LoadProgress) -> AnsweringModel:
        """Load a folder. Raises ModelBroken with the reason, OutOfMemory."""
        try:
            check_files(folder, self._settings.model)
        except SettingsError as exc:
            raise ModelBroken(str(exc)) from exc
        if is_triton(folder):
            return self._load_triton(folder)
        config = read_json(folder, CONFIG)
        task = choose_task(folder, config, self._environ)
        logger.info("model's task=%s type=%s", task, config.get("model_type"))
        if task == TEXT_GENERATION:
            return self._load_chat(folder, config, progress)
        assembled = self._load_weights(folder, task, config, progress)
        made = self._make_task(task, folder, assembled.model)
        readers = self._image_readers if task == ImageClassification.name else self._readers
        return TaskModel(made, assembled, self._device, self.compute, readers)

    def _load_triton(self, folder: Path) -> AnsweringModel:
        task = TritonTask.load(folder, self._device, is_allowed=self._settings.many.allow_torchscript)
        assembled = Assembled(task.module)
        return TaskModel(
            task, assembled, self._device, self.compute, self._readers, read_inference, metadata=task.describe()
        )

    def _load_chat(self, folder: Path, config: dict[str, Any], progress: LoadProgress) -> AnsweringModel:
        assembled = None
        if "vision_config" not in config:
            assembled = self._load_weights(folder, TEXT_GENERATION, config, progress)
        return ChatModel(folder, assembled, self._device, self._settings, self._ids, self.intake)

    def _load_weights(self, folder: Path, task: str, config: Mapping[str, Any], progress: LoadProgress) -> Assembled:
        return load_model(
            folder,
            choose_head(task, config),
            choose_type(self._settings.model.dtype, self._device),
            self.shared,
            may_unpickle=self._settings.many.allow_pickle,
            progress=progress,
        )

    def _make_task(self, task: str, folder: Path, model: Any) -> Task:
        own, max_answer_bytes = self._settings.tasks, self._settings.pump.max_response_bytes
        if task in (TextClassification.name, TokenClassification.name, ImageClassification.name):
            check_labels(model.config)
        if task == ImageClassification.name:
            return ImageClassification(model, self._get_image_processor(folder), own, self.intake)
        _check_reads_text(task, model)
        tokenizer = self._get_tokenizer(folder)
        if task in (Embeddings.name, TextClassification.name):
            own = own.model_copy(update={"max_inputs": own.max_texts})
        makers: dict[str, Callable[..., Any]] = {
            kind.name: kind
            for kind in (TextClassification, TokenClassification, FillMask, QuestionAnswering, FeatureExtraction)
        }
        made: Task
        if task == Embeddings.name:
            made = Embeddings(model, tokenizer, own, read_pooling(folder), max_answer_bytes)
        else:
            made = makers[task](model, tokenizer, own, max_answer_bytes)
        if model.config.is_encoder_decoder:
            _check_reads_text_alone(made)
        return made

    def _get_tokenizer(self, folder: Path) -> SharedTokenizer:
        """Share tokenizers: one takes longer to make than a model, and most variants of a model have the same."""
        kind = str(read_json(folder, CONFIG).get("model_type"))  # transformers chooses the class by it
        key = ("tokenizer", kind, digest(folder / name for name in _TOKENIZER_FILES))
        return self.shared.get(key, lambda: SharedTokenizer(_load_part("tokenizer", load_tokenizer, folder)))

    def _get_image_processor(self, folder: Path) -> Any:
        key = ("image processor", digest([folder / "preprocessor_config.json", folder / CONFIG]))
        return self.shared.get(key, lambda: _load_part("image processor", _load_image_processor, folder))


def _load_part(noun: str, load: Callable[[Path], Any], folder: Path) -> Any:
    """Load a checkpoint's tokenizer or image processor. Raises ModelBroken."""
    try:
        return load(folder)
    except Exception as exc:  # a file may be missing or wrong in many ways
        text = " ".join(str(exc).split())[:300]
        raise ModelBroken(f"the model's {noun} cannot be made: {text}") from exc


def _load_image_processor(folder: Path) -> Any:
    return AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _check_reads_text(task: str, model: Any) -> None:
    """Raise ModelBroken for a model that needs more than texts, such as CLIP."""
    named = model.input_modalities
    inputs = {named} if isinstance(named, str) else set(named)
    if inputs != {"text"}:
        raise ModelBroken(
            f"its task is {task}, whose inputs are texts, and models of type {model.config.model_type} take "
            f"{' and '.join(sorted(inputs))}"
        )


def _check_reads_text_alone(task: Any) -> None:
    """Raise ModelBroken for a model whose decoder needs an input of its own, such as T5Model. Computes one text."""
    own = task.as_input(task.encode("a"))
    try:
        with torch.inference_mode():
            task.run([TaskRow(own.inputs, own.size, own.kind, lambda: True, lambda outcome: None)])
    except Exception as exc:  # each of transformers' families fails in its own way
        if is_out_of_memory(exc):
            raise
        kind = task.model.config.model_type
        raise ModelBroken(
            f"models of type {kind} do not compute {task.name} from a text alone ({type(exc).__name__}: "
            f"{str(exc)[:300]}): serve an encoder, such as BERT, or name another task in {OWN_CONFIG}"
        ) from exc


def choose_task(folder: Path, config: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return the task that torchmoor.json in the folder names, else HF_TASK, else the one of its files.

    Raises ModelBroken if none of them names a task.
    """
    named = read_own_config(folder).get("task") or environ.get(_TASK_VARIABLE)
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

"""Sentence embeddings: texts to one vector each, by the checkpoint's sentence-transformers files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handlers.errors import InvalidRequest, ModelBroken
from handlers.many.compute import TaskRow
from handlers.many.folder import read_json
from handlers.many.request import NUMBER_BYTES, ParameterTypes, TaskRequest
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import SharedTokenizer, TextTask, find_max_tokens
from handlers.requests.reply import PendingReply
from handlers.settings.tasks import TaskSettings

PARAMETERS: ParameterTypes = {"truncation": bool, "normalize": bool, "dimensions": int}
MODULES = "modules.json"
# Pooling modes by their keys in sentence-transformers, in the order in which it joins several.
MODES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_SHORT = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "lasttoken": "lasttoken"}
_SHORT |= {"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens"}
_KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """Joins the vectors of tokens into one vector of the text."""

    modes: tuple[str, ...] = ("mean_tokens",)
    is_normalized: bool = False
    is_lower_case: bool = False
    max_tokens: int = 0  # 0: the model's limit

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return (B, width). hidden: (B, T, width) float32; mask: (B, T), 1 for tokens, 0 for later padding."""
        pooled = torch.cat([_pool(mode, hidden, mask) for mode in self.modes], 1)
        return torch.nn.functional.normalize(pooled, dim=1) if self.is_normalized else pooled


def _pool(mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask[:, :, None].float()
    number = weights.sum(1).clamp(min=1e-9)
    match mode:
        case "cls_token":
            return hidden[:, 0]
        case "max_tokens":
            return hidden.masked_fill(weights == 0, -1e9).max(1).values
        case "mean_tokens":
            return (hidden * weights).sum(1) / number
        case "mean_sqrt_len_tokens":
            return (hidden * weights).sum(1) / number.sqrt()
        case "weightedmean_tokens":
            places = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
            return (hidden * places).sum(1) / places.sum(1).clamp(min=1e-9)
        case _:  # "lasttoken"
            return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]


def read_pooling(folder: Path) -> Pooling:
    """Read modules.json and the files that it names; the mean without it, as in sentence-transformers.

    Raises ModelBroken for an unknown module.
    """
    if not (folder / MODULES).is_file():
        return Pooling()
    modules = read_json(folder, MODULES, list)
    if not all(isinstance(module, dict) for module in modules):
        raise ModelBroken(f"{MODULES} is not a list of modules")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown or "Transformer" not in kinds or len(kinds) != len(modules):
        raise ModelBroken(f"{MODULES} asks for modules other than one each of {', '.join(_KNOWN)}")
    if kinds["Transformer"]:
        raise ModelBroken(f"{MODULES} names a folder for the transformer, which must lie beside it")
    modes: tuple[str, ...] = ("mean_tokens",)
    if "Pooling" in kinds:
        path = kinds["Pooling"]
        if Path(path).name != path or path in ("", ".."):
            raise ModelBroken(f"{MODULES} names a folder outside the model's")
        modes = _read_modes(read_json(folder, f"{path}/config.json"))
    own = folder / "sentence_bert_config.json"
    limits = read_json(folder, own.name) if own.is_file() else {}
    max_tokens = limits.get("max_seq_length")
    return Pooling(
        modes=modes,
        is_normalized="Normalize" in kinds,
        is_lower_case=bool(limits.get("do_lower_case")),
        max_tokens=max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else 0,
    )


def _read_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    short = config.get("pooling_mode")
    wanted = [short] if isinstance(short, str) else short if isinstance(short, list) else []
    modes = [mode for mode in MODES if config.get(f"pooling_mode_{mode}") or mode in [_SHORT.get(w) for w in wanted]]
    unknown = [
        key for key in config if key.startswith("pooling_mode_") and key.removeprefix("pooling_mode_") not in MODES
    ]
    if not modes or any(config[key] for key in unknown) or any(w not in _SHORT for w in wanted):
        raise ModelBroken("the model's pooling is of a kind that is not known here")
    return tuple(modes)


class Embeddings(TextTask):
    """{"inputs": text | a list of texts}. Answers {"embeddings": vector | a list of vectors}."""

    name = "sentence-embeddings"

    def __init__(
        self, model: Any, tokenizer: SharedTokenizer, settings: TaskSettings, pooling: Pooling, max_answer_bytes: int
    ) -> None:
        limit = find_max_tokens(model, tokenizer.tokenizer)
        super().__init__(model, tokenizer, settings, max_answer_bytes, min(pooling.max_tokens or limit, limit))
        self._pooling = pooling
        self._width = len(pooling.modes) * model.config.hidden_size

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        request.check_parameters(PARAMETERS)
        if self._pooling.is_lower_case:
            request = replace(request, inputs=_lower(request.inputs))
        dimensions = request.get("dimensions", None)
        num_kept = self._width if dimensions is None else dimensions
        if not 1 <= num_kept <= self._width:
            message = f"'dimensions' must be from 1 to {self._width} for this model"
            raise InvalidRequest(message, param="dimensions")
        self._check_size(request, num_kept)
        is_normalized = request.get("normalize", dimensions is not None)

        def answer(text: str, encoded: Any, vector: Tensor) -> Any:
            kept = vector[:num_kept]
            return (torch.nn.functional.normalize(kept, dim=0) if is_normalized else kept).tolist()

        work = self.read_texts(request, answer, is_truncated=True)  # as sentence-transformers does
        return TaskWork(work.inputs, lambda outputs: {"embeddings": work.finish(outputs)})

    def _check_size(self, request: TaskRequest, num_kept: int) -> None:
        """Refuse an answer that is too large to send, before it is computed. Raises InvalidRequest."""
        number = len(request.inputs) if isinstance(request.inputs, list) else 1
        bytes_per_number = NUMBER_BYTES if request.form is None else request.form.bytes_per_number
        advice = "send fewer texts at once"
        if request.form is not None and bytes_per_number == NUMBER_BYTES:
            advice += ', or "encoding_format": "base64"'
        if number > 1:
            param = "inputs" if request.form is None else "input"
            what = f"{number} vectors of {num_kept} numbers"
            self.check_answer(what, number * num_kept * bytes_per_number, advice, param)

    def run(self, rows: Sequence[TaskRow]) -> Sequence[Tensor]:
        """Return (width,) per row."""
        hidden = self.forward(rows).last_hidden_state.float()
        sizes = torch.tensor([row.size for row in rows], device=hidden.device)
        mask = (torch.arange(hidden.shape[1], device=hidden.device)[None] < sizes[:, None]).long()
        return list(self._pooling.pool(hidden, mask).cpu())


def _lower(inputs: Any) -> Any:
    """Convert each text to lower case. Other values stay, for the check of the inputs to refuse."""
    if isinstance(inputs, list):
        return [each.lower() if isinstance(each, str) else each for each in inputs]
    return inputs.lower() if isinstance(inputs, str) else inputs

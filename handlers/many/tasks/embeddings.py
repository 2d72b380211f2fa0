"""Texts to one vector each, pooled and normalised as the checkpoint's sentence-transformers files say."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handlers.errors import ModelBroken
from handlers.many.compute import Row
from handlers.many.request import TaskRequest, texts_of
from handlers.many.tasks.task import TaskWork
from handlers.many.tasks.text import SharedTokenizer, TextTask, find_max_tokens
from handlers.reply import Reply
from handlers.settings import TaskSettings

MODULES = "modules.json"
# The ways to pool, in the order in which sentence-transformers puts several side by side, by their keys there.
MODES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_SHORT = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "lasttoken": "lasttoken"}
_SHORT |= {"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens"}
_KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How vectors of tokens become one of the text."""

    modes: tuple[str, ...] = ("mean_tokens",)
    is_normalized: bool = False
    is_lower_case: bool = False
    max_tokens: int = 0  # 0: what the model reads

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden: (B, T, width) float32; mask: (B, T), 1 for tokens, 0 for padding behind them. Returns (B, width)."""
        weights = mask[:, :, None].float()
        number = weights.sum(1).clamp(min=1e-9)
        found = []
        for mode in self.modes:
            if mode == "cls_token":
                found.append(hidden[:, 0])
            elif mode == "max_tokens":
                found.append(hidden.masked_fill(weights == 0, -1e9).max(1).values)
            elif mode == "mean_tokens":
                found.append((hidden * weights).sum(1) / number)
            elif mode == "mean_sqrt_len_tokens":
                found.append((hidden * weights).sum(1) / number.sqrt())
            elif mode == "weightedmean_tokens":
                places = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
                found.append((hidden * places).sum(1) / places.sum(1).clamp(min=1e-9))
            else:
                found.append(hidden[torch.arange(len(hidden)), mask.sum(1) - 1])
        pooled = torch.cat(found, 1)
        return torch.nn.functional.normalize(pooled, dim=1) if self.is_normalized else pooled


def read_pooling(folder: Path) -> Pooling:
    """What modules.json and the files that it names say; without one, the mean, as sentence-transformers does.

    Raises ModelBroken if it names what is not known here.
    """
    if not (folder / MODULES).is_file():
        return Pooling()
    modules = _read_json(folder, MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelBroken(f"{MODULES} is no list of modules")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown or "Transformer" not in kinds or len(kinds) != len(modules):
        raise ModelBroken(f"{MODULES} asks for modules other than one each of {', '.join(_KNOWN)}")
    if kinds["Transformer"]:
        raise ModelBroken(f"{MODULES} names a folder for the transformer, which must lie beside it")
    modes: tuple[str, ...] = ("mean_tokens",)
    if "Pooling" in kinds:
        path = kinds["Pooling"]
        if Path(path).name != path:
            raise ModelBroken(f"{MODULES} names a folder outside the model's")
        modes = _read_modes(_read_object(folder, f"{path}/config.json"))
    own = folder / "sentence_bert_config.json"
    limits = _read_object(folder, own.name) if own.is_file() else {}
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


def _read_json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelBroken(f"{name} is missing or no JSON") from exc


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    found = _read_json(folder, name)
    if not isinstance(found, dict):
        raise ModelBroken(f"{name} is no JSON object")
    return found


class Embeddings(TextTask):
    """{"inputs": text | a list of texts}. Answers {"embeddings": vector | a list of vectors}."""

    name = "sentence-embeddings"

    def __init__(self, model: Any, tokenizer: SharedTokenizer, settings: TaskSettings, pooling: Pooling) -> None:
        limit = find_max_tokens(model.config, tokenizer.tokenizer)
        super().__init__(model, tokenizer, settings, min(pooling.max_tokens or limit, limit))
        self._pooling = pooling

    def read(self, request: TaskRequest, reply: Reply) -> TaskWork:
        request.check_parameters({"truncation": bool, "normalize": bool})
        texts = texts_of(request.inputs, self.settings.max_inputs, self.settings.max_chars)
        is_truncated = request.get("truncation", True)  # as sentence-transformers does
        is_normalized = request.get("normalize", False)
        if self._pooling.is_lower_case:
            texts = [text.lower() for text in texts]

        def finish(outputs: Sequence[Tensor]) -> Any:
            vectors = torch.stack(list(outputs))
            if is_normalized:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
            found = vectors.tolist()
            return {"embeddings": found if isinstance(request.inputs, list) else found[0]}

        return TaskWork([self.as_input(self.encode(text, is_truncated=is_truncated)) for text in texts], finish)

    def run(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """(width,) a row."""
        hidden = self.forward(rows).last_hidden_state.float()
        sizes = torch.tensor([row.size for row in rows], device=hidden.device)
        mask = (torch.arange(hidden.shape[1], device=hidden.device)[None] < sizes[:, None]).long()
        return list(self._pooling.pool(hidden, mask).cpu())

"""A folder of many models and one worker that serves it: MiniLM's variants, tiny models of every task, broken ones."""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import transformers as hf

from scripts.make_minilm import TARGET, WEIGHTS, make_variants
from tests.torchserve.conftest import Fleet, run_fleet
from tests.unit.handlers.many.tiny import save_checkpoint

TEXTS = ("a red circle on the left", "what is the weather like?", "three green squares", "nothing of the kind")
TINY = {
    "classify.tar.gz": "BertForSequenceClassification",
    "entities.tar.gz": "BertForTokenClassification",
    "gaps.tar.gz": "RobertaForMaskedLM",
    "answers.tar.gz": "DistilBertForQuestionAnswering",
    "pictures.tar.gz": "ViTForImageClassification",
    "writes.tar.gz": "LlamaForCausalLM",
}


@dataclass
class ManyModels:
    """A running worker and what it should answer."""

    fleet: Fleet
    source: Path
    variants: Sequence[str]
    _expected: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The worker itself, past the proxy."""
        (instance,) = self.fleet.instances()
        return f"http://{instance['host']}:{instance['port']}/predictions/many"

    def ask(self, model: str | None, body: Any, **options: Any) -> requests.Response:
        headers = {} if model is None else {"X-Amzn-SageMaker-Target-Model": model}
        return requests.post(self.address, json=body, headers=headers, timeout=120, **options)

    def operate(self, operation: str, body: Any) -> requests.Response:
        return requests.post(self.address, json=body, headers={"X-Torchmoor-Operation": operation}, timeout=120)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.operate("status", {}).json()
        return found

    def expected(self, variant: str) -> torch.Tensor:
        """Every text's embedding by this variant, computed by transformers alone."""
        if variant not in self._expected:
            model = hf.AutoModel.from_pretrained(self.source / variant).eval()
            tokenizer = hf.AutoTokenizer.from_pretrained(self.source / variant)
            vectors = []
            for text in TEXTS:
                with torch.inference_mode():
                    hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
                vectors.append(hidden / hidden.norm())
            self._expected[variant] = torch.stack(vectors)
        return self._expected[variant]

    def is_right(self, variant: str, text: int, answer: requests.Response) -> bool:
        """Whether an answer is this variant's; its neighbours' are ten times as far away as is allowed."""
        found = torch.tensor(answer.json()["embeddings"])
        return bool((found - self.expected(variant)[text]).norm() < 1e-4)


def pack(folder: Path, archive: Path) -> None:
    """A folder as the .tar.gz that SageMaker's users have."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)


def fill(source: Path, scratch: Path, num_variants: int) -> list[str]:
    """Models of every kind; returns the names of MiniLM's variants among them."""
    make_variants(TARGET, source, num_variants)
    for name, architecture in TINY.items():
        folder = save_checkpoint(scratch / name, architecture)
        pack(folder, source / name)
    (source / "corrupt.tar.gz").write_bytes((source / "classify.tar.gz").read_bytes()[:5000])
    pickled = save_checkpoint(scratch / "pickled", "BertModel")
    torch.save({}, pickled / "pytorch_model.bin")
    (pickled / WEIGHTS).unlink()
    pack(pickled, source / "pickled.tar.gz")
    save_triton(scratch / "triton")
    pack(scratch / "triton", source / "triton.tar.gz")
    return sorted(path.name for path in source.iterdir() if path.name.startswith("minilm-"))


def save_triton(folder: Path) -> None:
    """A traced model that doubles, in Triton's layout."""

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    (folder / "1").mkdir(parents=True)
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.trace(Double(), torch.ones(1, 3)).save(str(folder / "1" / "model.pt"))
    (folder / "config.pbtxt").write_text(
        'name: "double"\nplatform: "pytorch_libtorch"\nmax_batch_size: 8\n'
        'input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3 ] } ]\n'
        'output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] } ]\n'
    )


@contextmanager
def run_many(folder: Path, num_variants: int, **settings: str) -> Iterator[ManyModels]:
    """One worker over a filled source. settings: of the group `many`."""
    if not (TARGET / "config.json").is_file():
        reason = f"there is no {TARGET}: make archives downloads it"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    source = folder / "models"
    source.mkdir()
    variants = fill(source, folder / "scratch", num_variants)
    own = {"source": str(source), "cache_dir": str(folder / "cache"), **settings}
    environment = {f"TORCHMOOR_HANDLER_MANY_{name.upper()}": value for name, value in own.items()}
    arguments = ("--endpoint", "many", "--instances", "1")
    with run_fleet(*arguments, run_dir=folder / "run", log=folder / "up.log", environment=environment) as fleet:
        yield ManyModels(fleet, source, variants)


def error_of(answer: requests.Response) -> str:
    message: str = json.loads(answer.content)["error"]["message"]
    return message

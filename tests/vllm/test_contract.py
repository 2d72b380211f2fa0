"""vLLM keeps the contract of engines, on the CPU and in float32."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from handlers.engine.open_engine import open_engine
from handlers.errors import InternalError
from handlers.settings.adapters import AdapterSettings
from handlers.settings.engine import EngineSettings
from handlers.settings.handler import HandlerSettings
from handlers.settings.model import ModelSettings
from handlers.settings.session import ChatSessionSettings
from handlers.settings.vllm import VllmSettings
from tests.unit.handlers.engine_contract import ENDLESS, Contender, EngineContract
from tests.vllm.rename_weights import copy_renamed

CHECKPOINT = Path(__file__).parents[2] / "models" / "tiny-llava"


SETTINGS = HandlerSettings(
    model=ModelSettings(dtype="float32"),
    session=ChatSessionSettings(kv_bytes=256 << 20),
    engine=EngineSettings(name="vllm"),
    adapters=AdapterSettings(source="adapters", max_rank=8),
    vllm=VllmSettings(enforce_eager=True, options={"block_size": 32}),
)


def start(folder: Path) -> Contender:
    """Start vLLM on a copy of the demo's vision checkpoint."""
    torch.set_num_threads(1)
    prompts, engine = open_engine(SETTINGS, copy_renamed(CHECKPOINT, folder / "tiny-llava"), None)
    reference = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    engine.start()
    return Contender(engine, prompts, reference, AutoProcessor.from_pretrained(CHECKPOINT), CHECKPOINT)


class TestVllm(EngineContract):
    """The demo's vision checkpoint on vLLM."""

    @pytest.fixture(scope="class")
    @classmethod
    def contender(cls, tmp_path_factory: pytest.TempPathFactory) -> Contender:
        return start(tmp_path_factory.mktemp("checkpoint"))

    def test_stop_ends_answers_and_refuses_more(self, contender: Contender) -> None:
        """After the stop, none of vLLM's processes and memory is left."""
        assert multiprocessing.active_children()

        super().test_stop_ends_answers_and_refuses_more(contender)

        assert not multiprocessing.active_children()


def test_a_worker_whose_vllm_dies_ends_before_its_answers(tmp_path: Path) -> None:
    """A worker whose vLLM dies ends before its answers do, so that another instance gives or continues them."""
    contender = start(tmp_path)
    errors: list[Exception | None] = []  # tokens of the answer when the worker ends
    asked = contender.ask("Hello there", max_new_tokens=1000, **ENDLESS).wait(1)
    contender.engine.on_dead = lambda: errors.append(asked.events[-1].error)

    for process in multiprocessing.active_children():
        process.kill()

    assert isinstance(asked.wait().events[-1].error, InternalError)
    assert errors[0] is None

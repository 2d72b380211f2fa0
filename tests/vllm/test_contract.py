"""vLLM keeps the contract of engines, on the CPU and in float32."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from handlers.engine.open_engine import open_engine
from handlers.settings import ChatSessionSettings, EngineSettings, HandlerSettings, ModelSettings
from handlers.vllm_settings import VllmSettings
from tests.unit.handlers.engine_contract import Contender, EngineContract
from tests.vllm.rename_weights import copy_renamed

CHECKPOINT = Path(__file__).parents[2] / "models" / "tiny-llava"


class TestVllm(EngineContract):
    """The demo's vision checkpoint on vLLM."""

    @pytest.fixture(scope="class")
    @classmethod
    def contender(cls, tmp_path_factory: pytest.TempPathFactory) -> Contender:
        torch.set_num_threads(1)
        folder = copy_renamed(CHECKPOINT, tmp_path_factory.mktemp("checkpoint") / "tiny-llava")
        settings = HandlerSettings(
            model=ModelSettings(dtype="float32"),
            session=ChatSessionSettings(kv_bytes=256 << 20),
            engine=EngineSettings(name="vllm"),
            vllm=VllmSettings(enforce_eager=True, options={"block_size": 32}),
        )
        prompts, engine = open_engine(settings, folder, None)
        reference = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
        engine.start()
        return Contender(engine, prompts, reference, AutoProcessor.from_pretrained(CHECKPOINT))

    def test_stop_ends_answers_and_refuses_more(self, contender: Contender) -> None:
        """Nothing is left of vLLM's processes and their memory."""
        assert multiprocessing.active_children()

        super().test_stop_ends_answers_and_refuses_more(contender)

        assert not multiprocessing.active_children()

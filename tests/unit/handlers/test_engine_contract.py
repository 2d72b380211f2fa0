"""The built-in engine keeps the contract, in packed steps and one sequence at a time."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from handlers.engine.open_engine import open_engine
from handlers.settings.adapters import AdapterSettings
from handlers.settings.handler import HandlerSettings
from handlers.settings.session import ChatSessionSettings
from tests.unit.handlers.engine_contract import Contender, EngineContract
from tests.unit.handlers.tiny_checkpoints import PLAIN, save


class TestBuiltin(EngineContract):
    """The demo's vision checkpoint in packed steps."""

    @pytest.fixture(scope="class")
    @classmethod
    def contender(cls, checkpoint: Path, one_thread: None) -> Contender:
        adapters = AdapterSettings(source="adapters")
        settings = HandlerSettings(session=ChatSessionSettings(kv_bytes=64 << 20), adapters=adapters)
        prompts, engine = open_engine(settings, checkpoint, None)
        reference = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        engine.start()
        return Contender(engine, prompts, reference, AutoProcessor.from_pretrained(checkpoint), checkpoint)


class TestPlain(EngineContract):
    """A checkpoint that runs as in transformers."""

    can_see = False
    max_question = 150
    test_adapters_share_steps_but_no_beginnings = None  # the engine has none of these
    test_an_adapter_that_is_none_is_refused = None

    @pytest.fixture(scope="class")
    @classmethod
    def contender(cls, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, one_thread: None) -> Contender:
        folder = tmp_path_factory.mktemp("gpt2")
        save(PLAIN["gpt2"](), folder, checkpoint)
        (folder / "processor_config.json").unlink()
        settings = HandlerSettings(session=ChatSessionSettings(kv_bytes=64 << 20))
        prompts, engine = open_engine(settings, folder, None)
        assert not engine.capabilities.is_packed
        engine.start()
        return Contender(engine, prompts, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

"""torch.compile between the attention calls, with the compiler of this machine."""

from pathlib import Path

import pytest
import torch

from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import BLOCK, SequenceCache, cache_shape
from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, SamplingParams, TokenEvent
from handlers.errors import SettingsError
from handlers.models.loader import load_model

CPU = torch.device("cpu")
# torch's own modules emit these warnings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.slow
@pytest.mark.needs("g++")
def test_no_request_waits_for_the_compiler(checkpoint: Path, one_thread: None) -> None:
    """Loading the model compiles everything for prompts of any length and any batch.

    Loading also checks that the compiled layers compute what transformers computes.
    """
    model = load_model(checkpoint, CPU, "bfloat16", is_compiled=True)
    runner = ModelRunner(model, cache_shape(model).num_bytes(64 * BLOCK))
    engine = Engine(runner, Scheduler(4, Pace(32, 1e9)), 1)
    outputs: list[list[int]] = [[] for _ in range(4)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    for length, output in zip((1, 2, 17, 60), outputs, strict=True):

        def listen(event: TokenEvent, output: list[int] = output) -> bool:
            assert event.token_id is not None, event.error
            output.append(event.token_id)
            return True

        prompt = [10 + i % 200 for i in range(length)]
        cache = SequenceCache(runner.pool)
        cache.match(prompt)
        request = AnswerRequest(
            prompt=prompt, images=[], params=SamplingParams(max_new_tokens=8), deadline=float("inf"), on_event=listen
        )
        engine.admit(TokenSequence(cache, request))
    with torch._dynamo.config.patch(error_on_recompile=True):
        while engine.scheduler.all():
            engine.step()

    assert all(outputs)
    assert graphs > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_float32_on_a_cpu_is_not_compiled(checkpoint: Path) -> None:
    """float32 weights on a CPU are packed, which is faster and cannot be combined with compiling."""
    with pytest.raises(SettingsError, match=r"handler\.model\.compile must be off"):
        load_model(checkpoint, CPU, "float32", is_compiled=True)


@pytest.mark.slow
def test_a_compiler_that_does_not_work_is_a_config_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Loading fails with the compiler's message, instead of the first request."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nonexistent/c++",))
    torch._dynamo.reset()

    with pytest.raises(SettingsError, match=r"torch\.compile fails"):
        load_model(checkpoint, CPU, "bfloat16", is_compiled=True)

"""The engine on a CUDA device: the same answers as on the CPU, and a correct memory budget."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.device import choose_device
from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import SequenceCache
from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import ImageSpan, Sequence
from handlers.engine.builtin.start import choose_kv_bytes
from handlers.engine.contract import SamplingParams, TokenEvent
from handlers.errors import OutOfMemory
from handlers.models.loader import load_model
from handlers.settings import ChatSessionSettings
from tests.unit.handlers.tiny_checkpoints import PLAIN, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CHECKPOINT = Path(__file__).parents[2] / "models" / "tiny-llava"
CUDA = torch.device("cuda:0")
KV_BYTES = 64 << 20


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """Compute products in full float32, as on the CPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    choose_device(0)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def answer(
    device: torch.device,
    prompts: list[list[int]],
    pixels: torch.Tensor | None = None,
    checkpoint: Path = CHECKPOINT,
    **options: Any,
) -> Any:
    """Return greedy tokens of all prompts, batched; if there are pixels, each prompt begins with a picture."""
    model = load_model(checkpoint, device, "float32")
    runner = ModelRunner(model, KV_BYTES, **options)
    engine = Engine(runner, Scheduler(8, Pace(32, 2.0)), 1)
    spans: list[ImageSpan] = []
    if pixels is not None:
        features = runner.encode_image(pixels)
        spans = [ImageSpan(0, features)]
        prompts = [[-5] * len(features) + prompt for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):

        def listen(event: TokenEvent, output: list[int] = output) -> bool:
            assert event.token_id is not None, event.error
            output.append(event.token_id)
            return True

        cache = SequenceCache(runner.pool)
        cache.match(prompt)
        engine.admit(Sequence(prompt, spans, cache, SamplingParams(max_new_tokens=24), float("inf"), listen))
    while engine.scheduler.all():
        engine.step()
    return outputs


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, 256, (n,), generator=generator).tolist() for n in (3, 40, 17, 80, 9)]


@pytest.mark.parametrize("options", [{}, {"has_graphs": False}, {"is_row_batched": False}], ids=str)
def test_answers_are_those_of_the_cpu(options: dict[str, bool]) -> None:
    """Greedy float32 answers in a batch are the CPU's, token for token, with graphs, without, and row by row."""
    expected = answer(torch.device("cpu"), random_prompts())

    assert answer(CUDA, random_prompts(), **options) == expected


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "falcon-alibi"])
def test_a_plain_model_answers_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    """transformers' forward pass over the pool's blocks, without graphs."""
    save(PLAIN[family](), tmp_path, CHECKPOINT)
    expected = answer(torch.device("cpu"), random_prompts(), checkpoint=tmp_path)

    assert answer(CUDA, random_prompts(), checkpoint=tmp_path) == expected


def test_pictures_are_seen_as_on_the_cpu() -> None:
    """The vision tower, the projector and the placement of features in the prompt match the CPU."""
    pixels = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(2))
    expected = answer(torch.device("cpu"), random_prompts(), pixels)

    assert answer(CUDA, random_prompts(), pixels) == expected


def test_kv_cache_takes_its_part_of_the_device() -> None:
    """Weights, features and KV cache together stay within the configured fraction."""
    model = load_model(CHECKPOINT, CUDA, "float32")
    settings = ChatSessionSettings(device_fraction=0.5)

    runner = ModelRunner(model, choose_kv_bytes(settings, model, 64))

    _, total = torch.cuda.mem_get_info(CUDA)
    used = torch.cuda.memory_reserved(CUDA) + settings.features_bytes
    assert 0.4 * total < used <= 0.5 * total
    del runner


def test_cudnn_attention_is_off() -> None:
    """It builds a plan for each new shape, and the shape of a conversation changes with each token."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_memory_is_released_when_the_engine_stops() -> None:
    """The KV cache and the graphs are freed even while others still refer to the engine."""
    model = load_model(CHECKPOINT, CUDA, "float32")
    before = torch.cuda.memory_allocated()
    engine = Engine(ModelRunner(model, 1 << 30), Scheduler(8, Pace(32, 2.0)), 1)
    engine.start()
    assert torch.cuda.memory_allocated() >= before + (1 << 30)

    engine.stop()

    assert torch.cuda.memory_allocated() <= before + (80 << 20)  # cuBLAS keeps workspaces


def test_step_waits_for_the_device_once() -> None:
    """A decoding step of greedy rows has one transfer from the device, and none that waits to the device."""
    model = load_model(CHECKPOINT, CUDA, "float32")
    runner = ModelRunner(model, KV_BYTES)
    engine = Engine(runner, Scheduler(8, Pace(512, 2.0)), 1)
    for prompt in random_prompts():
        params = SamplingParams(max_new_tokens=40)
        engine.admit(Sequence(prompt, [], SequenceCache(runner.pool), params, float("inf"), lambda event: True))
    for _ in range(8):
        engine.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert len([each for each in caught if "called a synchronizing CUDA operation" in str(each.message)]) == 1


def test_cache_that_the_device_cannot_hold_is_out_of_memory() -> None:
    """A cache that is too large fails at the start with a clear error, not later with a CUDA error."""
    model = load_model(CHECKPOINT, CUDA, "float32")
    _, total = torch.cuda.mem_get_info(CUDA)

    with pytest.raises(OutOfMemory):
        ModelRunner(model, 2 * total)

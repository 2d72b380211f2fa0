"""The engine on a CUDA device: the same answers as on the CPU, and a correct memory budget."""

import warnings
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from handlers.engine.builtin.chat_engine import choose_kv_bytes
from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import SequenceCache
from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, PlacedImage, SamplingParams, TokenEvent
from handlers.errors import OutOfMemory
from handlers.models.loader import load_model
from handlers.settings.session import ChatSessionSettings
from handlers.worker.device import choose_device
from scripts.make_adapters import make_adapters
from tests.unit.handlers.tiny_checkpoints import PLAIN, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CHECKPOINT = Path(__file__).parents[2] / "models" / "tiny-llava"
CUDA = torch.device("cuda:0")
KV_BYTES = 64 << 20
LOGPROB_TOLERANCE = 0.15  # of answers in 16 bits


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """Compute products in full float32, as on the CPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    choose_device(0)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def answer(device: torch.device, prompts: list[list[int]], *arguments: Any, **options: Any) -> list[list[int]]:
    """Return greedy tokens of all prompts; see `generate`."""
    found = generate(device, prompts, *arguments, **options)
    return [[event.token_id for event in events if event.token_id is not None] for events in found]


def generate(
    device: torch.device,
    prompts: list[list[int]],
    pixels: torch.Tensor | None = None,
    checkpoint: Path = CHECKPOINT,
    adapters: Sequence[Path | None] = (),
    dtype: str = "float32",
    **options: Any,
) -> list[list[TokenEvent]]:
    """Return greedy answers of all prompts, batched; if there are pixels, each prompt begins with an image.

    adapters: one for each prompt, if any has one.
    """
    model = load_model(checkpoint, device, dtype, max_rank=8 if adapters else 0)
    runner = ModelRunner(model, KV_BYTES, **options)
    engine = Engine(runner, Scheduler(8, Pace(32, 2.0)), 1)
    spans: list[PlacedImage] = []
    if pixels is not None:
        features = runner.encode_image(pixels)
        spans = [PlacedImage(0, features)]
        prompts = [[-5] * len(features) + prompt for prompt in prompts]
    found: list[list[TokenEvent]] = [[] for _ in prompts]
    for number, (prompt, events) in enumerate(zip(prompts, found, strict=True)):

        def listen(event: TokenEvent, events: list[TokenEvent] = events) -> bool:
            assert event.token_id is not None, event.error
            events.append(event)
            return True

        folder = adapters[number] if adapters else None
        adapter = None
        if folder is not None and model.adapted is not None:
            adapter = model.adapted.read(folder, torch.float32, device)
        cache = SequenceCache(runner.pool)
        cache.match(prompt, "" if adapter is None else adapter.version)
        request = AnswerRequest(
            prompt=prompt,
            images=spans,
            params=SamplingParams(max_new_tokens=24),
            deadline=float("inf"),
            on_event=listen,
            adapter=adapter,
        )
        sequence = TokenSequence(cache, request)
        engine.admit(sequence)
    while engine.scheduler.all():
        engine.step()
    return found


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, 256, (n,), generator=generator).tolist() for n in (3, 40, 17, 80, 9)]


@pytest.mark.parametrize("options", [{}, {"has_graphs": False}, {"is_row_batched": False}], ids=str)
def test_answers_are_those_of_the_cpu(options: dict[str, bool]) -> None:
    """Greedy float32 answers in a batch are the CPU's, token for token, with graphs, without, and row by row."""
    expected = answer(torch.device("cpu"), random_prompts())

    assert answer(CUDA, random_prompts(), **options) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"has_graphs": False}], ids=str)
def test_answers_in_16_bits_are_close_to_those_in_32(dtype: str, options: dict[str, bool]) -> None:
    """Log probabilities in the types that users run are close to those in float32, as long as the tokens are equal."""
    pixels = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(2))
    expected = generate(torch.device("cpu"), random_prompts(), pixels)

    found = generate(CUDA, random_prompts(), pixels, dtype=dtype, **options)

    for own, exact in zip(found, expected, strict=True):
        same = list(takewhile(lambda pair: pair[0].token_id == pair[1].token_id, zip(own, exact, strict=False)))
        differences = [abs(a.logprob - b.logprob) for a, b in same]
        assert max(differences) < LOGPROB_TOLERANCE


def test_adapters_answer_as_on_the_cpu(tmp_path: Path) -> None:
    """Rows with different adapters and without share a batch and give the CPU's answers."""
    folders = [*make_adapters(CHECKPOINT, tmp_path, 4, strength=1.0), None]
    expected = answer(torch.device("cpu"), random_prompts(), adapters=folders)

    assert answer(CUDA, random_prompts(), adapters=folders) == expected


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "falcon-alibi"])
def test_a_plain_model_answers_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    """A plain model, transformers' forward pass over the pool's blocks, gives the CPU's answers without graphs."""
    save(PLAIN[family](), tmp_path, CHECKPOINT)
    expected = answer(torch.device("cpu"), random_prompts(), checkpoint=tmp_path)

    assert answer(CUDA, random_prompts(), checkpoint=tmp_path) == expected


def test_images_are_seen_as_on_the_cpu() -> None:
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
    """cuDNN's attention is off, because it builds a plan for each new shape, which changes with each token."""
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


def waits_of_step(engine: Engine) -> int:
    """Run a step, and return how often it waits for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(each.message) for each in caught)


def test_step_waits_for_the_device_once() -> None:
    """A decoding step of greedy rows has one transfer from the device, and none that waits to the device."""
    model = load_model(CHECKPOINT, CUDA, "float32")
    runner = ModelRunner(model, KV_BYTES)
    engine = Engine(runner, Scheduler(8, Pace(512, 2.0)), 1)
    for prompt in random_prompts():
        params = SamplingParams(max_new_tokens=40)
        request = AnswerRequest(
            prompt=prompt, images=[], params=params, deadline=float("inf"), on_event=lambda event: True
        )
        engine.admit(TokenSequence(SequenceCache(runner.pool), request))
    for _ in range(8):
        engine.step()

    assert waits_of_step(engine) == 1


def test_short_prompts_are_replayed() -> None:
    """A question of a few tokens beside answers is replayed as a graph, which is faster than launching its kernels."""
    model = load_model(CHECKPOINT, CUDA, "bfloat16")
    runner = ModelRunner(model, KV_BYTES)
    engine = Engine(runner, Scheduler(8, Pace(512, 2.0)), 1)

    def submit(number: int) -> None:
        params = SamplingParams(max_new_tokens=20)
        prompt = list(range(10, 10 + number))
        request = AnswerRequest(
            prompt=prompt, images=[], params=params, deadline=float("inf"), on_event=lambda event: True
        )
        engine.admit(TokenSequence(SequenceCache(runner.pool), request))

    with patch.object(model, "forward", wraps=model.forward) as launched:
        for number in (9, 30, 5):
            submit(number)
            engine.step()
        assert launched.call_count == 0
        submit(300)
        engine.step()
        assert launched.call_count == 1


@pytest.mark.parametrize(("max_context", "kv_bytes"), [(100, KV_BYTES), (8192, 1 << 20)])
def test_rows_are_measured_with_few_blocks(max_context: int, kv_bytes: int) -> None:
    """Rows are measured for a model with a short context and for a small KV cache."""
    model = load_model(CHECKPOINT, CUDA, "bfloat16")
    model.max_context = max_context
    runner = ModelRunner(model, kv_bytes, 4)

    assert runner.pool.num_used == 0


def test_norms_are_fused() -> None:
    """A checkpoint that is loaded onto a GPU has torch's RMSNorm."""
    model = load_model(CHECKPOINT, CUDA, "bfloat16")

    norms = [type(module) for module in model.decoder.modules() if type(module).__name__.endswith("RMSNorm")]

    assert norms
    assert set(norms) == {torch.nn.RMSNorm}


@pytest.mark.parametrize("top_ks", [(50,), (50, 20, None)])
def test_a_step_that_samples_waits_for_the_device_once(top_ks: tuple[int | None, ...]) -> None:
    """Numbers are uploaded without a wait and tokens arrive with the step's results, for equal and different top_k.

    None: a row that is not sampled.
    """
    model = load_model(CHECKPOINT, CUDA, "float32")
    runner = ModelRunner(model, KV_BYTES)
    engine = Engine(runner, Scheduler(8, Pace(512, 2.0)), 1)
    for number, prompt in enumerate(random_prompts()):
        top_k = top_ks[number % len(top_ks)]
        is_sampled = top_k is not None
        params = SamplingParams(max_new_tokens=40, do_sample=is_sampled, top_k=top_k, top_p=0.9, seed=1)
        request = AnswerRequest(
            prompt=prompt, images=[], params=params, deadline=float("inf"), on_event=lambda event: True
        )
        engine.admit(TokenSequence(SequenceCache(runner.pool), request))
    for _ in range(8):
        engine.step()

    assert waits_of_step(engine) == 1


def test_cache_that_the_device_cannot_hold_is_out_of_memory() -> None:
    """A cache that is too large fails at the start with a clear error, not later with a CUDA error."""
    model = load_model(CHECKPOINT, CUDA, "float32")
    _, total = torch.cuda.mem_get_info(CUDA)

    with pytest.raises(OutOfMemory):
        ModelRunner(model, 2 * total)

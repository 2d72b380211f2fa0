"""LoRA adapters in the built-in engine: several in one step, shared work, and files that are refused."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from handlers.engine.builtin.chat_engine import BuiltinEngine
from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import BLOCK, SequenceCache
from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import Adapter, AnswerRequest, ChatEngine, KvCache, SamplingParams, TokenEvent
from handlers.engine.open_engine import open_engine
from handlers.errors import ModelBroken, SettingsError
from handlers.models.loader import load_model
from handlers.settings.adapters import AdapterSettings
from handlers.settings.handler import HandlerSettings
from handlers.settings.session import ChatSessionSettings
from scripts.make_adapters import make_adapters, read_layers, write_adapter
from tests.unit.handlers.conftest import DEMO
from tests.unit.handlers.merged import add_adapter, generate_greedily
from tests.unit.handlers.tiny_checkpoints import PLAIN, save

NUM_ADAPTERS = 5
NUM_TOKENS = 12
PROMPTS = [list(range(40 + n, 75 + 7 * n)) for n in range(NUM_ADAPTERS)]
WITH_ADAPTERS = HandlerSettings(
    session=ChatSessionSettings(kv_bytes=64 << 20), adapters=AdapterSettings(source="adapters", max_rank=16)
)


class Row:
    """An answer in progress.

    gate: at which the engine waits with each token.
    """

    def __init__(
        self,
        engine: ChatEngine,
        prompt: list[int],
        adapter: Adapter | None,
        cache: KvCache | None = None,
        gate: threading.Event | None = None,
    ):
        self._gate = gate
        self.tokens: list[int] = []
        self.num_cached = 0
        self._over = threading.Event()
        self._error: Exception | None = None
        self.cache = engine.pool.open("scope") if cache is None else cache
        self.cache.pin()
        self.cache.match(prompt, "" if adapter is None else adapter.version)
        request = AnswerRequest(
            prompt=prompt,
            images=[],
            params=SamplingParams(max_new_tokens=NUM_TOKENS),
            deadline=time.monotonic() + 60,
            on_event=self._on_event,
            adapter=adapter,
        )
        engine.submit(self.cache, request)

    def _on_event(self, event: TokenEvent) -> bool:
        assert self._gate is None or self._gate.wait(60)
        self._error = event.error
        if event.token_id is not None:
            self.num_cached += event.num_cached
            self.tokens.append(event.token_id)
        if event.token_id is None or event.finish_reason is not None:
            self._over.set()
        return True

    def wait(self) -> "Row":
        assert self._over.wait(60)
        assert self._error is None, self._error
        self.cache.unpin()
        return self


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """Return the whole demo, whose answers with each adapter differ."""
    return DEMO


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"), NUM_ADAPTERS)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, one_thread: None) -> Any:
    _, engine = open_engine(WITH_ADAPTERS, checkpoint, None)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def adapters(engine: ChatEngine, folders: list[Path]) -> list[Adapter]:
    return [engine.load_adapter(folder) for folder in folders]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, folders: list[Path]) -> list[list[int]]:
    """Return transformers' answers with each adapter merged into the weights, and at last without one."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = []
    for folder, prompt in zip(folders, PROMPTS, strict=True):
        found.append(generate_greedily(add_adapter(model, folder), prompt, NUM_TOKENS))
        add_adapter(model, folder, sign=-1)
    return [*found, generate_greedily(model, PROMPTS[0], NUM_TOKENS)]


def test_rows_of_different_adapters_and_of_none_share_steps_and_answer_as_merged_models(
    engine: BuiltinEngine, adapters: list[Adapter], expected: list[list[int]]
) -> None:
    before, gate = engine.numbers().steps, threading.Event()
    rows = [
        Row(engine, PROMPTS[0], None, gate=gate),
        *(Row(engine, prompt, adapter) for prompt, adapter in zip(PROMPTS, adapters, strict=True)),
    ]
    gate.set()
    expected = [expected[-1], *expected[:-1]]
    assert [row.wait().tokens for row in rows] == expected
    assert len({tuple(tokens) for tokens in expected}) > NUM_ADAPTERS  # each adapter has answers of its own
    assert engine.numbers().steps - before < 3 * NUM_TOKENS


def test_rows_that_share_one_attention_call_answer_the_same(
    checkpoint: Path, folders: list[Path], expected: list[list[int]], one_thread: None
) -> None:
    """Rows with and without adapters share attention calls as on a GPU, which replays only steps without adapters."""
    model = load_model(checkpoint, torch.device("cpu"), "float32", max_rank=16)
    engine = Engine(ModelRunner(model, 64 << 20, is_row_batched=True), Scheduler(8, Pace(32, 2.0)), 1)
    loaded = [model.adapted.read(folder, torch.float32, model.device) for folder in folders]
    outputs: list[list[int]] = []
    for prompt, adapter in [*zip(PROMPTS, loaded, strict=True), (PROMPTS[0], None)]:
        output: list[int] = []
        outputs.append(output)

        def listen(event: TokenEvent, output: list[int] = output) -> bool:
            assert event.token_id is not None, event.error
            output.append(event.token_id)
            return True

        cache = SequenceCache(engine.runner.pool)
        cache.match(prompt, "" if adapter is None else adapter.version)
        request = AnswerRequest(
            prompt=prompt,
            images=[],
            params=SamplingParams(max_new_tokens=NUM_TOKENS),
            deadline=float("inf"),
            on_event=listen,
            adapter=adapter,
        )
        sequence = TokenSequence(cache, request)
        engine.admit(sequence)
    while engine.scheduler.all():
        engine.step()
    assert outputs == expected


def test_a_prefix_computed_under_one_adapter_is_used_under_no_other(
    engine: ChatEngine, adapters: list[Adapter], expected: list[list[int]]
) -> None:
    prompt = PROMPTS[0]
    Row(engine, prompt, adapters[0]).wait()
    again = Row(engine, prompt, adapters[0]).wait()
    assert again.num_cached >= len(prompt) // BLOCK * BLOCK - BLOCK
    Row(engine, prompt, None).wait()
    for other in adapters[1:]:
        row = Row(engine, prompt, other).wait()
        assert row.num_cached == 0
    assert Row(engine, prompt, adapters[0]).wait().tokens == expected[0]
    assert Row(engine, prompt, None).wait().tokens == expected[-1]


def test_a_conversation_that_changes_its_adapter_computes_everything_again(
    engine: ChatEngine, adapters: list[Adapter], expected: list[list[int]]
) -> None:
    first = Row(engine, PROMPTS[0], adapters[1], engine.pool.open("another scope")).wait()
    changed = Row(engine, PROMPTS[0], adapters[0], first.cache).wait()
    assert (changed.num_cached, changed.tokens) == (0, expected[0])


def test_an_adapters_bytes_are_those_of_its_matrices_and_end_with_it(engine: ChatEngine, folders: list[Path]) -> None:
    adapter = engine.load_adapter(folders[0])
    tensors = load_file(folders[0] / "adapter_model.safetensors")
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    adapter.drop()
    assert adapter.num_bytes == 0


def test_a_changed_file_is_another_version(engine: ChatEngine, folders: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "copy")
    same = engine.load_adapter(folder).version
    change_tensors(folder, lambda tensors: {name: tensor * 2 for name, tensor in tensors.items()})
    assert engine.load_adapter(folders[0]).version == same != engine.load_adapter(folder).version


def test_rslora_and_ranks_of_single_layers_scale_as_peft_does(
    engine: ChatEngine, folders: list[Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "copy")
    change_config(folder, use_rslora=True, lora_alpha=4)
    plain, scaled = engine.load_adapter(folders[0]), engine.load_adapter(folder)
    name = "0.self_attn.q_proj"
    torch.testing.assert_close(scaled.deltas[name].up, plain.deltas[name].up * 4 / 8**0.5)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()  # a copy may be a link
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": ["pissa"]}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"r": 4}, "rank is 8"),
    ],
)
def test_an_adapter_that_is_more_than_lora_is_refused_by_name(
    engine: ChatEngine, folders: list[Path], tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "copy")
    change_config(folder, **values)
    with pytest.raises(ModelBroken, match=named):
        engine.load_adapter(folder)


Q = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: {**t, "base_model.model.lm_head.lora_A.weight": torch.ones(8, 4)}, "lm_head"),
        (lambda t: {**t, "base_model.model.model.vision_tower.layers.0.q_proj.lora_A.weight": torch.ones(8, 4)}, "vis"),
        (lambda t: {**t, Q.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(8)}, "magnitude"),
        (lambda t: {name: tensor for name, tensor in t.items() if name != Q}, "only one of the two"),
        (lambda t: {**t, Q: t[Q][:, :-1]}, "shapes"),
        (lambda t: {**t, Q: t[Q].flatten()}, "shapes"),
        (lambda t: {**t, Q: torch.ones(t[Q].shape, dtype=torch.int32)}, "floats"),
        (lambda t: {}, "empty"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(
    engine: ChatEngine,
    folders: list[Path],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    named: str,
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "copy")
    change_tensors(folder, change)
    with pytest.raises(ModelBroken, match=named):
        engine.load_adapter(folder)


@pytest.mark.parametrize(("base", "named"), [("owner/base-7b", "'owner/base-7b'"), ("a\n" * 999, r"'(a\\n)+a?\\?$")])
def test_matrices_that_do_not_fit_are_refused_with_the_name_of_their_base_model(
    engine: ChatEngine, folders: list[Path], tmp_path: Path, base: str, named: str
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "copy")
    change_tensors(folder, lambda t: {**t, Q: t[Q][:, :-1]})
    change_config(folder, base_model_name_or_path=base)
    with pytest.raises(ModelBroken, match=f"names the base model {named}") as caught:
        engine.load_adapter(folder)
    assert len(str(caught.value)) < 500


def test_an_adapter_with_pickled_weights_is_refused_with_the_way_to_convert_it(
    engine: ChatEngine, folders: list[Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "copy")
    (folder / "adapter_model.bin").write_bytes(b"")
    engine.load_adapter(folder).drop()  # with both, the safetensors are read
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelBroken, match=r"converted to adapter_model.safetensors: .* save_pretrained"):
        engine.load_adapter(folder)


def test_a_rank_or_file_above_the_limit_is_refused(engine: ChatEngine, checkpoint: Path, tmp_path: Path) -> None:
    write_adapter(read_layers(checkpoint), tmp_path / "wide", seed=0, rank=17)
    with pytest.raises(ModelBroken, match="max_rank"):
        engine.load_adapter(tmp_path / "wide")
    write_adapter(read_layers(checkpoint), tmp_path / "large", seed=0)
    with (tmp_path / "large" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    with pytest.raises(ModelBroken, match="more than"):
        engine.load_adapter(tmp_path / "large")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_or_missing_file_is_refused(
    engine: ChatEngine, folders: list[Path], tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "copy")
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])
    with pytest.raises(ModelBroken, match=name):
        engine.load_adapter(folder)
    (folder / name).unlink()
    with pytest.raises(ModelBroken, match=name):
        engine.load_adapter(folder)


def test_models_outside_packed_steps_have_no_adapters(checkpoint: Path, tmp_path: Path, one_thread: None) -> None:
    save(PLAIN["gpt2"](), tmp_path / "gpt2", checkpoint)
    (tmp_path / "gpt2" / "processor_config.json").unlink()
    with pytest.raises(SettingsError, match="packed steps"):
        open_engine(WITH_ADAPTERS, tmp_path / "gpt2", None)

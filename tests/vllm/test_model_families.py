"""Vision families on vLLM answer as transformers does: tiny random checkpoints, on the CPU and in float32."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from handlers.engine.open_engine import open_engine
from handlers.settings.engine import EngineSettings
from handlers.settings.handler import HandlerSettings
from handlers.settings.model import ModelSettings
from handlers.settings.session import ChatSessionSettings
from handlers.settings.vllm import VllmSettings
from tests.torchserve.drawings import draw_image
from tests.unit.handlers.engine_contract import Contender
from tests.vllm.rename_weights import copy_renamed
from tests.vllm.tiny_families import ANSWERING, FAMILIES

NUM_TOKENS = 16
SETTINGS = HandlerSettings(
    model=ModelSettings(dtype="float32"),
    session=ChatSessionSettings(kv_bytes=128 << 20),
    engine=EngineSettings(name="vllm", max_context_tokens=1024),
    vllm=VllmSettings(enforce_eager=True, options={"block_size": 32}),
)


@pytest.fixture(scope="module", params=ANSWERING)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contender]:
    """Start vLLM on a family's checkpoint."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    FAMILIES[request.param](folder)
    served = copy_renamed(folder, folder.with_name("served")) if request.param == "llava_onevision" else folder
    prompts, engine = open_engine(SETTINGS, served, None)
    engine.start()
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    yield Contender(engine, prompts, reference, AutoProcessor.from_pretrained(folder))
    engine.stop()


def conversation(num_pictures: int) -> list[dict[str, Any]]:
    """Return a conversation of one question, or one for each image, before which a line may end."""
    text = {"type": "text", "text": "Which shape is this?"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*[{"type": "image"}] * (num_pictures > 0), text]}]
    for _ in range(num_pictures - 1):
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": "The circle is red."}]},
            {"role": "user", "content": [{"type": "text", "text": "And this:\n"}, {"type": "image"}, text]},
        ]
    return messages


def compare(
    family: Contender, pictures: Sequence[Image.Image], messages: list[dict[str, Any]] | None = None
) -> list[int]:
    """Return vLLM's answer after comparing it with that of transformers."""
    messages = messages or conversation(len(pictures))
    answer = family.answer(messages, pictures, max_new_tokens=NUM_TOKENS)
    assert answer == family.generate(messages, pictures, NUM_TOKENS)
    return answer


def test_answers_with_images_are_those_of_transformers(family: Contender) -> None:
    """Answers with none, one, or two images of different sizes equal transformers', and depend on the images."""
    red, blue = draw_image("ellipse", "red"), draw_image("rectangle", "blue").resize((160, 96))

    answers = [compare(family, pictures) for pictures in ([], [red], [blue], [red, blue], [blue, red])]

    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert all(len(set(answer)) > 3 for answer in answers)


@pytest.mark.parametrize("family", ["internvl", "llava_onevision"], indirect=True)
def test_frames_of_a_video_are_images_of_one_message(family: Contender) -> None:
    """A video is sent as its frames; the answer is that of transformers and depends on their order."""
    frames = [draw_image("ellipse", color) for color in ("red", "green", "blue", "yellow")]
    question = [{"type": "text", "text": "Which colour comes last?"}]
    messages = [{"role": "user", "content": [*[{"type": "image"}] * len(frames), *question]}]

    assert compare(family, frames, messages) != compare(family, frames[::-1], messages)

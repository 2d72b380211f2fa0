"""Prompts with images have the token ids of transformers' own processor on vLLM, in every family."""

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoProcessor
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import renderer_from_config

from handlers.engine.open_engine import open_engine
from handlers.engine.vllm.images import VllmImage, make_prompt
from handlers.engine.vllm.start import make_arguments, prepare_environment, read_prompts
from handlers.errors import SettingsError
from tests.torchserve.drawings import draw_image
from tests.unit.handlers.engine_contract import place
from tests.vllm.test_model_families import SETTINGS, conversation
from tests.vllm.tiny_families import FAMILIES


class Family:
    """A family's checkpoint: the product's prompts, vLLM's reader of them, and transformers' processor."""

    def __init__(self, name: str, folder: Path) -> None:
        FAMILIES[name](folder)
        arguments = make_arguments(SETTINGS, folder)
        self.prompts = read_prompts(folder, arguments)
        self.prompts.max_context = 1024
        self.renderer: Any = renderer_from_config(AsyncEngineArgs(**arguments).create_engine_config())
        self.processor: Any = AutoProcessor.from_pretrained(folder)

    def encode(self, picture: Image.Image) -> VllmImage:
        prompt = {"prompt_token_ids": [self.prompts.image_token_id], "multi_modal_data": {"image": [picture]}}
        [found] = self.renderer.process_for_engine(prompt, time.time())["mm_placeholders"]["image"]
        return VllmImage(picture, found.length)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    prepare_environment(SETTINGS, None, os.environ)
    family = Family(request.param, tmp_path_factory.mktemp("checkpoint") / request.param)
    yield family
    family.renderer.shutdown()


@pytest.mark.parametrize("num_pictures", [0, 1, 2])
def test_prompts_have_the_token_ids_of_transformers(family: Family, num_pictures: int) -> None:
    """Marks around an image and its number of tokens, which may depend on its size, equal transformers'."""
    pictures = [draw_image("ellipse", "red"), draw_image("rectangle", "blue").resize((160, 96))][:num_pictures]
    messages = conversation(num_pictures)
    encoded = [family.encode(picture) for picture in pictures]

    keys, placed = place(family.prompts, messages, encoded, count(1))
    prompt = make_prompt(keys, placed, family.prompts.image_token_id, "scope")
    found = family.renderer.process_for_engine(prompt, time.time())

    text = family.prompts.template.render(messages)
    [expected] = family.processor(text=text, images=pictures or None)["input_ids"]
    assert found["prompt_token_ids"] == expected


def test_an_image_in_a_raw_prompt_has_the_marks_of_a_template(family: Family) -> None:
    """A raw prompt with an image is the beginning of a conversation with it."""
    picture = draw_image("ellipse", "red")
    message = {"role": "user", "content": [{"type": "image"}]}
    rendered = family.prompts.render([message], [len(family.encode(picture))])

    raw = family.prompts.encode_prompt(["<s><|user|>", None], [len(family.encode(picture))])

    assert raw == rendered[: len(raw)]


def test_images_whose_tokens_attend_to_each_other_are_refused_on_a_cpu(tmp_path: Path) -> None:
    """Such a family is refused on a CPU, where vLLM's attention would give other answers without an error."""
    FAMILIES["gemma3"](tmp_path)

    with pytest.raises(SettingsError, match=r"gemma3.* needs a GPU"):
        open_engine(SETTINGS, tmp_path, None)

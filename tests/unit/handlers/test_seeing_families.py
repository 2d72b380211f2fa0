"""Tiny random checkpoints of vision families: images and text give transformers' answers."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from handlers.engine.builtin.kv_cache import BLOCK
from handlers.engine.contract import PlacedImage
from handlers.models.llava import Pixels
from handlers.models.loader import load_model
from handlers.models.processor import scaled_side
from tests.torchserve.drawings import draw_image, encoded
from tests.unit.handlers.tiny_checkpoints import CPU, GQA, WORKING, generate, save, seeing_config


def qwen2() -> Any:
    """Return a language model's configuration with a context for many image tokens."""
    return hf.Qwen2Config(**{**GQA, "max_position_embeddings": 1024})


def use_any_resolution(where: Path, family: str) -> None:
    """Convert the demo's image processor to the family's form, which cuts images into patches."""
    config = json.loads((where / "processor_config.json").read_text())
    (where / "processor_config.json").unlink()
    own = config["image_processor"]
    side = own["size"]["height"]
    own["image_grid_pinpoints"] = [[side, side], [side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    own["image_processor_type"] = {
        "llava_next": "LlavaNextImageProcessor",
        "llava_onevision": "LlavaOnevisionImageProcessor",
    }[family]
    (where / "preprocessor_config.json").write_text(json.dumps(own))


def compare_with_generate(model: Any, own: Any, pictures: list[Any]) -> None:
    """Compare batched prompts with one image, both or none with transformers on each alone."""
    pixels = [model.preprocess(picture) for picture in pictures]
    features = [model.encode_image(p) for p in pixels]
    start, middle, end = [1, 50, 51], [70, 71], [60, 61, 62, 63]
    spots = [[-9 - i] * len(features[i]) for i in range(2)]
    prompts = [
        [*start, *spots[0], *end],
        [*start, *spots[1], *end],
        [*start, *spots[0], *middle, *spots[1], *end],
        [*start, *end],
    ]
    second = 3 + len(features[0]) + len(middle)
    spans = [
        [PlacedImage(3, features[0])],
        [PlacedImage(3, features[1])],
        [PlacedImage(3, features[0]), PlacedImage(second, features[1])],
        [],
    ]

    found, num_shared = generate(model, prompts, spans, 8, num_blocks=256)

    assert found[0] != found[1]
    assert num_shared <= (3 + len(features[0])) // BLOCK * BLOCK  # the same image's blocks alone
    for prompt, output, shown in zip(prompts, found, [pixels[:1], pixels[1:], pixels, []], strict=True):
        inputs = {"input_ids": torch.tensor([[model.image_token_id if token < 0 else token for token in prompt]])}
        if shown:
            inputs |= as_transformers_takes(shown)
        with torch.inference_mode():
            expected = own.generate(**inputs, do_sample=False, max_new_tokens=8)
        assert output == expected[0, len(prompt) :].tolist()[: len(output)]


def as_transformers_takes(shown: list[Any]) -> dict[str, Any]:
    """Stack several images of a prompt as transformers does, padding those with fewer patches."""
    if not isinstance(shown[0], Pixels):
        return {"pixel_values": torch.cat(shown)}
    longest = max(p.values.shape[1] for p in shown)
    filled = [torch.nn.functional.pad(p.values, (0, 0) * 3 + (0, longest - p.values.shape[1])) for p in shown]
    return {"pixel_values": torch.cat(filled), "image_sizes": torch.tensor([p.size for p in shown])}


@pytest.mark.parametrize("family", ["llava", "vipllava", "llava_next", "llava_onevision"])
def test_family_that_sees_answers_as_in_transformers(
    family: str, tmp_path: Path, checkpoint: Path, one_thread: None
) -> None:
    """A wide and a tall image, cut into patches according to their shape, work alone and together."""
    own = save(seeing_config(family, qwen2(), checkpoint), tmp_path, checkpoint)
    if family in ("llava_next", "llava_onevision"):
        use_any_resolution(tmp_path, family)

    model = load_model(tmp_path, CPU, "float32")

    assert model.image_side == (None if family in ("llava_next", "llava_onevision") else 112)
    pictures = [draw_image("ellipse", "red").resize((150, 60)), draw_image("rectangle", "blue").resize((90, 130))]
    compare_with_generate(model, own, pictures)


@pytest.mark.parametrize(
    ("given", "side"),
    [
        ({"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}, 336),
        ({"size": {"shortest_edge": 224}, "crop_size": {"height": 256, "width": 192}}, 256),
        ({"size": {"height": 384, "width": 192}, "do_center_crop": False}, 384),
        ({"do_resize": False}, None),
    ],
)
def test_side_of_images_is_read_from_the_image_processor(given: dict[str, Any], side: int | None) -> None:
    """The side is the longest that the processor scales or crops to, so that no reduced image is enlarged again."""
    assert scaled_side(CLIPImageProcessorPil(**given)) == side


@pytest.mark.parametrize("family", ["mistral-window", "llama-gqa"])
def test_llava_on_other_language_models(family: str, tmp_path: Path, checkpoint: Path, one_thread: None) -> None:
    """The vision tower works with each kind of attention."""
    own = save(seeing_config("llava", WORKING[family](), checkpoint), tmp_path, checkpoint)

    compare_with_generate(
        load_model(tmp_path, CPU, "float32"), own, [draw_image("ellipse", "red"), draw_image("rectangle", "blue")]
    )


@pytest.mark.parametrize("form", ["chat_template.json", "tokenizer_config.json"])
def test_older_forms_of_the_chat_template_are_read(form: str, tmp_path: Path, checkpoint: Path) -> None:
    """Checkpoints of several years store the template in different places."""
    save(seeing_config("llava", qwen2(), checkpoint), tmp_path, checkpoint)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    old = json.loads((tmp_path / form).read_text()) if (tmp_path / form).is_file() else {}
    (tmp_path / form).write_text(json.dumps({**old, "chat_template": template}))

    model = load_model(tmp_path, CPU, "float32")

    assert model.processor.chat_template == template


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_a_session_on_an_image_of_any_shape(family: str, tmp_path: Path, checkpoint: Path, make_client: Any) -> None:
    """A session on an image of any shape answers as transformers does."""
    own = save(seeing_config(family, qwen2(), checkpoint), tmp_path, checkpoint)
    use_any_resolution(tmp_path, family)
    model: Any = load_model(tmp_path, CPU, "float32")
    picture = draw_image("ellipse", "red").resize((150, 60))
    client = make_client(model)

    sid = client.open(base64.b64encode(encoded(picture)).decode())
    found = client.answer(sid, "hello", parameters={"max_new_tokens": 6})

    pixels = model.preprocess(picture)
    question = [{"type": "image"}, {"type": "text", "text": "hello"}]
    ids = model.render([{"role": "user", "content": question}], [len(model.encode_image(pixels))])
    with torch.inference_mode():
        output = own.generate(
            input_ids=torch.tensor([ids]), **as_transformers_takes([pixels]), do_sample=False, max_new_tokens=6
        )[0, len(ids) :]
    assert found == model.tokenizer.decode(output, skip_special_tokens=True)

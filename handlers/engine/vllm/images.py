"""Images and prompts in the form that vLLM reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from handlers.engine.contract import PlacedImage


@dataclass(frozen=True, slots=True)
class VllmImage:
    """Implements `ImageFeatures`: the decoded image, which vLLM's processor and vision tower read."""

    image: Image
    num_tokens: int

    @property
    def nbytes(self) -> int:
        return self.image.width * self.image.height * len(self.image.getbands())

    def __len__(self) -> int:
        return self.num_tokens


def make_prompt(
    keys: Sequence[int], images: Sequence[PlacedImage], image_token_id: int | None, scope: str
) -> dict[str, Any]:
    """Return vLLM's prompt: one placeholder for each image, which vLLM expands, and each image by its key.

    keys: see `AnswerRequest`; images: all of the prompt's. vLLM shares a computed prefix only between prompts of
    one scope. It reads each image once, and recognises it by its key afterwards.
    """
    ids: list[int] = []
    names: list[str] = []
    position = 0
    for each in images:
        assert image_token_id is not None
        ids += [*keys[position : each.start], image_token_id]
        names.append(str(keys[each.start]))
        position = each.start + len(each.features)
    ids += keys[position:]
    prompt: dict[str, Any] = {"prompt_token_ids": ids, "cache_salt": scope}
    if images:
        prompt["multi_modal_data"] = {"image": [_own(each).image for each in images]}
        prompt["multi_modal_uuids"] = {"image": names}
    return prompt


def _own(placed: PlacedImage) -> VllmImage:
    assert isinstance(placed.features, VllmImage)  # the engine's `encode` has returned it
    return placed.features

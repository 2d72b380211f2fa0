"""Pictures and prompts in the form that vLLM reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image as Picture

from handlers.engine.contract import PlacedPicture


@dataclass(frozen=True, slots=True)
class VllmPicture:
    """Implements `PictureFeatures`: the decoded picture, which vLLM's processor and vision tower read."""

    picture: Picture
    num_tokens: int

    @property
    def nbytes(self) -> int:
        return self.picture.width * self.picture.height * len(self.picture.getbands())

    def __len__(self) -> int:
        return self.num_tokens


def make_prompt(
    keys: Sequence[int], pictures: Sequence[PlacedPicture], image_token_id: int | None, scope: str
) -> dict[str, Any]:
    """Return vLLM's prompt: one placeholder for each picture, which vLLM expands, and each picture by its key.

    keys: see `AnswerRequest`; pictures: all of the prompt's. vLLM shares a computed beginning only between prompts of
    one scope. It reads each picture once, and knows it by its key afterwards.
    """
    ids: list[int] = []
    names: list[str] = []
    position = 0
    for each in pictures:
        assert image_token_id is not None
        ids += [*keys[position : each.start], image_token_id]
        names.append(str(keys[each.start]))
        position = each.start + len(each.features)
    ids += keys[position:]
    prompt: dict[str, Any] = {"prompt_token_ids": ids, "cache_salt": scope}
    if pictures:
        prompt["multi_modal_data"] = {"image": [_own(each).picture for each in pictures]}
        prompt["multi_modal_uuids"] = {"image": names}
    return prompt


def _own(placed: PlacedPicture) -> VllmPicture:
    assert isinstance(placed.features, VllmPicture)  # the engine's `encode` has returned it
    return placed.features

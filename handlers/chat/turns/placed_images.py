"""The images of one prompt: their positions, and their pins until the engine has read them."""

from collections.abc import Callable
from functools import partial

from handlers.chat.images.store import Image, ImageStore, ImageTier
from handlers.chat.turns.question import Prompt
from handlers.engine.contract import PlacedImage


class PlacedImages:
    """Pins images for the engine, and remembers the tiers in which they were found."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._pinned: list[Image] = []
        self._tiers: list[tuple[int, ImageTier]] = []  # of pinned images, with their ends in the prompt

    def pin(
        self, prompt: Prompt, starts: list[int], num_cached: int, fetch: Callable[[Image], bytes]
    ) -> list[PlacedImage]:
        """Pin the features of images that are not wholly in the KV cache. fetch: reads encoded bytes from the journal.

        Raises OutOfMemory, and what `fetch` raises; images that are already pinned stay pinned.
        """
        self._tiers, placed = [], []
        for image, start in zip(prompt.images, starts, strict=True):
            end = start + image.num_tokens
            if end > num_cached:
                features, tier = self._store.pin(image, partial(fetch, image))
                self._pinned.append(image)
                self._tiers.append((end, tier))
                placed.append(PlacedImage(start, features))
        return placed

    def name_tier(self, num_cached: int, *, is_restored: bool) -> str:
        """Return the name of the slowest tier that was needed.

        num_cached: positions that were found in the KV cache.
        """
        tiers = {tier for end, tier in self._tiers if end > num_cached}
        if not tiers:
            return "stored-kv" if is_restored else "kv" if num_cached else "none"
        return max(tiers, key=list(ImageTier).index).value

    def release(self) -> None:
        """Remove the pins. Any thread; once for each pin."""
        while self._pinned:
            self._store.unpin(self._pinned.pop())


def place_images(prompt: Prompt, image_token_id: int | None) -> tuple[list[int], list[int]]:
    """Return the prompt's keys, with an image's key at each of its positions, and the start of each image."""
    keys, starts, start = list(prompt.ids), [], 0
    for image in prompt.images:
        assert image_token_id is not None
        start = keys.index(image_token_id, start)
        keys[start : start + image.num_tokens] = [image.key] * image.num_tokens
        starts.append(start)
    return keys, starts

"""The messages of a conversation that a client sends whole, and the images that a raw prompt mentions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ImageReference = bytes | str  # an image's own bytes, an http(s) address, a data URL or base64 text

# Text Generation Inference's way to put an image into a prompt. Only what can be an image's address counts.
_MARKDOWN_IMAGE = re.compile(r"!\[\]\(((?:https?://|data:image/)[^\s)]+)\)")


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    reference: ImageReference


Part = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class Message:
    """role: system, user or assistant."""

    role: str
    parts: tuple[Part, ...]

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates want it: what is said, and where an image stands."""
        content = [
            {"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"} for p in self.parts
        ]
        return {"role": self.role, "content": content}


def images_of(parts: Sequence[Part]) -> tuple[ImageReference, ...]:
    """The images among the parts, in order."""
    return tuple(part.reference for part in parts if isinstance(part, ImagePart))


def split_images(prompt: str) -> tuple[Part, ...]:
    """A raw prompt with `![](address)` in it as text and images, in order. For models that see."""
    parts: list[Part] = []
    end = 0
    for found in _MARKDOWN_IMAGE.finditer(prompt):
        if found.start() > end:
            parts.append(TextPart(prompt[end : found.start()]))
        parts.append(ImagePart(found[1]))
        end = found.end()
    if end < len(prompt) or not parts:
        parts.append(TextPart(prompt[end:]))
    return tuple(parts)

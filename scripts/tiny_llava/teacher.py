"""Trains the vision tower with auxiliary heads that predict labels of each patch.

A patch that an object covers, or that contains an object's center, owns it. It must predict the object's color, shape,
size, cell and box, and how many objects share its color, its shape and both. Each patch must predict the scene's number
of objects and its background. The boxes make shapes learnable: patches must agree on the object's edges, which gives a
gradient from the first step. The heads are discarded after training; the language model finds the information in the
patch features.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .render import IMAGE_SIZE
from .scenes import BACKGROUND_NAMES, CELLS, COLORS, MAX_THINGS, SHAPES, SIZES, Scene

PATCH_SIZE = 16
GRID = IMAGE_SIZE // PATCH_SIZE
NUM_PATCHES = GRID * GRID
IGNORED = -100
MIN_COVERED = 0.25  # share of a patch that an object's box must cover for the patch to own the object
MIN_TOUCHED = 0.02  # below this share a patch counts as empty; between the two it has no label

MAX_ALIKE = 4
NUM_BOX_SIDES = 4
BOX_WEIGHT = 2.0
QUESTIONS: dict[str, int] = {
    "owns": 2,
    "is_center": 2,
    "color": len(COLORS),
    "shape": len(SHAPES),
    "size": len(SIZES),
    "cell": len(CELLS),
    "same_color": MAX_ALIKE,
    "same_shape": MAX_ALIKE,
    "same_both": MAX_ALIKE,
    "num_things": MAX_THINGS,
    "background": len(BACKGROUND_NAMES),
}
LOSS_WEIGHTS = {
    "owns": 2.0,
    "is_center": 3.0,
    "num_things": 1.5,
    "color": 1.5,
    "shape": 1.5,
    "background": 0.5,
}

_COLOR_INDEX = {name: i for i, name in enumerate(COLORS)}
_SHAPE_INDEX = {name: i for i, name in enumerate(SHAPES)}
_SIZE_INDEX = {name: i for i, name in enumerate(SIZES)}
_BACKGROUND_INDEX = {name: i for i, name in enumerate(BACKGROUND_NAMES)}


def interval_overlaps(low: float, high: float) -> np.ndarray:
    """Return the share of each interval of the grid that lies between low and high: (GRID,)."""
    edges = np.arange(GRID + 1) / GRID
    overlaps: np.ndarray = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)
    return overlaps * GRID


@dataclass(frozen=True, slots=True)
class PatchLabels:
    """The labels of a scene's patches.

    classes: (len(QUESTIONS), NUM_PATCHES) int64, IGNORED for a patch without this label.
    boxes: (NUM_PATCHES, 4) float32: offset from the patch's center to the object's, in patches, and twice the log
    extents; valid only for patches that own an object.
    """

    classes: np.ndarray
    boxes: np.ndarray


def patch_labels(scene: Scene) -> PatchLabels:
    """Return the labels of all patches of a scene."""
    names = list(QUESTIONS)
    labels = np.full((len(names), GRID, GRID), IGNORED, dtype=np.int64)
    row = {name: labels[i] for i, name in enumerate(names)}
    row["owns"][:] = 0
    row["is_center"][:] = 0
    row["num_things"][:] = len(scene.things) - 1
    if scene.background is not None:
        row["background"][:] = _BACKGROUND_INDEX[scene.background]
    best = np.full((GRID, GRID), MIN_COVERED)
    boxes = np.zeros((GRID, GRID, NUM_BOX_SIDES), dtype=np.float32)
    rows, columns = np.mgrid[:GRID, :GRID] + 0.5
    for thing in scene.things:
        covered = np.outer(
            interval_overlaps(thing.y - thing.height / 2, thing.y + thing.height / 2),
            interval_overlaps(thing.x - thing.width / 2, thing.x + thing.width / 2),
        )
        center = min(GRID - 1, int(thing.y * GRID)), min(GRID - 1, int(thing.x * GRID))
        row["owns"][(covered > MIN_TOUCHED) & (row["owns"] == 0)] = IGNORED
        covered[center] = 2.0
        owned = covered > best
        best = np.maximum(best, covered)
        answers = {
            "owns": 1,
            "color": _COLOR_INDEX[thing.color],
            "shape": _SHAPE_INDEX[thing.shape],
            "size": IGNORED if thing.size is None else _SIZE_INDEX[thing.size],
            "cell": IGNORED if thing.cell is None else thing.cell,
            "same_color": min(MAX_ALIKE, sum(o.color == thing.color for o in scene.things)) - 1,
            "same_shape": min(MAX_ALIKE, sum(o.shape == thing.shape for o in scene.things)) - 1,
            "same_both": min(MAX_ALIKE, sum(o.name == thing.name for o in scene.things)) - 1,
        }
        for name, answer in answers.items():
            row[name][owned] = answer
        row["is_center"][center] = 1
        boxes[owned, 0] = (thing.x * GRID - columns)[owned]
        boxes[owned, 1] = (thing.y * GRID - rows)[owned]
        boxes[owned, 2:] = 2 * math.log(thing.width), 2 * math.log(thing.height)
    return PatchLabels(labels.reshape(len(names), NUM_PATCHES), boxes.reshape(NUM_PATCHES, NUM_BOX_SIDES))


@dataclass(frozen=True, slots=True)
class Lesson:
    """The teacher's loss, and the accuracy of each head."""

    loss: Tensor
    accuracies: dict[str, float]


class Teacher(nn.Module):
    """Linear heads over the patch features, one for each label."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sum(QUESTIONS.values()))
        self.box_head = nn.Linear(width, NUM_BOX_SIDES)

    def forward(self, features: Tensor, labels: Tensor, boxes: Tensor, *, with_accuracies: bool = False) -> Lesson:
        """Return the loss. features: (B, NUM_PATCHES, width); labels, boxes: batches of PatchLabels' fields."""
        features = self.norm(features)
        answers = self.head(features).flatten(0, 1).split(list(QUESTIONS.values()), dim=-1)
        is_owner = labels[:, list(QUESTIONS).index("owns")] == 1
        loss = BOX_WEIGHT * functional.smooth_l1_loss(self.box_head(features)[is_owner], boxes[is_owner])
        accuracies = {}
        for i, (name, logits) in enumerate(zip(QUESTIONS, answers, strict=True)):
            label = labels[:, i].reshape(-1)
            loss = loss + LOSS_WEIGHTS.get(name, 1.0) * functional.cross_entropy(logits, label, ignore_index=IGNORED)
            if with_accuracies:
                asked = label != IGNORED
                accuracies[name] = (logits.argmax(-1) == label)[asked].float().mean().item()
        return Lesson(loss, accuracies)

    def scenes_right(self, features: Tensor, labels: Tensor) -> float:
        """Return the share of images in which all centers, and the colors, shapes and cells there, are right."""
        answers = self.head(self.norm(features)).split(list(QUESTIONS.values()), dim=-1)
        right = torch.ones(len(features), dtype=torch.bool)
        is_center = labels[:, list(QUESTIONS).index("is_center")] == 1
        for i, (name, logits) in enumerate(zip(QUESTIONS, answers, strict=True)):
            wrong = (logits.argmax(-1) != labels[:, i]) & (labels[:, i] != IGNORED)
            if name in ("color", "shape", "cell"):
                right &= ~(wrong & is_center).any(-1)
            elif name == "is_center":
                right &= ~wrong.any(-1)
        return right.float().mean().item()

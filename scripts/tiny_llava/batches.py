"""Makes training batches, each from its own seed, so that they do not depend on the number of worker processes."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from .build import ASSISTANT, BOS, END, IMAGE, USER, token_id
from .conversations import EVEN_MIXTURE, converse, typed
from .render import render_input
from .scenes import Scene, sample_scene
from .teacher import IGNORED, NUM_PATCHES, patch_labels

P_IMAGE_LAST = 0.15
P_SECOND_IMAGE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The contents of a stage's batches.

    num_turns: 0 means images only. dialogue_share: the share of batches in which each turn sees the turns before it; in
    the others each turn sees only the image, like the first question of most users. easy_steps: number of first steps
    with easy scenes.
    """

    num_scenes: int
    num_turns: int = 0
    dialogue_share: float = 0.0
    easy_steps: int = 0
    mixture: Mapping[str, float] = field(default_factory=lambda: EVEN_MIXTURE)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of B images and N conversations.

    pixels: (B, 3, 112, 112) uint8; labels: (B, Q, P) and boxes: (B, P, 4), for the teacher. The other tensors are
    (N, L), or None without conversations.
    """

    pixels: Tensor
    labels: Tensor
    boxes: Tensor
    ids: Tensor | None = None
    targets: Tensor | None = None
    segments: Tensor | None = None
    positions: Tensor | None = None


class Transcript:
    """A growing conversation: id, target, segment and position of each token."""

    def __init__(self, encode: "Encoder") -> None:
        self.encode = encode
        self.ids: list[int] = []
        self.targets: list[int] = []
        self.segments: list[int] = []
        self.positions: list[int] = []

    def add(self, ids: list[int], *, segment: int, start: int, is_target: bool = False) -> None:
        self.ids += ids
        self.targets += ids if is_target else [IGNORED] * len(ids)
        self.segments += [segment] * len(ids)
        self.positions += range(start, start + len(ids))

    def add_turn(self, question: list[int], answer: str, *, segment: int, start: int) -> None:
        prompt = [*question, self.encode.end, self.encode.assistant]
        self.add(prompt, segment=segment, start=start)
        self.add(
            [*self.encode(answer), self.encode.end],
            segment=segment,
            start=start + len(prompt),
            is_target=True,
        )


class Encoder:
    """Converts texts to token ids, with a cache, since the sentences are few."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.pad = tokenizer.pad_token_id
        self.bos, self.end, self.image, self.user, self.assistant = (
            token_id(tokenizer, token) for token in (BOS, END, IMAGE, USER, ASSISTANT)
        )
        self.encode = lru_cache(maxsize=20_000)(lambda text: tokenizer(text, add_special_tokens=False).input_ids)

    def __call__(self, text: str) -> list[int]:
        return list(self.encode(text))


def separate_turns(rng: random.Random, scene: Scene, encode: Encoder, plan: BatchPlan) -> Transcript:
    """Make a transcript whose turns see the image but not each other: the image is segment 0, each turn another one."""
    transcript = Transcript(encode)
    prefix = [encode.bos, encode.user] + [encode.image] * NUM_PATCHES
    transcript.add(prefix, segment=0, start=0)
    for number, turn in enumerate(converse(rng, scene, plan.num_turns, p_follow=0.0, mixture=plan.mixture), start=1):
        transcript.add_turn(encode(typed(rng, turn.text)), turn.answer, segment=number, start=len(prefix))
    return transcript


def dialogue(rng: random.Random, scenes: list[Scene], encode: Encoder, plan: BatchPlan) -> Transcript:
    """Make a transcript of one conversation, in which a second image may follow; all of it is segment 0."""
    transcript = Transcript(encode)
    transcript.add([encode.bos], segment=0, start=0)
    for scene in scenes:
        image = [encode.image] * NUM_PATCHES
        for turn in converse(rng, scene, max(2, plan.num_turns // len(scenes)), mixture=plan.mixture):
            text = encode(typed(rng, turn.text))
            question = [encode.user, *(text + image if rng.random() < P_IMAGE_LAST else image + text)]
            transcript.add_turn(question, turn.answer, segment=0, start=len(transcript.ids))
            image = []
    return transcript


def padded(rows: list[list[int]], filler: int) -> Tensor:
    length = -(-max(map(len, rows)) // 8) * 8
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])


class Batches(Dataset[Batch]):
    """The batches of a stage; batch i depends only on the seed and i."""

    def __init__(self, plan: BatchPlan, tokenizer: PreTrainedTokenizerFast, *, seed: str, num_steps: int) -> None:
        self.plan, self.encode, self.seed, self.num_steps = plan, Encoder(tokenizer), seed, num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> Batch:
        rng = random.Random(f"{self.seed}/{step}")
        plan, is_easy = self.plan, step < self.plan.easy_steps
        is_dialogue = rng.random() < plan.dialogue_share
        conversations = []
        for _conversation in range(plan.num_scenes):
            num_scenes = 2 if is_dialogue and rng.random() < P_SECOND_IMAGE else 1
            conversations.append([sample_scene(rng, is_easy=is_easy) for _scene in range(num_scenes)])
        scenes = [scene for group in conversations for scene in group]
        pixels = np.stack([np.asarray(render_input(scene, rng)) for scene in scenes])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        labels = [patch_labels(scene) for scene in scenes]
        classes = torch.from_numpy(np.stack([label.classes for label in labels]))
        boxes = torch.from_numpy(np.stack([label.boxes for label in labels]))
        if plan.num_turns == 0:
            return Batch(images, classes, boxes)
        transcripts = [
            dialogue(rng, group, self.encode, plan) if is_dialogue else separate_turns(rng, group[0], self.encode, plan)
            for group in conversations
        ]
        return Batch(
            images,
            classes,
            boxes,
            ids=padded([t.ids for t in transcripts], self.encode.pad),
            targets=padded([t.targets for t in transcripts], IGNORED),
            segments=padded([t.segments for t in transcripts], -1),
            positions=padded([t.positions for t in transcripts], 0),
        )


def one_thread(_worker: int) -> None:
    torch.set_num_threads(1)


def load(batches: Batches, first_step: int = 0) -> Iterator[Batch]:
    """Return the batches in order, made by another process."""
    steps = range(first_step, len(batches))
    return iter(
        DataLoader(
            batches,
            batch_size=None,
            sampler=steps,
            num_workers=1,
            prefetch_factor=4,
            worker_init_fn=one_thread,
        )
    )

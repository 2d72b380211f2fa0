"""Runs the stages of training.

1. Vision: only the vision tower learns, from the teacher's labels of each patch.
2. Language: the whole model learns the answers. The tower learns slowly, and still from its teacher, too.
3. Hard language: the same with more of the questions that are learned last, while the learning rate falls.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from .batches import Batch, Batches, BatchPlan, load
from .build import TEXT_WIDTH, VISION_WIDTH, build_model, build_processor, build_tokenizer, save_checkpoint
from .conversations import HARD_MIXTURE
from .muon import Muon
from .teacher import IGNORED, Teacher

LOG_EVERY = 20
SAVE_EVERY = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The batches, the length and the learning rates of one stage."""

    name: str
    plan: BatchPlan
    num_steps: int
    learning_rate: float
    vision_factor: float = 1.0  # of the vision tower's learning rate
    teacher_weight: float = 1.0
    num_warmup_steps: int = 60
    hold_share: float = 0.0  # share of the steps at the full rate, before it falls
    final_factor: float = 0.03

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then the full rate, then half a cosine down to final_factor."""
        progress = max(0.0, step / self.num_steps - self.hold_share) / (1 - self.hold_share)
        cosine = self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * min(1.0, (step + 1) / self.num_warmup_steps) * cosine


VISION = Stage(name="vision", plan=BatchPlan(num_scenes=64, easy_steps=250), num_steps=2000, learning_rate=3e-3)
LANGUAGE = Stage(
    name="language",
    plan=BatchPlan(num_scenes=20, num_turns=12, dialogue_share=0.35, easy_steps=200),
    num_steps=600,
    learning_rate=2.5e-3,
    vision_factor=0.2,
    teacher_weight=0.1,
    final_factor=1.0,
)
HARD_LANGUAGE = Stage(
    name="hard-language",
    plan=BatchPlan(num_scenes=20, num_turns=12, dialogue_share=0.35, mixture=HARD_MIXTURE),
    num_steps=1200,
    learning_rate=2.5e-3,
    vision_factor=0.2,
    teacher_weight=0.1,
    hold_share=0.5,
    final_factor=0.02,
)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether Muon trains this parameter, instead of AdamW.

    It also trains the patch embedding and the projector. All pixels of a plain patch are equal, and the tower's
    features are large, so AdamW's steps, which have the same size for each weight, add up over the inputs. With AdamW,
    the patch embedding disturbed the features of shapes, and the projector grew until it lost the background.
    """
    is_layer = ".layers." in f".{name}" or name in ("linear_1.weight", "linear_2.weight")
    return "patch_embedding" in name or (is_layer and parameter.ndim == 2)


class Optimizer:
    """Muon for the matrices of hidden layers and AdamW for all other parameters, with one learning rate."""

    def __init__(self, modules: Iterable[tuple[nn.Module, float]]) -> None:
        """modules: each with a factor of its learning rate."""
        muon_groups, adamw_groups = [], []
        self.parameters: list[nn.Parameter] = []
        for module, factor in modules:
            named = list(module.named_parameters())
            self.parameters += [parameter for _name, parameter in named]
            hidden = [p for name, p in named if is_hidden_matrix(name, p)]
            hidden_ids = {id(p) for p in hidden}
            rest = [p for _name, p in named if id(p) not in hidden_ids]
            muon_groups += [{"params": hidden, "factor": factor}] if hidden else []
            adamw_groups.append({"params": rest, "factor": factor})
        self.parts = [
            Muon(muon_groups, lr=0.0),
            torch.optim.AdamW(adamw_groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01),
        ]

    def step(self, learning_rate: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate * group["factor"]
            part.step()
            part.zero_grad(set_to_none=True)


def vision_features(model: LlavaForConditionalGeneration, batch: Batch) -> Tensor:
    """Return the features of each patch, without the class token: (B, NUM_PATCHES, VISION_WIDTH)."""
    pixels = batch.pixels.float().div_(127.5).sub_(1)
    features: Tensor = model.model.vision_tower(pixels).last_hidden_state
    return features[:, 1:]


def visible(batch: Batch) -> Tensor:
    """Return the attention mask, (N, 1, L, L) bool: a token sees earlier tokens of its own segment and of segment 0."""
    assert batch.segments is not None
    segments = batch.segments
    is_shared = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    return is_shared.tril()[:, None]


@dataclass(frozen=True, slots=True)
class Answers:
    """The loss over the answers' tokens, and the share of right tokens."""

    loss: Tensor
    accuracy: float


def answer_loss(model: LlavaForConditionalGeneration, projected: Tensor, batch: Batch) -> Answers:
    """Compute the loss of the answers. projected: (B, NUM_PATCHES, TEXT_WIDTH), the projector's output."""
    assert batch.ids is not None
    assert batch.targets is not None
    inner = model.model
    embeddings = inner.get_input_embeddings()(batch.ids)
    is_image = (batch.ids == model.config.image_token_id).unsqueeze(-1)
    embeddings = embeddings.masked_scatter(is_image, projected)
    hidden = inner.language_model(
        inputs_embeds=embeddings, attention_mask=visible(batch), position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    targets = batch.targets[:, 1:]
    is_target = targets != IGNORED
    logits = model.lm_head(hidden[:, :-1][is_target])
    loss = functional.cross_entropy(logits, targets[is_target])
    return Answers(loss, (logits.argmax(-1) == targets[is_target]).float().mean().item())


class Trainer:
    """Runs the stages on one model. Between stages, the state consists of the model and the teachers."""

    def __init__(self, *, seed: int, out: Path, report: Callable[[str], None]) -> None:
        torch.manual_seed(seed)
        self.seed, self.out, self.report = seed, out, report
        tokenizer = build_tokenizer(seed)
        self.processor: LlavaProcessor = build_processor(tokenizer)
        self.model = build_model(tokenizer)
        self.teacher = Teacher(VISION_WIDTH)
        self.second_teacher = Teacher(TEXT_WIDTH)  # of the projector, so that it keeps what answers need

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train_vision(self, stage: Stage) -> None:
        optimizer = Optimizer([(self.model.model.vision_tower, 1.0), (self.teacher, 1.0)])
        self.model.train()
        started = time.monotonic()
        for step, batch in enumerate(self._batches(stage)):
            features = vision_features(self.model, batch)
            is_logged = (step + 1) % LOG_EVERY == 0
            lesson = self.teacher(features, batch.labels, batch.boxes, with_accuracies=is_logged)
            lesson.loss.backward()
            optimizer.step(stage.rate(step))
            if is_logged:
                right = self.teacher.scenes_right(features.detach(), batch.labels)
                details = " ".join(f"{name}={share:.3f}" for name, share in lesson.accuracies.items())
                self.report(
                    f"{stage.name} step={step + 1}/{stage.num_steps} s={time.monotonic() - started:.0f} "
                    f"loss={lesson.loss.item():.3f} scenes={right:.3f} {details}"
                )

    def train_language(self, stage: Stage) -> None:
        inner = self.model.model
        optimizer = Optimizer(
            [
                (inner.vision_tower, stage.vision_factor),
                (self.teacher, stage.vision_factor),
                (inner.multi_modal_projector, 1.0),
                (self.second_teacher, 1.0),
                (inner.language_model, 1.0),  # the output head is tied to its embeddings
            ]
        )
        self.model.train()
        started = time.monotonic()
        for step, batch in enumerate(self._batches(stage)):
            features = vision_features(self.model, batch)
            projected = inner.multi_modal_projector(features)
            answers = answer_loss(self.model, projected, batch)
            lesson = self.teacher(features, batch.labels, batch.boxes)
            second = self.second_teacher(projected, batch.labels, batch.boxes)
            (answers.loss + stage.teacher_weight * (lesson.loss + second.loss)).backward()
            optimizer.step(stage.rate(step))
            if (step + 1) % LOG_EVERY == 0:
                right = self.teacher.scenes_right(features.detach(), batch.labels)
                self.report(
                    f"{stage.name} step={step + 1}/{stage.num_steps} s={time.monotonic() - started:.0f} "
                    f"loss={answers.loss.item():.4f} tokens={answers.accuracy:.4f} scenes={right:.3f}"
                )
            if (step + 1) % SAVE_EVERY == 0:
                self.save()

    def save(self) -> None:
        save_checkpoint(self.model, self.processor, self.out)

    def save_state(self, path: Path) -> None:
        """Save the state for a later stage, in full precision."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: module.state_dict() for name, module in self._modules().items()}, path)

    def load_state(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        for name, module in self._modules().items():
            module.load_state_dict(state[name])

    def _modules(self) -> dict[str, nn.Module]:
        return {"model": self.model, "teacher": self.teacher, "second_teacher": self.second_teacher}

    def _batches(self, stage: Stage) -> Iterable[Batch]:
        tokenizer = self.processor.tokenizer
        return load(Batches(stage.plan, tokenizer, seed=f"{self.seed}/{stage.name}", num_steps=stage.num_steps))

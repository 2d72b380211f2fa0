"""Measures a checkpoint's accuracy by question type: the share of greedy answers that are exactly right.

Loads the checkpoint only with AutoProcessor and AutoModelForImageTextToText, as a user would.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from .conversations import converse
from .plain_drawings import plain_items
from .questions import KINDS, ask
from .render import render
from .scenes import sample_scene

Message = dict[str, object]
BATCH_SIZE = 32
MAX_NEW_TOKENS = 80
HELD_OUT_SEED = 987_654_321
PLAIN_SEED = 2_468
NUM_TURNS = 5


def user(text: str, *, has_image: bool) -> Message:
    parts: list[dict[str, str]] = [{"type": "image"}] if has_image else []
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


@dataclass(frozen=True)
class Case:
    """One question for the model: its type, images, conversation so far, and the right answer."""

    type: str
    images: list[Image.Image]
    messages: list[Message]
    answer: str


@dataclass
class Score:
    """Numbers of right answers and of questions by type, and the wrong answers."""

    right: Counter[str]
    asked: Counter[str]
    mistakes: list[tuple[str, str, str]]

    def table(self) -> str:
        lines = [f"| {kind} | {self.right[kind] / n:.3f} | {n} |" for kind, n in sorted(self.asked.items())]
        total = sum(self.asked.values())
        return "\n".join([*lines, f"| all | {sum(self.right.values()) / total:.3f} | {total} |"])


class Examinee:
    """A loaded checkpoint that answers in batches."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(self, cases: Sequence[Case]) -> list[str]:
        """Return an answer per case, in order. Cases of similar length share a batch."""
        order = sorted(range(len(cases)), key=lambda i: len(str(cases[i].messages)))
        answers = [""] * len(cases)
        for start in range(0, len(order), BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            texts = [self.processor.apply_chat_template(cases[i].messages, add_generation_prompt=True) for i in chosen]
            images = [image for i in chosen for image in cases[i].images]
            inputs = self.processor(images=images, text=texts, padding=True, return_tensors="pt")
            generated = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            new_tokens = generated[:, inputs["input_ids"].shape[1] :]
            for i, text in zip(chosen, self.processor.batch_decode(new_tokens, skip_special_tokens=True), strict=True):
                answers[i] = text.strip()
        return answers

    def score(self, cases: Sequence[Case]) -> Score:
        score = Score(Counter(), Counter(), [])
        for case, given in zip(cases, self.answer(cases), strict=True):
            score.asked[case.type] += 1
            score.right[case.type] += given == case.answer
            if given != case.answer:
                score.mistakes.append((case.type, case.answer, given))
        return score


def single_turn_cases(num_per_kind: int) -> list[Case]:
    """Return held-out scenes of the training renderer, with one question each."""
    rng = random.Random(HELD_OUT_SEED)
    cases = []
    for kind in KINDS:
        num_found = 0
        while num_found < num_per_kind:
            scene = sample_scene(rng)
            question = ask(rng, scene, kind)
            if question is not None:
                image = render(scene, rng)
                cases.append(Case(kind, [image], [user(question.text, has_image=True)], question.answer))
                num_found += 1
    return cases


def plain_cases(num_drawings: int) -> list[Case]:
    """Return the questions about the plain drawings."""
    return [
        Case(item.type, [item.image], [user(item.question, has_image=True)], item.answer)
        for item in plain_items(num_drawings, PLAIN_SEED)
    ]


def second_image_cases(num_conversations: int) -> list[Case]:
    """Return conversations of two correct turns about one image, then a question about another image."""
    rng = random.Random(HELD_OUT_SEED + 1)
    cases = []
    for _conversation in range(num_conversations):
        first, second = sample_scene(rng), sample_scene(rng)
        messages: list[Message] = []
        for turn in converse(rng, first, 2):
            messages += [user(turn.text, has_image=not messages), assistant(turn.answer)]
        question = converse(rng, second, 1)[0]
        messages.append(user(question.text, has_image=True))
        cases.append(Case("second image", [render(first, rng), render(second, rng)], messages, question.answer))
    return cases


def score_dialogues(examinee: Examinee, num_conversations: int) -> Score:
    """Score conversations of five turns, whose histories contain the model's answers."""
    rng = random.Random(HELD_OUT_SEED + 2)
    scenes = [sample_scene(rng) for _conversation in range(num_conversations)]
    images = [render(scene, rng) for scene in scenes]
    turns = [converse(rng, scene, NUM_TURNS, p_follow=0.5) for scene in scenes]
    histories: list[list[Message]] = [[] for _scene in scenes]
    score = Score(Counter(), Counter(), [])
    for number in range(NUM_TURNS):
        cases = []
        for image, history, asked in zip(images, histories, turns, strict=True):
            history.append(user(asked[number].text, has_image=number == 0))
            cases.append(Case(f"turn {number + 1}", [image], list(history), asked[number].answer))
        for case, history, given in zip(cases, histories, examinee.answer(cases), strict=True):
            history.append(assistant(given))
            score.asked[case.type] += 1
            score.right[case.type] += given == case.answer
            if given != case.answer:
                score.mistakes.append((case.type, case.answer, given))
    return score


def evaluate(folder: Path, *, num_per_kind: int, report: Callable[[str], None], num_mistakes: int = 8) -> None:
    """Report a table for each of the four test sets."""
    examinee = Examinee(folder)
    sets: dict[str, Callable[[], Score]] = {
        "plain drawings, independent renderer": lambda: examinee.score(plain_cases(num_per_kind)),
        "held out, single turn": lambda: examinee.score(single_turn_cases(num_per_kind)),
        "held out, five turns": lambda: score_dialogues(examinee, num_per_kind),
        "second image in one conversation": lambda: examinee.score(second_image_cases(num_per_kind)),
    }
    for title, measure in sets.items():
        score = measure()
        report(f"{title}\n| type | exact | asked |\n| --- | --- | --- |\n{score.table()}")
        picked = random.Random(0).sample(score.mistakes, min(num_mistakes, len(score.mistakes)))
        for kind, right, given in picked:
            report(f"  {kind}: right {right!r}, given {given!r}")

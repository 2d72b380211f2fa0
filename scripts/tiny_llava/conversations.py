"""Makes conversations about a scene: questions, follow-ups about "it", greetings, and sloppy typing."""

import random
from collections.abc import Mapping

from .questions import OTHER_NOUNS, Question, a, ask, place
from .scenes import Scene, Thing

GREETINGS = {
    "Hello!": "Hello! Ask me about the shapes in your image.",
    "Hi": "Hello! Ask me about the shapes in your image.",
    "Thanks!": "You are welcome.",
    "Thank you.": "You are welcome.",
}
OFF_TOPIC = (
    "Tell me about the weather.", "What time is it?", "Who are you?", "Tell me a joke.", "What is your name?",
    "How are you?", "Write a poem.", "What is the capital of France?", "Why is the sky blue?",
)  # fmt: skip
OFF_TOPIC_ANSWER = "I can only talk about the shapes in your image."
# Weights of the kinds when drawing. A scene does not allow every kind, so the shares of the questions differ.
EVEN_MIXTURE: Mapping[str, float] = {
    "color": 14,
    "shape": 14,
    "identity": 4,
    "existence": 20,
    "verify": 4,
    "count": 7,
    "count of a kind": 13,
    "position": 15,
    "what is at": 9,
    "size": 6,
    "describe": 7,
    "background": 3,
    "absent": 5,
}
# For the last stage, with more of the kinds that are learned last.
HARD_MIXTURE: Mapping[str, float] = {
    "color": 14,
    "shape": 14,
    "identity": 3,
    "existence": 34,
    "verify": 4,
    "count": 5,
    "count of a kind": 16,
    "position": 18,
    "what is at": 7,
    "size": 6,
    "describe": 9,
    "background": 12,
    "absent": 6,
}
P_CHAT = 0.02
P_OTHER_NOUN = 0.015


def ask_chat(rng: random.Random) -> Question:
    if rng.random() < 0.4:
        return Question("chat", rng.choice(OFF_TOPIC), OFF_TOPIC_ANSWER)
    text = rng.choice(list(GREETINGS))
    return Question("chat", text, GREETINGS[text])


def ask_other_noun(rng: random.Random) -> Question:
    noun = rng.choice(OTHER_NOUNS)
    text = rng.choice((f"Is there {a(noun)}?", f"Do you see {a(noun)}?"))
    return Question("existence", text, f"No, there is no {noun}.")


def ask_about_it(rng: random.Random, thing: Thing) -> Question | None:
    """Return a question that refers to the thing of the previous turn; None if it has no certain answer."""
    kind = rng.choice(("color", "shape", "position", "size"))
    match kind:
        case "color":
            text, answer = "What color is it?", f"It is {thing.color}."
        case "shape":
            text, answer = "What shape is it?", f"It is {a(thing.shape)}."
        case "position" if thing.cell is not None:
            text, answer = "Where is it?", f"It is {place(thing.cell)}."
        case "size" if thing.size is not None:
            text, answer = rng.choice(("How big is it?", "Is it large or small?")), f"It is {thing.size}."
        case _:
            return None
    if rng.random() < 0.3:
        text = f"And {text[0].lower()}{text[1:]}"
    return Question(f"follow-up: {kind}", text, answer, thing)


def typed(rng: random.Random, text: str) -> str:
    """Return the text as users may type it: with British spelling, short forms, or without capitals or punctuation."""
    if rng.random() < 0.12:
        text = text.replace("color", "colour")
    if rng.random() < 0.08:
        text = text.replace("What is ", "What's ")
    kind = rng.random()
    if kind < 0.12:
        text = text[0].lower() + text[1:]
    if 0.06 < kind < 0.18:
        text = text.rstrip("?.")
    if 0.18 < kind < 0.20:
        text = text.upper()
    return text


def sample_question(rng: random.Random, scene: Scene, mixture: Mapping[str, float]) -> Question:
    """Return a question of a random kind that the scene allows."""
    while True:
        question = ask(rng, scene, rng.choices(list(mixture), list(mixture.values()))[0])
        if question is not None:
            return question


def converse(
    rng: random.Random,
    scene: Scene,
    num_turns: int,
    *,
    p_follow: float = 0.3,
    mixture: Mapping[str, float] = EVEN_MIXTURE,
) -> list[Question]:
    """Return a conversation of num_turns questions and answers. p_follow: share of questions about "it"."""
    turns: list[Question] = []
    subject: Thing | None = None
    while len(turns) < num_turns:
        question: Question | None
        if subject is not None and rng.random() < p_follow:
            question = ask_about_it(rng, subject)
        elif rng.random() < P_CHAT:
            question = ask_chat(rng)
        elif rng.random() < P_OTHER_NOUN:
            question = ask_other_noun(rng)
        else:
            question = sample_question(rng, scene, mixture)
        if question is not None:
            turns.append(question)
            subject = question.subject
    return turns

"""Log probabilities of an answer's tokens, as OpenAI's chat completions and responses show them."""

from collections.abc import Sequence
from typing import Any

TokenScore = Sequence[Any]
"""A token as the journal keeps it: its own text, its log probability, and pairs of both for the likeliest tokens."""


def show_score(score: TokenScore) -> dict[str, Any]:
    text, logprob, top = score
    return {**_show(text, logprob), "top_logprobs": [_show(*each) for each in top]}


def _show(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

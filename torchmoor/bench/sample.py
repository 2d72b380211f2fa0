"""The outcome and the times of one request of a load."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """A question and its answer, or its error. Times are seconds of a monotonic clock.

    began: when the question was sent. token_times: arrival of each part of a streamed answer; empty for a whole answer.
    error: the kind of failure, one of a few; None for a complete answer. reason: the endpoint's error text, if any.
    was_asked: False if the failure prevented the question from being sent.
    """

    began: float
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    receipt: dict[str, str | int | float] = field(default_factory=dict)
    error: str | None = None
    reason: str = ""
    text: str = ""
    was_asked: bool = True

    @property
    def latency_s(self) -> float:
        return self.ended - self.began

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None for a whole answer."""
        return self.token_times[0] - self.began if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        if not self.token_times or self.output_tokens < 2:
            return None
        return (self.ended - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Seconds between consecutive parts of the answer."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

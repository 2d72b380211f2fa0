"""What became of one request of a load."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """One question and its answer, or why there was none. Times are seconds, by a clock that never goes back.

    began: when it was sent. token_times: when each part of the streamed answer came, of an answer in one piece none.
    error: a kind of failure, of which there are few; None for an answer that is whole. was_asked: False of a failure
    that kept a question from being sent.
    """

    began: float
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    receipt: dict[str, str | int | float] = field(default_factory=dict)
    error: str | None = None
    text: str = ""
    was_asked: bool = True

    @property
    def latency_s(self) -> float:
        return self.ended - self.began

    @property
    def ttft_s(self) -> float | None:
        """None of an answer in one piece: it has no first token of its own."""
        return self.token_times[0] - self.began if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None where there is no second."""
        if not self.token_times or self.output_tokens < 2:
            return None
        return (self.ended - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Between each part of the answer and the next."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

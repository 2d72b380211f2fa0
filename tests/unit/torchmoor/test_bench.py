"""Load generation without a network: concurrency, end and numbers."""

import asyncio
from collections.abc import Callable

import pytest

from tests.waiting import until
from torchmoor.bench.client import Sample
from torchmoor.bench.load import NOT_SENT, Load, LoadOutcome, LoadSettings
from torchmoor.bench.summary import describe, percentile, summarize


class Talk:
    """Conversations of a short duration; counts concurrent ones."""

    def __init__(self, turns: int = 2, error: str | None = None, held: asyncio.Event | None = None) -> None:
        self.numbers: list[int] = []
        self.most = 0
        self._running = 0
        self._turns = turns
        self._error = error
        self._held = held

    async def converse(self, number: int, may_go_on: Callable[[], bool], take: Callable[[Sample], None]) -> None:
        self.numbers.append(number)
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            for _ in range(self._turns):
                if not may_go_on():
                    return
                await (asyncio.sleep(0) if self._held is None else self._held.wait())
                take(Sample(1.0, 1.5, [1.1, 1.2, 1.4], 3, error=self._error))
        finally:
            self._running -= 1


def run(talk: Talk, **settings: object) -> LoadOutcome:
    return asyncio.run(Load(LoadSettings(**settings), talk.converse).run())


def test_a_closed_loop_has_as_many_conversations_as_users() -> None:
    """Each user starts the next conversation when the last has ended, and the number of questions is exact."""
    talk = Talk()

    outcome = run(talk, users=3, num_requests=20)

    assert talk.most == 3
    assert len(outcome.samples) == 20
    assert sorted(talk.numbers) == list(range(len(talk.numbers)))
    assert outcome.num_running == outcome.num_failed == 0


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Conversations start without waiting for answers; those above the maximum are reported as failures."""
    held = asyncio.Event()
    talk = Talk(turns=1, held=held)
    made = Load(LoadSettings(users=4, rate=500.0, num_requests=10), talk.converse)
    running = asyncio.create_task(made.run())
    await until(lambda: len(made.outcome.samples) >= 6)
    held.set()
    outcome = await running

    assert talk.most == 4
    assert [sample.error for sample in outcome.samples].count(NOT_SENT) == 6
    assert [sample.error for sample in outcome.samples].count(None) == 4


async def test_what_was_asked_at_the_end_is_answered_and_counted() -> None:
    """A stopped load starts nothing more, and running questions are answered and counted."""
    held = asyncio.Event()
    made = Load(LoadSettings(users=2, duration_s=600), Talk(turns=9, held=held).converse)
    running = asyncio.create_task(made.run())
    await until(lambda: made.outcome.num_running == 2)
    made.stop()
    held.set()
    outcome = await running

    assert len(outcome.samples) == 2
    assert outcome.is_interrupted


def test_failures_are_counted_by_kind_and_are_in_no_latency() -> None:
    """Failures are counted by kind and not as latencies, which their fast answers would improve."""
    outcome = run(Talk(turns=1, error="503 ServiceUnavailable"), users=1, num_requests=2)
    outcome.samples.append(Sample(0.0, 2.0, [1.0], 1))

    found = summarize(outcome, LoadSettings(users=1))

    assert (found["completed"], found["failed"]) == (1, 2)
    assert found["errors"] == {"503 ServiceUnavailable": 2}
    assert found["mean_e2el_ms"] == found["p99_e2el_ms"] == 2000
    assert found["mean_tpot_ms"] is None, "one token has none after it"


def test_numbers_mean_what_vllm_means_by_them() -> None:
    """As in vLLM, TTFT is from sending, ITL between parts, TPOT over all tokens but the first.

    Throughput over the duration.
    """
    receipt = {"context_tokens": 50, "prefill_tokens": 10, "instance": "a"}
    first = Sample(10.0, 10.5, [10.1, 10.2, 10.4], 5, receipt=dict(receipt))
    second = Sample(10.0, 11.0, [10.3], 1, receipt=dict(receipt, instance="b"))
    outcome = LoadOutcome([first, second], began=10.0, ended=12.0)

    found = summarize(outcome, LoadSettings(users=2))

    assert found["median_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx(100), "0.4 s after the first part, 4 tokens"
    assert found["median_itl_ms"] == pytest.approx(150)
    assert found["mean_e2el_ms"] == pytest.approx(750)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 3.0
    assert found["total_token_throughput"] == 53.0
    assert (found["total_input_tokens"], found["total_prefilled_tokens"], found["total_output_tokens"]) == (100, 20, 6)
    assert found["instances"] == {"a": 1, "b": 1}


def test_the_report_suits_a_terminal() -> None:
    """The report fits 80 columns and leaves out what was not measured."""
    whole = Sample(0.0, 0.5, [], 7, receipt={"instance": "llava-0"})
    lines = list(describe(summarize(LoadOutcome([whole], ended=1.0), LoadSettings(users=1))))

    assert max(map(len, lines)) <= 80
    assert any(line.startswith("E2EL") for line in lines)
    assert not any(line.startswith(("TTFT", "TPOT", "ITL")) for line in lines)


def test_percentiles_lie_between_the_nearest_values() -> None:
    """Percentiles are interpolated as in NumPy."""
    values = [1.0, 2.0, 4.0, 8.0]

    assert percentile(values, 50) == 3.0
    assert percentile(values, 99) == pytest.approx(7.88)
    assert percentile([], 50) is None

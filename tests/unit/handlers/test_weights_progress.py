"""Progress of loading weights, by what transformers itself counts."""

from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from handlers.models.loader import reporting_weights
from tests.waiting import wait_until

CHECKPOINT = Path(__file__).parents[3] / "models" / "tiny-llava"


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handlers.models.loader.WORKER_INTERVAL_S", 0.01)


def test_weights_are_counted_as_they_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """The counter counts weights only; other loops of transformers keep their own bars."""
    with caplog.at_level("INFO", "handlers"), reporting_weights():
        transformers_logging.tqdm(range(9), desc="Something else")
        bar = iter(transformers_logging.tqdm(range(3), desc="Loading weights"))
        next(bar)
        next(bar)
        wait_until(lambda: "progress: loading 1 of 3 weights" in caplog.messages, "a weight is counted")

    assert all(message.endswith(" of 3 weights") for message in caplog.messages)


def test_the_weights_of_a_checkpoint_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """transformers runs its loop over a checkpoint's weights through the counter."""
    counted = []

    def hook(factory: object, arguments: tuple[object, ...], options: dict[str, object]) -> object:
        counted.append((options.get("desc"), len(arguments[0])))
        return arguments[0]

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        AutoModelForImageTextToText.from_pretrained(CHECKPOINT, local_files_only=True)
    finally:
        transformers_logging.set_tqdm_hook(previous)

    ((name, number),) = counted
    assert name == "Loading weights"
    assert number > 10

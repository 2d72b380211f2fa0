"""Progress of loading a checkpoint's weights, as transformers counts them."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

from torchmoor.wire.progress import MARK, WORKER_INTERVAL_S, reporting

logger = logging.getLogger(__name__)


@contextmanager
def reporting_weights() -> Iterator[None]:
    """Log how many weights are loaded, at intervals, in place of transformers' own progress bar."""
    done, total = 0, 0

    def count(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        nonlocal done, total
        if options.get("desc") != "Loading weights":
            return factory(*arguments, **options)
        done, total = 0, len(arguments[0])
        return counted(arguments[0])

    def counted(weights: Iterable[Any]) -> Iterator[Any]:
        nonlocal done
        for weight in weights:
            yield weight
            done += 1

    def report(line: str) -> None:
        if total:
            logger.info("%s%s", MARK, line)

    previous = transformers_logging.set_tqdm_hook(count)
    try:
        with reporting(lambda: f"loading {done} of {total} weights", report, WORKER_INTERVAL_S):
            yield
    finally:
        transformers_logging.set_tqdm_hook(previous)

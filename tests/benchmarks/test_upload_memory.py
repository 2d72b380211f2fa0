"""The proxy's memory while long bodies pass through it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.proxy import ENDPOINT, Stage
from benchmarks.proxy_arms import Torchmoor
from benchmarks.proxy_load import upload
from tests.waiting import wait_until

MB = 1_000_000
NUM_BYTES = 50 * MB


@pytest.mark.slow
def test_long_uploads_leave_the_memory_of_the_proxy_alone(tmp_path: Path) -> None:
    """Four at once, of 50 MB each, add less than 10 MB per upload, and less than one upload afterwards."""
    with Stage(tmp_path) as stage:
        process = stage.start(Torchmoor(), stage.start_stream_backend())
        path = f"/predictions/{ENDPOINT}"
        upload(process.port, path, 4 * MB)  # warms up
        before = process.rss_bytes()
        process.forget_peak()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: upload(process.port, path, NUM_BYTES), range(8)))

        assert process.peak_rss_bytes() - before < 4 * 10 * MB
        wait_until(lambda: process.rss_bytes() - before < NUM_BYTES // 2, "the memory returned")

"""The benchmark of forgotten sessions."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import forgotten

NOWHERE = "http://127.0.0.1:1"  # refuses connections


def test_benchmark_ends_if_no_session_can_be_opened() -> None:
    """Its clients stop at the first question, so it must not wait for more openings."""
    clients = forgotten.Clients(NOWHERE, number=forgotten.ASK_EVERY)

    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="no session could be opened: Connection"):
        forgotten.wait_for(clients, [pool.submit(clients.run)], forgotten.ASK_EVERY + 1)


def test_clients_end_with_an_interrupted_benchmark() -> None:
    """None of them opens the rest of its sessions first."""
    clients = forgotten.Clients(NOWHERE, number=100_000)
    clients.end()

    clients.run()

    assert clients.num_done == 0

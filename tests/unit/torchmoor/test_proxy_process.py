"""One process of a proxy with several."""

import gc
import socket

import pytest
import uvloop

from torchmoor.run.processes import child


def test_collections_leave_out_the_imported_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported modules are excluded from garbage collection, which would delay requests for 50,000 objects."""
    frozen: list[int] = []
    monkeypatch.setattr(child, "run", socket.socket.close)
    monkeypatch.setattr(uvloop, "run", lambda work: frozen.append(gc.get_freeze_count()))
    own, others = socket.socketpair()
    gc.unfreeze()
    with own:
        child.serve(others.detach(), 20)

    [num_frozen] = frozen
    assert num_frozen > 50_000

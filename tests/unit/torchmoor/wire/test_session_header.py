"""The header with a session's id and expiry."""

import pytest

from torchmoor.wire.session_header import read_expiry, write_session_header


def test_header_has_the_expiry_in_whole_seconds() -> None:
    value = write_session_header("ts-seq-x", 1_800_000_000.9)

    assert value == "ts-seq-x; Expires=2027-01-15T08:00:00Z"
    assert read_expiry(value.encode()) == 1_800_000_000


@pytest.mark.parametrize("value", ["ts-seq-x", "ts-seq-x; Expires=", "ts-seq-x; Expires=tomorrow", "s; Expires=é"])
def test_header_without_a_valid_expiry(value: str) -> None:
    assert read_expiry(value.encode()) is None

"""Answers of instances to operations."""

import pytest

from torchmoor.proxy.instances.handler_operations import OperationAnswer


@pytest.mark.parametrize("body", [b"", b"[1]", b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_object_counts_as_an_empty_one(body: bytes) -> None:
    assert OperationAnswer(200, "", body).content() == {}

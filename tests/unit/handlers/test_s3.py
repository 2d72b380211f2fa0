"""Reads of objects in S3: replaced objects, and connections that are given back."""

import io
from typing import Any

import boto3
import pytest

from handlers.s3 import PieceReader, S3Error, read_object, translated

PLACE = {"Bucket": "bucket", "Key": "key"}


class Client:
    """A store that ignores If-Match, as some do."""

    def __init__(self, tag: str, data: bytes) -> None:
        self._tag = tag
        self.body = io.BytesIO(data)

    def get_object(self, **request: str) -> dict[str, Any]:
        return {"ETag": self._tag, "Body": self.body}


def test_a_replaced_object_is_not_read_even_if_the_store_ignores_the_condition() -> None:
    client = Client('"new"', b"new")

    with pytest.raises(S3Error) as caught:
        next(read_object(client, PLACE, '"old"', 3, lambda: None))

    assert caught.value.is_precondition
    assert client.body.closed


def test_an_invalid_request_names_the_store() -> None:
    """boto3's own error does not say which of a worker's stores the wrong name belongs to."""
    client = boto3.client("s3", "us-east-1", aws_access_key_id="any", aws_secret_access_key="any")

    with (
        pytest.raises(S3Error, match=r"to the image's store is invalid: .*Invalid bucket name"),
        translated("the image's store"),
    ):
        client.get_object(Bucket="a b", Key="key")


def test_an_object_is_not_read_beyond_its_size() -> None:
    """A store that sends more than it has announced cannot fill the memory, nor repeat a part after a broken read."""
    client = Client('"tag"', bytes(3 << 20))
    pieces = read_object(client, PLACE, '"tag"', 1 << 20, lambda: None)

    assert next(pieces) == bytes(1 << 20)
    with pytest.raises(S3Error) as caught:
        next(pieces)
    assert caught.value.is_precondition
    assert client.body.closed


def test_a_reader_that_is_closed_early_gives_the_connection_back() -> None:
    client = Client('"tag"', bytes(3 << 20))
    reader = PieceReader(read_object(client, PLACE, '"tag"', 3 << 20, lambda: None))
    assert reader.read(10) == bytes(10)
    assert not client.body.closed

    reader.close()

    assert client.body.closed

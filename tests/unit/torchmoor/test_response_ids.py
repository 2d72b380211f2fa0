"""Ids of OpenAI's responses, conversations and items, each of a session."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.wire.response_ids import (
    Place,
    compaction_id,
    conversation_id,
    file_id,
    image_id,
    item_id,
    read_compaction_id,
    read_conversation_id,
    read_file_id,
    read_image_id,
    read_item_id,
    read_response_id,
    response_id,
)
from torchmoor.wire.session_ids import mint

SESSIONS = st.from_regex(r"[a-z0-9]{1,8}(-[a-z0-9]{1,8}){0,3}", fullmatch=True).map(
    lambda name: mint({"k1": b"0" * 16}, instance=name, expires_at=1_900_000_000, endpoint="llava").text
)
READERS = (
    read_response_id,
    read_conversation_id,
    read_compaction_id,
    read_item_id,
    read_file_id,
    read_image_id,
)


@given(SESSIONS, st.integers(0, 999_999), st.integers(0, 999_999), st.sampled_from(["message", "function_call"]))
def test_an_id_names_its_place(session_id: str, number: int, item: int, kind: str) -> None:
    """Each id is read only by the reader for its kind."""
    ids = (
        response_id(session_id, number),
        conversation_id(session_id),
        compaction_id(session_id),
        item_id(session_id, number, item, kind),
        file_id(session_id),
        image_id(session_id, number, item),
    )
    whole, place = Place(session_id), Place(session_id, number, item)
    places = (Place(session_id, number), whole, whole, place, whole, place)

    for i, text in enumerate(ids):
        assert text.isascii()
        assert [read(text) for read in READERS] == [places[i] if i == j else None for j in range(len(READERS))]


@pytest.mark.parametrize(
    "text", ["", "resp_", "resp_a", "resp_a_01", "resp_a_1\n", "resp_A_1", "resp_a_1_", "conv_a/b", "resp_a_٣"]
)
def test_other_texts_name_nothing(text: str) -> None:
    """An id has one valid spelling; other texts are not ids."""
    assert [read(text) for read in READERS] == [None] * len(READERS)

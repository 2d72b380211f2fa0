"""Queries of a worker's sessions as sent to it."""

from torchmoor.wire.session_query import SessionQuery


def test_a_field_at_its_default_is_not_sent() -> None:
    """A field at its default is not sent, because an older worker refuses fields that it does not know."""
    assert SessionQuery().to_body() == {}
    query = SessionQuery(prefix="a0", limit=3)
    assert query.to_body() == {"prefix": "a0", "limit": 3}
    assert SessionQuery(**query.to_body()) == query

"""What a worker is sent for a query of its sessions."""

from torchmoor.wire.session_query import SessionQuery


def test_a_field_at_its_default_is_not_sent() -> None:
    """A worker refuses a field that it does not know, and an older one must answer a query without the new filter."""
    assert SessionQuery().to_body() == {}
    query = SessionQuery(prefix="a0", limit=3)
    assert query.to_body() == {"prefix": "a0", "limit": 3}
    assert SessionQuery(**query.to_body()) == query

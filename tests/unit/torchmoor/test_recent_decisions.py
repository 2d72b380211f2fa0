"""The selection of routing decisions by the parameters of GET /decisions."""

from dataclasses import asdict, fields

import pytest

from torchmoor.errors import ValidationError
from torchmoor.proxy.dispatch.recent_decisions import DecisionQuery
from torchmoor.proxy.dispatch.record import RequestRecord

FILTERS = [each.name for each in fields(DecisionQuery) if each.name not in ("since", "limit")]


def test_each_field_is_a_parameter() -> None:
    """A new filter needs no other list of names; unknown parameters are ignored."""
    texts = {name: f"a-{name}" for name in FILTERS}

    query = DecisionQuery.from_text({**texts, "since": "5", "page": "2"}, limit=3)

    assert asdict(query) == {**texts, "since": 5.0, "limit": 3}


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_excludes_other_requests(name: str) -> None:
    """A field without an effect would show operators all requests."""
    record = RequestRecord("id", "POST", "/", "answered", 0.1)

    assert DecisionQuery().matches(record)
    assert not DecisionQuery.from_text({name: "another"}, limit=3).matches(record)


@pytest.mark.parametrize("since", ["now", "nan", "inf", ""])
def test_a_time_that_is_not_a_number_is_refused(since: str) -> None:
    """The message names the unit."""
    with pytest.raises(ValidationError, match="in seconds since 1970"):
        DecisionQuery.from_text({"since": since}, limit=3)

"""Pages of the List operations: filters, order and tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.control.listing import ListedResource, list_page
from torchmoor.errors import RequestInvalid

ROWS = [
    ListedResource(name, created, created + 5, status, {"Name": name})
    for name, created, status in (("b", 10.0, "InService"), ("A", 20.0, "Failed"), ("ab", 30.0, "InService"))
]


def names(**values: Any) -> list[str]:
    """Return all names, page by page."""
    found: list[str] = []
    while True:
        page = list_page(ROWS, values, "Rows")
        found += [each["Name"] for each in page["Rows"]]
        if "NextToken" not in page:
            return found
        values["NextToken"] = page["NextToken"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ["ab", "A", "b"]),  # the newest first
        ({"SortOrder": "Ascending"}, ["b", "A", "ab"]),
        ({"SortBy": "Name", "SortOrder": "Ascending"}, ["A", "ab", "b"]),
        ({"SortBy": "Status", "SortOrder": "Ascending"}, ["A", "ab", "b"]),
        ({"NameContains": "a", "SortBy": "Name"}, ["ab", "A"]),
        ({"StatusEquals": "InService"}, ["ab", "b"]),
        ({"CreationTimeAfter": 20.0}, ["ab", "A"]),
        ({"CreationTimeBefore": 20.0}, ["A", "b"]),
        ({"LastModifiedTimeAfter": 35.0}, ["ab"]),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_rows_are_chosen_and_ordered_across_pages(values: dict[str, Any], expected: list[str], size: int) -> None:
    assert names(**values, MaxResults=size) == expected


NAMES = st.sampled_from(("a", "b", "B", "c", "aa", "d-1"))


@given(
    st.dictionaries(NAMES, st.sampled_from((1.0, 2.0))),
    st.lists(st.tuples(NAMES, st.sampled_from((None, 1.0, 2.0))), max_size=6),
    st.sampled_from(("Name", "CreationTime", "Status")),
    st.sampled_from(("Ascending", "Descending")),
    st.integers(1, 3),
)
def test_pages_of_rows_that_come_and_go_have_each_row_once(
    created: dict[str, float], changes: list[tuple[str, float | None]], order: str, direction: str, size: int
) -> None:
    """A row that is there from the first page to the last is listed once; one that comes or goes, at most once."""
    listed: list[str] = []
    values: dict[str, Any] = {"SortBy": order, "SortOrder": direction, "MaxResults": size}
    always, pending, gone = set(created), list(changes), set[str]()
    while True:
        rows = (ListedResource(name, at, status="InService", summary={"Name": name}) for name, at in created.items())
        page = list_page(rows, values, "Rows")
        listed += [each["Name"] for each in page["Rows"]]
        if "NextToken" not in page:
            break
        values["NextToken"] = page["NextToken"]
        if pending:
            name, at = pending.pop()
            if at is None:
                created.pop(name, None)
                gone.add(name)
            elif name not in gone:
                created.setdefault(name, at)

    assert always - gone <= set(listed)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("token", ["x", "W10=", "WyJhIiwgImIiXQ==", "bnVsbA=="])
def test_a_token_of_elsewhere_is_refused(token: str) -> None:
    with pytest.raises(RequestInvalid, match="NextToken is not valid"):
        list_page(ROWS, {"NextToken": token}, "Rows")


@pytest.mark.parametrize("size", [0, -1])
def test_a_page_without_rows_is_refused(size: int) -> None:
    """A page size of zero is refused; not every service's model has a minimum."""
    with pytest.raises(RequestInvalid, match=f"MaxResults must be 1 or more, not {size}"):
        list_page(ROWS, {"MaxResults": size}, "Rows")

"""Answers that are computed once for concurrent readers."""

import asyncio

from torchmoor.admin.recent_answers import MAX_KEPT, RecentAnswers


async def test_an_answer_is_found_once_for_all_who_ask_meanwhile() -> None:
    """Ten concurrent readers cause one computation."""
    num_found = 0

    async def find() -> int:
        nonlocal num_found
        num_found += 1
        await asyncio.sleep(0)
        return num_found

    answers = RecentAnswers(1000.0)
    assert await asyncio.gather(*(answers.get("a", find) for _ in range(10))) == [1] * 10


async def test_an_answer_that_was_being_found_when_something_changed_is_not_kept() -> None:
    """An answer whose computation began before a change is not returned to readers after it."""
    state = "open"
    answers = RecentAnswers(1000.0)
    may_end = asyncio.Event()

    async def find() -> str:
        seen = state
        await may_end.wait()
        return seen

    asking = asyncio.create_task(answers.get("a", find))
    await asyncio.sleep(0)
    state = "closed"
    answers.forget()
    may_end.set()

    assert [await asking, await answers.get("a", find)] == ["open", "closed"]


async def test_only_so_many_questions_are_remembered() -> None:
    """A limited number of answers is kept; the oldest is dropped."""
    found = []

    answers = RecentAnswers(1000.0)
    for number in (*range(MAX_KEPT + 1), MAX_KEPT, 0):

        async def find(number: int = number) -> int:
            found.append(number)
            return number

        await answers.get(number, find)

    assert found == [*range(MAX_KEPT + 1), 0]

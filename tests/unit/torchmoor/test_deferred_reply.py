"""Replies that wait for an operation, and their time."""

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from torchmoor.errors import ModelBusy, ValidationError
from torchmoor.proxy.api.deferred_reply import Begin, DeferredReply, in_task
from torchmoor.proxy.api.replies import runtime_error
from torchmoor.proxy.http.call import WAIT
from torchmoor.proxy.http.head import Layout
from torchmoor.proxy.http.message import Reply, Request, RequestLine
from torchmoor.tasks import BackgroundTasks

TIMEOUT_S, BODY_S = 30.0, 50.0


class SlowUpload:
    """A waiter whose request's body took longer than the operation may take."""

    complete_at = BODY_S
    source = ""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def resume(self, step: Reply) -> None:
        self.replies.append(step)


def make_reply(begin: Begin) -> DeferredReply:
    line = RequestLine(b"POST", b"/endpoints/llava/async-invocations", b"", is_http10=False)
    return DeferredReply(
        SimpleNamespace(observe_reply=lambda *_: None),
        Request(line, [], Layout([]), received_at=0.0),
        b"id-1",
        begin,
        runtime_error,
        too_large=ValidationError("too long"),
        max_body_bytes=1,
        timeout_s=TIMEOUT_S,
    )


def test_the_time_of_an_operation_begins_with_it() -> None:
    """The time of an operation begins after its body has arrived, so that a slow upload does not use it up."""
    reply = make_reply(lambda deferred, body: None)

    assert reply.route(b"", SlowUpload()) is WAIT

    assert reply.wait_ends_at == BODY_S + TIMEOUT_S


async def answer_with(work: Any, tasks: BackgroundTasks) -> Reply:
    """Return the answer to a request whose operation is this work."""
    waiter = SlowUpload()
    step = make_reply(in_task(tasks, work, "Too many are running.")).route(b"the body", waiter)
    if isinstance(step, Reply):
        return step
    await tasks.finish()
    [reply] = waiter.replies
    return reply


async def test_an_operation_answers_with_what_it_returns_or_raises() -> None:
    """An error is rendered in the form of the request's API."""

    async def echo(body: bytes) -> Reply:
        await asyncio.sleep(0)
        return Reply(200, body=body)

    async def refuse(body: bytes) -> Reply:
        raise ModelBusy("It is busy.")

    assert await answer_with(echo, BackgroundTasks()) == Reply(200, body=b"the body")
    refused = await answer_with(refuse, BackgroundTasks())
    assert (refused.status, json.loads(refused.body)) == (409, {"Message": "It is busy."})
    full = await answer_with(echo, BackgroundTasks(max_tasks=0))
    assert (full.status, json.loads(full.body)) == (503, {"Message": "Too many are running."})


async def test_a_fault_of_an_operation_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    """The client gets 500 with the request's id and no details; the log has them."""

    async def fail(body: bytes) -> Reply:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        reply = await answer_with(fail, BackgroundTasks())

    assert (reply.status, json.loads(reply.body)) == (500, {"Message": "The proxy failed. Request id id-1."})
    [record] = caplog.records
    assert record.exc_info[0] is ZeroDivisionError
    assert "id-1" in record.getMessage()

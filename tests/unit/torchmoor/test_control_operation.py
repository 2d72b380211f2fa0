"""Requests for the control plane on their way to it."""

import asyncio
from types import SimpleNamespace
from typing import Any

from torchmoor.config.control import ControlSettings
from torchmoor.proxy.access.web_pages import WebPageGuard
from torchmoor.proxy.api.control_operation import TARGET, ControlApi, ControlRequest
from torchmoor.proxy.api.other_services import refuse_unknown
from torchmoor.proxy.http.call import WAIT, NextStep
from torchmoor.proxy.http.message import Reply


class Client:
    """A waiter whose request is whole."""

    complete_at = 0.0
    source = ""

    def resume(self, step: NextStep) -> None:
        """The answer, which comes at the test's end."""


def test_no_more_run_at_a_time_than_the_limit_allows_whenever_their_bodies_arrive() -> None:
    """The heads of both came while nothing ran."""
    started: list[bytes] = []

    async def answer(request: ControlRequest) -> Reply:
        started.append(request.body)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def scenario() -> list[Any]:
        settings = SimpleNamespace(control=ControlSettings(max_requests=1), listen=SimpleNamespace(host="127.0.0.1"))
        dispatchers: Any = SimpleNamespace(settings=settings, observe_reply=lambda *_: None)
        api = ControlApi(dispatchers, answer, WebPageGuard("127.0.0.1", ()), refuse_unknown, is_guarded=False)
        fields = {TARGET: b"SageMaker.ListModels"}
        request: Any = SimpleNamespace(method=b"POST", path=b"/", find=fields.get, body_check=None)
        handle = api.find_handler(b"POST", b"/")
        replies = [handle(request, b"1") for _ in range(2)]
        steps = []
        for reply, body in zip(replies, (b"first", b"second"), strict=True):
            steps.append(reply.route(body, Client()))
            await asyncio.sleep(0)
        return steps

    first, second = asyncio.run(scenario())

    assert first is WAIT
    assert (second.status, started) == (503, [b"first"])

"""OpenAI's requests that are routed by their body: `model` names one of several endpoints, an id names an instance."""

from __future__ import annotations

from collections.abc import Callable

from torchmoor.errors import ApiError
from torchmoor.proxy.access.gate import body_too_large
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import WHOLE_BODY, Call, Deadlines, NextStep, Outcome, Waiter
from torchmoor.proxy.http.message import Reply, Request


class OpenAIByBody:
    """A Call that finds its endpoint in the body, and then hands the request to that endpoint's call."""

    def __init__(
        self,
        dispatchers: Dispatchers,
        request: Request,
        *,
        max_body_bytes: int,
        deadlines: Deadlines,
        make: Callable[[bytes, int], Call],
        render_error: Callable[[ApiError], Reply],
    ) -> None:
        """make: makes the call for the body's beginning; gets the limit of its bytes, too. Raises ApiError."""
        check = request.body_check
        self.deadlines = deadlines
        self.max_body_bytes = max_body_bytes
        self._num_read = dispatchers.settings.limits.max_unrouted_body_bytes
        if check is not None:
            self.max_body_bytes = min(max_body_bytes, check.max_body_bytes)
        self._make = make
        self._render_error = render_error
        self._call: Call | None = None
        self._request = request

    num_read_bytes = WHOLE_BODY  # of the endpoint's call, which is not known yet

    @property
    def wait_ends_at(self) -> float:
        assert self._call is not None  # other requests do not wait for it
        return self._call.wait_ends_at

    def route(self, body: bytes, waiter: Waiter) -> NextStep:
        """Find the endpoint, and let its call place the request."""
        try:
            check, self._request.body_check = self._request.body_check, None
            if check is not None:  # verified here once, before the name is used
                check.verify(body)
            call = self._make(body[: self._num_read], self._num_read)
        except ApiError as error:
            return self._render_error(error)
        self._call = call
        return call.route(body, waiter)

    def on_wait_over(self) -> Reply:
        assert self._call is not None
        return self._call.on_wait_over()

    def on_body_too_large(self) -> Reply:
        """Answer as the endpoint's call does; before that is found, with the dialect's error."""
        if self._call is not None:
            return self._call.on_body_too_large()
        return self._render_error(body_too_large(self._request, self.max_body_bytes))

    def on_body_dropped(self) -> Reply:
        return self._render_error(unavailable.body_dropped())

    def limit_body(self, waiter: Waiter) -> None:
        """Do nothing: the endpoint is not known yet."""

    def finish(self, outcome: Outcome) -> None:
        if self._call is not None:
            self._call.finish(outcome)

"""The form of a response in the background: no client waits for it, and any number of clients may follow it."""

import json
from typing import Any

from handlers.chat.dialects.response_form import ResponseForm
from handlers.chat.forms import Summary, Token, encode
from handlers.errors import HandlerError


class BackgroundForm(ResponseForm):
    """Implements `FollowedForm`: a response as it is generated, or as one client follows it."""

    def queued(self) -> str:
        """Return the fields of a response that is not generated yet, as JSON."""
        return json.dumps(self._fields, ensure_ascii=False)

    def follow(self, starting_after: int, *, is_running: bool) -> tuple["BackgroundForm", bytes]:
        form = BackgroundForm(self._fields, self.items, has_logprobs=self.has_logprobs)
        form.place(self._session_id, self._number)
        form._first_event = starting_after + 1
        data = form.begin() if is_running else form.created()
        return form, data + form._stream.repeat(self._output.items, self._output.held)

    @property
    def resume_after(self) -> int:
        return max(self._first_event, self._num_events) - 1

    def note(self, token: Token) -> None:
        self._add(token)

    def end_like(self, form: "BackgroundForm", token: Token) -> bytes:
        self._ended, self._stored = form._ended, form._stored
        if not form._is_restored:
            return self._stream.write([*self._add(token), *self._output.finish()]) + self._end()
        return self._repeat_stored(self.resume_after + 1)  # which another instance has stored

    def fail(self, fields: dict[str, Any]) -> bytes:
        """Write the last event, with a number after all events that the client has."""
        self._num_events = self._first_event = self.resume_after + 1
        return self._event("response.failed", response=self._show({**self._fields, **fields}))

    def error(self, error: HandlerError) -> bytes:
        """Write the end of one client's stream. The response itself continues, or was deleted."""
        self._num_events = self._first_event = self.resume_after + 1
        return self._event("error", code=error.code, message=error.message, param=None)

    def whole(self, summary: Summary) -> bytes:
        """Write the answer as the proxy's queue reads it."""
        super().whole(summary)
        assert self._ended is not None
        return encode({"status": self._ended["status"]})

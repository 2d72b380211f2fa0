"""The form of a response without output: only its prompt is computed, so that a response after it begins sooner."""

import json
from dataclasses import replace

from handlers.chat.dialects.response_form import ResponseForm, find_ending
from handlers.chat.forms import Summary, Token
from handlers.engine.contract import FinishReason


class PreparedForm(ResponseForm):
    """Omits the answer's only token: the engine generates at least one."""

    def record(self, summary: Summary) -> tuple[str, str]:
        end = replace(summary, finish_reason=FinishReason.EOS.value, num_tokens=0, message=None)
        fields = {**self._fields, **find_ending(end, None)}
        self._ended = self._show(fields)
        return "[]", json.dumps(fields, ensure_ascii=False)

    def token(self, token: Token, summary: Summary | None) -> bytes:
        return super().token(replace(token, text="", parts=None), summary)

"""Renders chat templates in a process of their own: checkpoints bring them, so their time and memory are limited."""

from typing import Any

from handlers.worker.limited_process import LimitedProcess, WorkTooCostly

CPU_S = 3.0
MEMORY_BYTES = 256 << 20


class TemplateFailed(Exception):
    """A template did not render; the message has the reason.

    is_refusal: the template itself refused the messages.
    """

    def __init__(self, reason: str, *, is_refusal: bool = False) -> None:
        super().__init__(reason)
        self.is_refusal = is_refusal


class TemplateProcess(LimitedProcess):
    """Renders templates, one at a time. Any thread."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        super().__init__("template", cpu_s, MEMORY_BYTES)

    def check(self, template: str) -> None:
        """Raise TemplateFailed if a template cannot be compiled, as for an error of its syntax."""
        self.render({"compiled": template})

    def render(self, request: dict[str, Any]) -> str:
        """Return the rendered text. request: as limited_child.py describes it. Raises TemplateFailed."""
        try:
            answer = self.ask(request)
        except WorkTooCostly as exc:
            raise TemplateFailed(str(exc)) from exc
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise TemplateFailed(answer["refused"], is_refusal=True)
        raise TemplateFailed(f"it raised {answer['failed']}")


SHARED = TemplateProcess()  # one per worker; one per model would cost 40 MB each

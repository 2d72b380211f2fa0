"""Chat templates in their own process: the same texts as transformers, and an end to every template."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from handlers.errors import InternalError, InvalidRequest, SettingsError
from handlers.models.chat_template import LLAMA2, LLAVA15, ChatTemplate, TemplateFailed, TemplateProcess
from handlers.worker import limited_process
from handlers.worker.limited_process import CHILD
from scripts.tiny_llava.build import CHAT_TEMPLATE
from tests.waiting import wait_until

TEXTS = ["Hello", " spaces \n", "{{ 7 * 7 }}", "Größe 大 \ud83d", '"quoted" \\ </s>', ""]
TOOL_TEMPLATE = """\
{%- set ns = namespace(total=0) -%}
{%- for m in messages if m.role != 'system' -%}
{%- if loop.index0 > 4 -%}{%- break -%}{%- endif -%}
{%- set ns.total = ns.total + m.content | length -%}
<|{{ m.role }}|>{{ m | tojson }}{% generation %}{{ m.content | trim | upper }}{% endgeneration %}
{%- endfor -%}
{{ ns.total }}{{ bos_token }}{{ strftime_now('%Y') }}{{ range(3) | list }}{{ tools == none }}
"""


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(cpu_s=0.5)
    made.start()
    yield made
    made.stop()


def request(template: str, texts: list[str], **variables: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"conversations": [messages], "chat_template": template, "add_generation_prompt": True, **variables}


@pytest.mark.parametrize("is_in_parts", [False, True])
@pytest.mark.parametrize("template", [LLAMA2, LLAVA15, CHAT_TEMPLATE, TOOL_TEMPLATE])
def test_texts_are_those_of_transformers(
    template: str, is_in_parts: bool, process: TemplateProcess, checkpoint: Path
) -> None:
    """Each template of this repository gives the text that the tokenizer's own method gives."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    variables = {**tokenizer.special_tokens_map, "image_token": "<image>"}
    for num_messages in range(1, len(TEXTS) + 1):
        asked = request(template, TEXTS[:num_messages], **variables)
        (messages,) = asked["conversations"]
        for message in messages if is_in_parts else ():
            message["content"] = [{"type": "image"}, {"type": "text", "text": message["content"]}]

        try:
            expected = tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False, image_token="<image>"
            )
        except Exception as exc:
            with pytest.raises(TemplateFailed, match=type(exc).__name__):
                process.render(asked)
        else:
            assert process.render(asked) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro m() %}{% for a in range(99999) %}{{ m() }}{% endfor %}{% endmacro %}{{ m() }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=['xx']) %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    ],
)
def test_every_template_ends(template: str, process: TemplateProcess) -> None:
    """A template that computes forever or fills the memory fails; the next one is rendered by a new process."""
    with pytest.raises(TemplateFailed):
        process.render(request(template, ["Hello"]))

    assert process.render(request("{{ messages[0].content }}", ["Hello"])) == "Hello"


@pytest.mark.slow
def test_a_client_is_told_that_the_template_is_too_much(checkpoint: Path) -> None:
    """The client gets an error of its request, and other templates are still rendered."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(SimpleNamespace(chat_template=endless), tokenizer, "other")
    other = ChatTemplate(SimpleNamespace(chat_template={"default": "{{ messages[0].role }}"}), tokenizer, "other")

    with pytest.raises(InvalidRequest, match="cannot render these messages: it needs more than 3 s or 256 MiB"):
        template.render([{"role": "user", "content": "Hello"}])

    assert other.render([{"role": "user", "content": "Hello"}]) == "user"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}", "Unexpected end of template"),
        ({"default": "{{ messages }}", "tool_use": "{{ tools | nonsense }}"}, "No filter named 'nonsense'"),
    ],
)
def test_a_template_that_cannot_be_compiled_fails_the_load(template: Any, reason: str, checkpoint: Path) -> None:
    """A template that cannot be compiled fails the load, since each conversation would be refused otherwise."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)

    with pytest.raises(SettingsError, match=f"chat template cannot be used: {reason}.*; correct its chat_template"):
        ChatTemplate(SimpleNamespace(chat_template=template), tokenizer, "other")


def test_a_refusal_is_not_a_failure(process: TemplateProcess) -> None:
    """A template's own refusal is passed on; other errors are reported by their type only."""
    with pytest.raises(TemplateFailed, match="only users") as refused:
        process.render(request("{{ raise_exception('only users') }}", ["Hello"]))
    with pytest.raises(TemplateFailed, match="it raised TypeError") as failed:
        process.render(request("{{ 'a' + 1 }}", ["Hello"]))

    assert refused.value.is_refusal
    assert not failed.value.is_refusal


def test_a_process_that_ended_is_replaced() -> None:
    """A rendering succeeds although the system has ended the template process before."""
    process = TemplateProcess()
    asked = request("{{ messages | tojson }}", ["Hello"])
    others = psutil.Process().children()
    before = process.render(asked)
    (child,) = set(psutil.Process().children()) - set(others)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert process.render(asked) == before
    assert json.loads(before) == [{"role": "user", "content": "Hello"}]
    process.stop()


@pytest.mark.parametrize(
    "program",
    [
        'import sys; print("ready", flush=True); sys.stdin.readline(); sys.stdout.write(\'{"text": "Hel\')',
        'import os, signal, sys; print("ready"); os.close(0); sys.stdout.close(); signal.pause()',
    ],
)
def test_a_process_that_ends_in_the_middle_is_a_failure(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system ends the process during a request, the rendering fails."""
    child = tmp_path / "child.py"
    child.write_text(program)
    monkeypatch.setattr(limited_process, "CHILD", child)
    process = TemplateProcess()
    others = psutil.Process().children()
    process.start()
    (started,) = set(psutil.Process().children()) - set(others)
    if "os.close" in program:
        wait_until(lambda: not Path(f"/proc/{started.pid}/fd/0").exists(), "the process reads no more")

    with pytest.raises(TemplateFailed, match="it needs more than"):
        process.render(request("{{ messages }}", ["Hello"]))

    assert not started.is_running()


@pytest.mark.parametrize(
    ("interpreter", "program", "reason"),
    [
        ("/nonexistent/python", "", "No such file or directory"),
        (sys.executable, "import nonexistent_module", "it ended with status 1"),
        (sys.executable, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it ended with status -9"),
    ],
)
def test_a_process_that_cannot_be_started_is_not_the_templates_fault(
    interpreter: str, program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no process can be started, for example without memory, the template is not blamed and is rendered later."""
    child = tmp_path / "child.py"
    child.write_text(program)
    process = TemplateProcess()
    asked = request("{{ messages[0].content }}", ["Hello"])

    with monkeypatch.context() as patch:
        patch.setattr(limited_process, "CHILD", child)
        patch.setattr(limited_process.sys, "executable", interpreter)
        with pytest.raises(InternalError, match=f"the process for a template could not be started: {reason}"):
            process.render(asked)

    assert process.render(asked) == "Hello"
    process.stop()


def test_the_process_imports_no_more_of_transformers_than_templates_need() -> None:
    """The process does not import transformers' model sources or the hub's clients."""
    program = f"import runpy, sys; runpy.run_path({str(CHILD)!r})['render_templates'](); print(*sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    imported = set(done.stdout.split())
    assert "transformers.utils.chat_template_utils" in imported
    assert imported.isdisjoint({"transformers.utils.generic", "transformers.utils.hub", "httpx", "torch"})

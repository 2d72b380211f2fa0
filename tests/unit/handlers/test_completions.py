"""OpenAI's completions as commands: their fields, defaults and refusals."""

from dataclasses import replace
from typing import Any

import pytest

from handlers.chat.dialects.completions import CompletionForm
from handlers.chat.dialects.table import parse
from handlers.errors import InvalidRequest
from handlers.settings.request import RequestSettings
from tests.unit.handlers.conftest import make_incoming

NOW = 1_800_000_000.0
HEADERS = {"x-torchmoor-endpoint": "llm", "x-torchmoor-request-id": "r1"}


def command(headers: dict[str, str] | None = None, **body: Any) -> Any:
    incoming = make_incoming({**HEADERS, **(headers or {})}, {"prompt": "Once ", **body})
    return parse(replace(incoming, received_at=NOW), RequestSettings())


def test_a_prompt_is_continued_as_it_is() -> None:
    """Spaces stay; the default is 16 tokens; a list may have one prompt or more."""
    found = command(model="llm", stop="x", temperature=0.5, user="bob", suffix="", n=1)

    assert (found.prompt, found.messages, found.is_streaming) == ("Once ", (), False)
    assert (found.parameters.max_new_tokens, found.parameters.stop) == (16, ("x",))
    assert found.form == CompletionForm(id="cmpl-r1", created=int(NOW), model="llm")
    assert command(prompt=["Once "], max_tokens=3).parameters.max_new_tokens == 3
    several = command(prompt=["Once ", "Twice"], n=3)
    assert (several.prompt, several.more_prompts, several.num_answers) == ("Once ", ("Twice",), 6)
    assert command(stream=True, stream_options={"include_usage": True}).form.has_usage


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({"prompt": prompt}, "prompt") for prompt in ("", [], [1, 2], [[1, 2]], 7, "\ud800")),
        *(({"prompt": prompt}, "prompt") for prompt in (["a", ""], ["a", 7], ["a", "\ud800"], ["a"] * 65)),
        *(({name: 2}, name) for name in ("best_of", "echo", "suffix", "logit_bias", "stop", "colour")),
        *(({"n": number}, "n") for number in (0, 9, True, "2")),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": 7}, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidRequest) as caught:
        command(**body)
    assert caught.value.param == param


def test_a_request_has_a_limit_of_answers_to_one_prompt() -> None:
    """The error names the setting, which operators change."""
    with pytest.raises(InvalidRequest, match=r"from 1 to 8 \(handler\.request\.max_choices\)"):
        command(n=9)


@pytest.mark.parametrize(("num_prompts", "number"), [(13, 5), (33, 2)])
def test_a_request_has_a_limit_of_answers_to_all_its_prompts(num_prompts: int, number: int) -> None:
    with pytest.raises(InvalidRequest, match=r"64 answers \(handler\.request\.max_answers\)") as caught:
        command(prompt=["Once"] * num_prompts, n=number)

    assert caught.value.param == "n"
    assert command(prompt=["Once"] * 8, n=8).num_answers == command(prompt=["Once"] * 64).num_answers == 64


def test_openais_path_needs_a_model() -> None:
    """A request over OpenAI's path, which the proxy marks, must name a model."""
    with pytest.raises(InvalidRequest, match="must provide a model"):
        command({"x-torchmoor-needs-model": "true"})
    assert command().form.model == "llm"

"""Options of `torchmoor chat`."""

import pytest
from click.testing import CliRunner, Result

from torchmoor.cli.conversation import ChatError
from torchmoor.cli.main import main
from torchmoor.cli.terminal_chat import ChatOptions


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_chat_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the generation parameters that were given are sent."""
    seen: list[ChatOptions] = []
    monkeypatch.setattr("torchmoor.cli.commands.chat.run", seen.append)

    result = invoke("chat", "a.png", "--ask", "one", "--ask", "two", "--max-new-tokens", "9", "--min-p", "0", "--json")

    assert result.exit_code == 0
    (options,) = seen
    assert options.questions == ("one", "two")
    assert options.target.parameters == {"max_new_tokens": 9, "min_p": 0.0}
    assert options.as_json


def test_a_failed_conversation_is_one_line_and_status_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed conversation prints one line without a stack trace and exits with status 1."""

    def fail(options: ChatOptions) -> None:
        raise ChatError("the session has expired")

    monkeypatch.setattr("torchmoor.cli.commands.chat.run", fail)

    result = invoke("chat", "a.png")

    assert result.exit_code == 1
    assert result.stderr == "Error: the session has expired\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--top-p", "0"), ("--min-p", "2"), ("--repetition-penalty", "101"), ("--seed", "-1"), ("--min-tokens", "-1")],
)
def test_numbers_that_workers_refuse_are_refused_before_a_question_is_sent(option: str, value: str) -> None:
    """The ranges are those of `wire.sampling_parameters`."""
    result = invoke("chat", "a.png", option, value)

    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr

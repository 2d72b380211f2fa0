"""Wrong variables of the handlers are found before an instance is started."""

from pathlib import Path

import pytest

from tests.archives import write_small_archive
from torchmoor.errors import VariableInvalid
from torchmoor.fleet.archives import archive_name, built_in, chat_handler, write_archive
from torchmoor.fleet.torchserve import Launch
from torchmoor.fleet.variable_checks import check_variables

HANDLER = "TORCHMOOR_HANDLER_"


def launch_chat(model: str = "chat", **environment: str) -> Launch:
    return Launch(f"{model}-0", model, archive_name(model), contents=chat_handler(), environment=environment)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        (f"{HANDLER}SESSION_TTL", "5", r"TORCHMOOR_HANDLER_SESSION_TTL is not a setting"),
        (f"{HANDLER}SESSION_TTL_S", "soon", r"handler\.session\.ttl_s must be of type int, not 'soon'"),
        (f"{HANDLER}MODEL_PATH", "hf://a//b", r"MODEL_PATH is invalid: hf://a//b must be hf://owner/name"),
        ("HF_MODEL_ID", "owner/name/more", r"HF_MODEL_ID is invalid: .*owner/name/more must be hf://owner/name"),
        ("OPTION_MODEL_ID", "https://hub/a/b", r"OPTION_MODEL_ID is invalid: it must be a directory, s3://"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, name: str, value: str, error: str) -> None:
    with pytest.raises(VariableInvalid, match=error):
        check_variables([launch_chat()], tmp_path, {name: value})


@pytest.mark.parametrize("encoding", ["", "utf-16"])
def test_a_name_with_any_bytes_is_shown(tmp_path: Path, encoding: str) -> None:
    """Whatever encoding the environment sets for Python's output."""
    environ = {f"{HANDLER}\udcff": "1", "PYTHONIOENCODING": encoding}

    with pytest.raises(VariableInvalid, match=r"^TORCHMOOR_HANDLER_\\udcff is not a setting"):
        check_variables([launch_chat(TORCHMOOR_HANDLER_MODEL_PATH="/checkpoint")], tmp_path, environ)


def test_variables_that_the_handlers_accept_are_no_error(tmp_path: Path) -> None:
    """Neither is a value that only an archive's model-config makes right, such as that of vLLM."""
    environ = {f"{HANDLER}SESSION_TTL_S": "60", f"{HANDLER}MODEL_TENSOR_PARALLEL": "2", "HF_MODEL_ID": " owner/name "}

    check_variables([launch_chat()], tmp_path, environ)
    check_variables([launch_chat()], tmp_path, {"HF_MODEL_ID": "./folder", f"{HANDLER}MODEL_PATH": "model"})


def test_a_variable_that_no_instance_reads_is_no_error(tmp_path: Path) -> None:
    """An instance's own checkpoint, and many models, take the place of the one in the environment."""
    environ = {"HF_MODEL_ID": "owner/name/more"}
    many = Launch("many-0", "many", archive_name("many"), contents=built_in("many"))

    check_variables([launch_chat(TORCHMOOR_HANDLER_MODEL_PATH="/checkpoint"), many], tmp_path, environ)
    with pytest.raises(VariableInvalid):
        check_variables([launch_chat(), many], tmp_path, environ)


def test_other_handlers_have_other_variables(tmp_path: Path) -> None:
    """Archives with the installed handlers are checked; others may have settings that are unknown here."""
    environ = {f"{HANDLER}SESSION_TTL": "5", "HF_MODEL_ID": "owner/name/more"}
    write_small_archive(tmp_path / "own.mar")
    write_archive(chat_handler(), "chat", tmp_path / "chat.mar")

    check_variables([Launch("own-0", "own", "own.mar")], tmp_path, environ)
    with pytest.raises(VariableInvalid):
        check_variables([Launch("chat-0", "chat", "chat.mar")], tmp_path, environ)

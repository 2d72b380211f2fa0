"""scripts/make_minilm.py: variants of a checkpoint."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.make_minilm import OWN_WEIGHTS, SCALED_TENSOR, SHARED_WEIGHTS, WEIGHTS, main, make_variants, scale_of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({SCALED_TENSOR: torch.ones(2), "other": torch.ones(8)}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("is_other_disk", [False, True])
def test_variants_share_one_copy(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_other_disk: bool
) -> None:
    """On another disk than the checkpoint's, variants are links to one copy there."""
    link = Path.hardlink_to

    def link_within_a_disk(path: Path, source: Any) -> None:
        if is_other_disk and Path(source).is_relative_to(checkpoint):
            raise OSError(errno.EXDEV, "another disk")
        link(path, source)

    monkeypatch.setattr(Path, "hardlink_to", link_within_a_disk)
    target = tmp_path / "variants"
    target.mkdir()

    variants = make_variants(checkpoint, target, 3)

    shared = {(variant / SHARED_WEIGHTS).stat().st_ino for variant in variants}
    assert len(shared) == 1
    assert (shared == {(checkpoint / WEIGHTS).stat().st_ino}) is not is_other_disk
    assert sorted(target.iterdir()) == variants
    assert torch.equal(load_file(variants[2] / OWN_WEIGHTS)[SCALED_TENSOR], torch.ones(2) * scale_of(2))


def test_a_number_of_variants_below_0_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "variants"
    arguments = ["--target", str(checkpoint), "--to", str(target), "--variants", "-1"]
    monkeypatch.setattr("sys.argv", ["make_minilm.py", *arguments])

    with pytest.raises(SystemExit) as caught:
        main()

    assert caught.value.code == 2
    assert "--variants" in capsys.readouterr().err
    assert not target.exists()

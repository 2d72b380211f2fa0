"""The example of many models: a traced encoder with two outputs, of which the configuration names one."""

import tarfile
from pathlib import Path

import pytest
import torch

from tests.torchserve.published.conftest import RunClient

pytestmark = [
    *(pytest.mark.torchserve, pytest.mark.s3, pytest.mark.slow),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
CONFIG = """platform: "pytorch_libtorch"
max_batch_size: 128
input [ { name: "INPUT__0" data_type: TYPE_INT32 dims: [ 8 ] },
        { name: "INPUT__1" data_type: TYPE_INT32 dims: [ 8 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 8, 4 ] } ]
"""


class Encoder(torch.nn.Module):
    """A stand-in for BERT: hidden states, and a pooled output that is not named."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(16, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.words(ids.long()) * mask.unsqueeze(-1)
        return hidden, hidden.mean(dim=1)


def test_copies_of_a_traced_model_answer_from_create_to_delete(run_client: RunClient, tmp_path: Path) -> None:
    """Each answer is the single output that the configuration names, with the digits of float32."""
    torch.manual_seed(0)
    encoder, ids = Encoder(), torch.arange(8, dtype=torch.int32).unsqueeze(0)
    (tmp_path / "1").mkdir()
    torch.jit.trace(encoder, (ids, torch.ones_like(ids))).save(str(tmp_path / "1" / "model.pt"))
    (tmp_path / "config.pbtxt").write_text(CONFIG)
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "1" / "model.pt", "bert/1/model.pt")
        archive.add(tmp_path / "config.pbtxt", "bert/config.pbtxt")

    told = run_client("many_models.py", str(tmp_path / "model.tar.gz"))

    expected = encoder.words(ids.long()).flatten().tolist()
    for outputs in (*told["outputs"], told["added"]):
        [output] = outputs
        assert (output["name"], output["datatype"], output["shape"]) == ("OUTPUT__0", "FP32", [1, 8, 4])
        assert output["data"] == pytest.approx(expected)
        assert all(len(repr(number)) < 14 for number in output["data"])
    assert told["listed"] == sorted([*(f"bert-{number}.tar.gz" for number in range(5)), "bert-new.tar.gz"])

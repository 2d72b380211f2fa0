"""Triton's layout: its configuration, its TorchScript, its requests."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.errors import BadInput, InvalidRequest, ModelBroken
from handlers.many.compute import TaskRow
from handlers.many.tasks.open_inference import TYPES, read_inference, read_tensor
from handlers.many.tasks.pbtxt import PbtxtError, parse_pbtxt
from handlers.many.tasks.triton import (
    TensorSpec,
    TritonConfig,
    TritonTask,
    is_triton,
    read_config,
)
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from handlers.settings.tasks import TaskSettings

MAX_VALUES = TaskSettings().max_json_values
TARGET = "x-amzn-sagemaker-target-model"
CPU = torch.device("cpu")
CONFIG = """
# two inputs
platform: "pytorch_libtorch"
max_batch_size: 4
input [
  { name: "B__1" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "A__0", data_type: TYPE_FP32, dims: -1 }
]
output { name: "SUM__0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "DIFFERENCE__1" data_type: TYPE_FP32 dims: [ -1 ] }
dynamic_batching { max_queue_delay_microseconds: 100 }
"""
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class SumAndDifference(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
    example = (torch.ones(1, 2), torch.ones(1, 2))
    torch.jit.trace(SumAndDifference(), example).save(str(tmp_path / "2" / "model.pt"))
    (tmp_path / "config.pbtxt").write_text(CONFIG)
    return tmp_path


def tensor(name: str, data: list[Any], **changes: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1, len(data)], "datatype": "FP32", "data": data, **changes}


def work_of(task: TritonTask, body: dict[str, Any]) -> Any:
    incoming = Incoming({TARGET: "m"}, json.dumps(body).encode())
    return task.read(read_inference(incoming, MAX_VALUES), PendingReply(lambda: None))


def answer(task: TritonTask, *bodies: dict[str, Any]) -> list[Any]:
    works = [work_of(task, body) for body in bodies]
    rows = [TaskRow(w.inputs[0].inputs, 1, w.inputs[0].kind, lambda: True, lambda _: None) for w in works]
    return [work.finish([output]) for work, output in zip(works, task.run(rows), strict=True)]


def test_tensors_go_to_the_newest_version_in_the_order_of_their_names(folder: Path) -> None:
    """Tensors go to the newest version, ordered by the number at the end of their names, as in Triton."""
    task = TritonTask.load(folder, CPU, is_allowed=True)

    (found,) = answer(task, {"id": "7", "inputs": [tensor("B__1", [1.0, 2.0]), tensor("A__0", [[5, 5]], shape=[1, 2])]})

    assert found == {
        "id": "7",
        "model_name": "m",
        "model_version": "2",
        "outputs": [
            {"name": "SUM__0", "datatype": "FP32", "shape": [1, 2], "data": [6, 7]},
            {"name": "DIFFERENCE__1", "datatype": "FP32", "shape": [1, 2], "data": [4, 3]},
        ],
    }


def test_requests_of_one_shape_share_a_batch(folder: Path) -> None:
    """Requests of equal shape share up to max_batch_size rows, and each gets its part of the outputs."""
    task = TritonTask.load(folder, CPU, is_allowed=True)
    bodies = [{"inputs": [tensor("A__0", [i]), tensor("B__1", [1])], "outputs": [{"name": "SUM__0"}]} for i in range(9)]

    found = answer(task, *bodies)

    assert [each["outputs"][0]["data"] for each in found] == [[i + 1] for i in range(9)]
    assert {work_of(task, body).inputs[0].kind for body in bodies} == {((torch.float32, (1,)),) * 2}


def test_torchscript_needs_a_setting(folder: Path) -> None:
    """TorchScript is a program, so loading it needs a setting, which the error names."""
    with pytest.raises(ModelBroken, match=r"handler\.many\.allow_torchscript"):
        TritonTask.load(folder, CPU, is_allowed=False)

    (folder / "2" / "model.pt").write_bytes(b"nothing")
    with pytest.raises(ModelBroken, match="not TorchScript"):
        TritonTask.load(folder, CPU, is_allowed=True)
    (folder / "2" / "model.pt").unlink()
    with pytest.raises(ModelBroken, match="no TorchScript file"):
        TritonTask.load(folder, CPU, is_allowed=True)


def test_a_lone_torchscript_file_is_a_model_too(folder: Path, tmp_path: Path) -> None:
    """A single model.pt, as in TorchServe, gets its inputs in the order in which they come."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / "2" / "model.pt").rename(alone / "model.pt")
    task = TritonTask.load(alone, CPU, is_allowed=True)

    (found,) = answer(task, {"inputs": [tensor("x", [3]), tensor("y", [1])]})

    assert is_triton(alone)
    assert [out["data"] for out in found["outputs"]] == [[4], [2]]
    with pytest.raises(InvalidRequest, match=r"there is no output 'SUM__0'; there are: OUTPUT__0, OUTPUT__1$"):
        answer(task, {"inputs": [tensor("x", [3]), tensor("y", [1])], "outputs": [{"name": "SUM__0"}]})


def test_inputs_that_the_configuration_leaves_out_have_no_batch(folder: Path) -> None:
    """A configuration with max_batch_size may say nothing of its inputs, which may be scalars then."""
    (folder / "config.pbtxt").write_text('backend: "pytorch" max_batch_size: 4')
    task = TritonTask.load(folder, CPU, is_allowed=True)

    (found,) = answer(task, {"inputs": [tensor("x", [3], shape=[]), tensor("y", [1], shape=[])]})

    assert found["outputs"][0]["data"] == [4]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('backend: "tensorflow"', "tensorflow"),
        ("platform: 5", "must be given once"),
        ('backend: "pytorch" max_batch_size: "x"', "must be given once"),
        ('backend: "pytorch" input { name: "a" data_type: TYPE_STRING dims: 1 }', "TYPE_STRING"),
        ('backend: "pytorch" input { name: "a" data_type: TYPE_FP32 dims: 0 }', "dims"),
        ('backend: "pytorch" default_model_filename: "../x"', "plain name"),
        ('backend: "pytorch" max_batch_size: -1', "max_batch_size"),
        ("input {", "line 1"),
        ("input: [ 1 2 ]", "comma"),
        ("name 5", "value is missing"),
        ("a: $", "unexpected character"),
        ("a { " * 100, "nested too deeply"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    """The error says what is wrong in the configuration."""
    (tmp_path / "config.pbtxt").write_text(text)

    with pytest.raises(ModelBroken, match=reason):
        read_config(tmp_path)


def test_the_text_format_is_read_in_all_its_spellings() -> None:
    """The parser accepts optional colons, angle brackets, separators, escapes, comments, and every kind of number."""
    text = """a: 'it\\'s' b < c: true; d: -1.5e3 > b: { c: WORD } e: [] # end
    f: "x # y" g: 2f"""

    assert parse_pbtxt(text) == {
        "a": ["it's"],
        "b": [{"c": [True], "d": [-1500.0]}, {"c": ["WORD"]}],
        "e": [],
        "f": ["x # y"],
        "g": [2.0],
    }
    for broken in ("a:", "}", "a: 'x", "a { b: 1", '{ "a": 1 }'):
        with pytest.raises(PbtxtError):
            parse_pbtxt(broken)


def test_lines_of_hashes_are_read_once() -> None:
    """Parsing takes linear time in the number of hashes, also if nothing valid follows them."""
    text = "a: 1\n" + "#" * 10_000

    assert parse_pbtxt(text) == {"a": [1]}
    with pytest.raises(PbtxtError, match="line 3"):
        parse_pbtxt(f"{text}\n$")


@pytest.mark.parametrize(
    "given",
    [
        None,
        {"name": "a"},
        tensor("a", [1], datatype="BYTES"),
        tensor("a", [1], shape=[2]),
        tensor("a", [1], shape="x"),
        tensor("a", [1], shape=[-1]),
        tensor("a", ["x"]),
        tensor("a", [True]),
        tensor("a", [1.5], datatype="INT32"),
        tensor("a", [1], datatype="BOOL"),
        tensor("a", [300], datatype="UINT8"),
        tensor("a", [10**30], datatype="INT64"),
        tensor("a", [-1], datatype="UINT8"),
        tensor("a", [1e6], datatype="FP16"),
        tensor("a", [math.inf, 1e39], datatype="FP32", shape=[2]),
        tensor("a", [10**400], datatype="FP64"),
    ],
)
def test_a_tensor_that_is_not_what_it_says_is_refused(given: Any) -> None:
    """Every inconsistency of a tensor is a status 400."""
    with pytest.raises(InvalidRequest):
        read_tensor(given)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([], "1 to 64"),
        ([tensor("A__0", [1])], "A__0, B__1"),
        ([tensor("A__0", [1]), tensor("A__0", [1])], "twice"),
        ([tensor("A__0", [1]), tensor("B__1", [1], datatype="INT8")], "must be FP32"),
        ([tensor("A__0", [1]), tensor("B__1", [1], shape=[1])], "shape"),
        ([tensor("A__0", [1] * 5, shape=[5, 1]), tensor("B__1", [1])], "one batch size"),
    ],
)
def test_inputs_must_be_those_of_the_configuration(inputs: list[Any], reason: str, folder: Path) -> None:
    """Names, types, shapes and batch sizes are checked before the model runs."""
    task = TritonTask.load(folder, CPU, is_allowed=True)

    with pytest.raises(InvalidRequest, match=reason):
        work_of(task, json.loads(json.dumps({"inputs": inputs})))


@pytest.mark.parametrize(("name", "expected"), [("DIFFERENCE__1", [-2.0]), ("SUM__0", [4.0]), ("any", [4.0])])
def test_configuration_may_name_a_part_of_the_outputs(folder: Path, name: str, expected: list[float]) -> None:
    """A configuration may name some of the model's outputs, by the number in a name or else by position."""
    (folder / "config.pbtxt").write_text(re.sub(r"output \{ name: \"DIFF.*", "", CONFIG).replace("SUM__0", name))
    task = TritonTask.load(folder, CPU, is_allowed=True)

    [found] = answer(task, {"inputs": [tensor("A__0", [1.0]), tensor("B__1", [3.0])]})

    assert [(output["name"], output["data"]) for output in found["outputs"]] == [(name, expected)]


def test_configuration_that_names_more_than_the_model_gives_is_an_error(folder: Path) -> None:
    """The error contains both numbers of outputs."""
    (folder / "config.pbtxt").write_text(CONFIG.replace("DIFFERENCE__1", "DIFFERENCE__2"))
    task = TritonTask.load(folder, CPU, is_allowed=True)

    with pytest.raises(RuntimeError, match=r"gives 2 outputs, but config\.pbtxt names output 2"):
        answer(task, {"inputs": [tensor("A__0", [1.0]), tensor("B__1", [3.0])]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_have_the_digits_of_their_type(dtype: torch.dtype) -> None:
    """A 32-bit float is written with its own digits, half as many as those of a 64-bit float.

    Readers get the same number.
    """
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = TritonConfig(outputs=(TensorSpec("y", dtype, (-1,)),))

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    task = TritonTask(torch.jit.script(Model()), config, "1", CPU)
    name = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}[dtype]
    body = {"name": "x", "shape": [1000], "datatype": name, "data": values.tolist()}
    [found] = answer(task, {"inputs": [body]})

    data = found["outputs"][0]["data"]
    assert torch.equal(torch.tensor(data, dtype=dtype), values)
    assert max(len(json.dumps(value)) for value in data) <= 14


def test_values_that_json_cannot_have_are_refused_with_the_way_out(folder: Path) -> None:
    """The error for infinities in JSON suggests raw outputs, which can contain them."""
    task = TritonTask.load(folder, CPU, is_allowed=True)
    inputs = [tensor("A__0", [3e38]), tensor("B__1", [3e38])]

    with pytest.raises(InvalidRequest, match=r"'SUM__0' has a value that is not finite.*\"binary_data\": true"):
        answer(task, {"inputs": inputs})
    [found] = answer(task, {"inputs": inputs, "parameters": {"binary_data_output": True}})

    assert found.body.endswith(torch.tensor([torch.inf, 0]).numpy().tobytes())


def test_classification_is_refused(folder: Path) -> None:
    """Triton's classification extension would change the values of the answer, so it is refused."""
    body = {"inputs": [tensor("A__0", [1])], "outputs": [{"name": "SUM__0", "parameters": {"classification": 2}}]}

    with pytest.raises(InvalidRequest, match="'classification' of an output is not supported"):
        work_of(TritonTask.load(folder, CPU, is_allowed=True), body)


# Raw tensors


def binary(tensors: list[dict[str, Any]], raw: bytes, **fields: Any) -> Incoming:
    head = json.dumps({"inputs": tensors, **fields}).encode()
    return Incoming({TARGET: "m", "inference-header-content-length": str(len(head))}, head + raw)


def raw_tensor(name: str, size: int, **changes: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": size}, **changes}


@pytest.mark.parametrize("dtype", TYPES.values())
def test_raw_values_come_back_as_they_were(dtype: torch.dtype) -> None:
    """Raw values of every type return bit for bit, also those that JSON lacks; outputs requested as JSON are JSON."""
    values = torch.tensor([float("inf"), 1.5] if dtype.is_floating_point else [1, 0], dtype=dtype)
    raw = values.view(torch.uint8).numpy().tobytes()
    named = {kind: name for name, kind in TYPES.items()}
    given = raw_tensor("x", len(raw), shape=[2], datatype=named[dtype])
    wanted = [{"name": "x"}, {"name": "y", "parameters": {"binary_data": False}}]

    request = read_inference(binary([given], raw, outputs=wanted, parameters={"binary_data_output": True}), MAX_VALUES)
    _, tensor = read_tensor(request.inputs[0])
    answer = request.parameters["form"].encode("1", [("x", tensor), ("y", torch.tensor([1]))])

    length = int(answer.headers["inference-header-content-length"])
    assert answer.body[length:] == raw
    assert [output.get("data") for output in json.loads(answer.body[:length])["outputs"]] == [None, [1]]


@pytest.mark.parametrize(
    ("incoming", "reason"),
    [
        (binary([raw_tensor("x", 9)], bytes(8)), "bytes that follow"),
        (binary([raw_tensor("x", -1)], bytes(8)), "bytes that follow"),
        (binary([raw_tensor("x", 8, data=[1, 2])], bytes(8)), "without 'data'"),
        (binary([raw_tensor("x", 4)], bytes(8)), "4 bytes after the JSON belong to no tensor"),
        (binary([raw_tensor("x", 8, parameters=[1])], bytes(8)), "'parameters' must be"),
        (Incoming({"inference-header-content-length": "99"}, b"{}"), "within the body"),
        (Incoming({"inference-header-content-length": "-1"}, b"{}"), "within the body"),
        (Incoming({"inference-header-content-length": "2"}), "has no body"),
        (Incoming({"inference-header-content-length": "1"}, b"{}"), "not valid JSON"),
    ],
)
def test_lengths_must_agree_with_the_body(incoming: Incoming, reason: str) -> None:
    """A body whose lengths do not add up is refused, so that no byte is read twice or left over."""
    with pytest.raises(BadInput, match=reason):
        read_inference(incoming, MAX_VALUES)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"shape": [3]}, "has 8 bytes, and its shape 12"), ({"shape": [8], "datatype": "BOOL"}, "bytes 0 and 1")],
)
def test_a_raw_tensor_must_fit_its_shape(changes: dict[str, Any], reason: str) -> None:
    """The sizes and values are checked before torch sees them."""
    request = read_inference(binary([raw_tensor("x", 8, **changes)], b"\x02" * 8), MAX_VALUES)

    with pytest.raises(InvalidRequest, match=reason):
        read_tensor(request.inputs[0])

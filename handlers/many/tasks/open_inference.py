"""Reads and writes tensors in the open inference protocol (V2): JSON, or JSON followed by raw tensors.

A binary body has the JSON's length in the header Inference-Header-Content-Length, as Triton's clients send it, or in
the content type that SageMaker's Triton examples use: application/vnd.sagemaker-triton.binary+json;json-header-size=N.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handlers.errors import InvalidRequest
from handlers.many.request import TaskRequest, read_body
from handlers.many.tasks.task import EncodedAnswer
from handlers.requests.incoming import Incoming, missing_body
from handlers.requests.json_values import load_json
from torchmoor.wire import headers as wire

MAX_TENSORS = 64
MAX_DIMENSIONS = 16
MAX_SIZE = 1 << 31  # of a dimension
TYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}
_JSON = "application/json"
_OCTETS = "application/octet-stream"
_SAGEMAKER = "application/vnd.sagemaker-triton.binary+json;json-header-size="
_SAGEMAKER_TYPE = re.compile(re.escape(_SAGEMAKER).replace(";", r"\s*;\s*") + r"(\d{1,10})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The form of the answer that a request asks for.

    model: its name. id: the request's, or None. names: of the requested outputs; empty for all. are_binary: by output,
    whether the request wants it raw. is_binary: the default for the other outputs. is_sagemakers: a binary
    answer has SageMaker's content type.
    """

    model: str
    id: Any
    names: tuple[str, ...]
    are_binary: Mapping[str, bool]
    is_binary: bool
    is_sagemakers: bool

    def encode(self, version: str, outputs: Sequence[tuple[str, Tensor]]) -> Any:
        """Encode the wanted outputs: a value of JSON, or an EncodedAnswer if one of them is raw.

        Raises InvalidRequest for a value that JSON cannot have.
        """
        raw: list[bytes] = []
        described = [self._describe(name, tensor, raw) for name, tensor in outputs]
        answer: dict[str, Any] = {"model_name": self.model, "model_version": version, "outputs": described}
        if self.id is not None:
            answer["id"] = self.id
        if not raw:
            return answer
        head = json.dumps(answer).encode()
        content_type = f"{_SAGEMAKER}{len(head)}" if self.is_sagemakers else _OCTETS
        fields = {"Content-Type": content_type, wire.INFERENCE_HEADER_LENGTH: str(len(head))}
        return EncodedAnswer(fields, b"".join((head, *raw)))

    def _describe(self, name: str, tensor: Tensor, raw: list[bytes]) -> dict[str, Any]:
        described: dict[str, Any] = {"name": name, "datatype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        if self.are_binary.get(name, self.is_binary):
            data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            raw.append(data)
            return {**described, "parameters": {"binary_data_size": len(data)}}
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InvalidRequest(
                f"the output {name!r} has a value that is not finite, which JSON cannot have: ask for raw data, with "
                '{"parameters": {"binary_data": true}} of the output',
                param="outputs",
            )
        return {**described, "data": _numbers(tensor)}


def read_inference(incoming: Incoming, max_json_values: int) -> TaskRequest:
    """Read a request: {"inputs": [{"name", "shape", "datatype", "data"}]}. Raises InvalidRequest, InvalidJson.

    Its parameters have the TensorForm as "form".
    """
    body, raw, is_sagemakers = _split(incoming, max_json_values)
    if not isinstance(body, dict) or not isinstance(body.get("inputs"), list):
        raise InvalidRequest(
            'this model reads tensors: send {"inputs": [{"name", "shape", "datatype", "data"}]}', param="inputs"
        )
    wanted = body.get("outputs") or []
    if not isinstance(wanted, list) or not all(isinstance(w, dict) and isinstance(w.get("name"), str) for w in wanted):
        raise InvalidRequest("'outputs' must be a list of objects with 'name'", param="outputs")
    parameters = {each["name"]: _parameters(each, "outputs") for each in wanted}
    if any("classification" in each for each in parameters.values()):
        raise InvalidRequest("'classification' of an output is not supported: rank its values", param="outputs")
    flags = {name: each.get("binary_data") for name, each in parameters.items()}
    form = TensorForm(
        model=incoming.headers.get(wire.TARGET_MODEL, ""),
        id=body.get("id"),
        names=tuple(flags),
        are_binary={name: flag is True for name, flag in flags.items() if flag is not None},
        is_binary=_parameters(body, "").get("binary_data_output") is True,
        is_sagemakers=is_sagemakers,
    )
    return TaskRequest(_with_raw_data(body["inputs"], raw), {"form": form})


def _split(incoming: Incoming, max_json_values: int) -> tuple[Any, memoryview, bool]:
    """Return the JSON, the bytes after it, and whether the content type is SageMaker's."""
    found = _SAGEMAKER_TYPE.match(incoming.headers.get("content-type", "").strip())
    text = found[1] if found else incoming.headers.get(wire.INFERENCE_HEADER_LENGTH)
    body = incoming.body
    if text is None:
        return read_body(incoming, max_json_values), memoryview(b""), False
    if not body:
        raise missing_body(incoming)
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or int(text) > len(body):
        raise InvalidRequest("the length of the JSON must be a number of bytes, within the body")
    length = int(text)
    content = load_json(body[:length], max_json_values, what="the beginning of the body, of the given length,")
    return content, memoryview(body)[length:], found is not None


def _parameters(given: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the parameters of a request, an input or an output."""
    found = given.get("parameters") or {}
    if not isinstance(found, dict):
        raise InvalidRequest("'parameters' must be a JSON object", param=param or "parameters")
    return found


def _with_raw_data(inputs: list[Any], raw: memoryview) -> list[Any]:
    """Add to each input with a binary_data_size its raw bytes, in order, as "data". Raises InvalidRequest."""
    found, start = [], 0
    for each in inputs:
        size = _parameters(each, "inputs").get("binary_data_size") if isinstance(each, dict) else None
        if size is None:
            found.append(each)
            continue
        if type(size) is not int or not 0 <= size <= len(raw) - start or "data" in each:
            raise InvalidRequest(
                "binary_data_size must be a number of bytes that follow the JSON, of a tensor without 'data'",
                param="inputs",
            )
        found.append({**each, "data": raw[start : start + size]})
        start += size
    if start != len(raw):
        raise InvalidRequest(f"{len(raw) - start} bytes after the JSON belong to no tensor", param="inputs")
    return found


def read_tensor(given: Any) -> tuple[str, Tensor]:
    """Read one tensor of a request, from raw, nested or flat data. Raises InvalidRequest."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise InvalidRequest("a tensor is an object with 'name', 'shape', 'datatype' and 'data'", param="inputs")
    name, shape = given["name"], given.get("shape")
    dtype = TYPES.get(str(given.get("datatype")))
    if dtype is None:
        raise InvalidRequest(f"the datatype of {name[:100]!r} must be one of {', '.join(TYPES)}", param="inputs")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(each) is int and 0 <= each < MAX_SIZE for each in shape)
    ):
        raise InvalidRequest(f"the shape of {name[:100]!r} must be a list of sizes", param="inputs")
    data = given.get("data")
    if isinstance(data, memoryview):
        return name, _read_raw(name, data, dtype, shape)
    values = _flatten(data)
    if math.prod(shape) != len(values):
        message = f"the data of {name[:100]!r} has {len(values)} values, and its shape {math.prod(shape)}"
        raise InvalidRequest(message, param="inputs")
    allowed: tuple[type, ...] = (int, float) if dtype.is_floating_point else (bool if dtype is torch.bool else int,)
    if not all(type(value) in allowed for value in values):
        raise InvalidRequest(f"the data of {name[:100]!r} must be of type {given['datatype']}", param="inputs")
    try:
        tensor = torch.tensor(values, dtype=dtype).reshape(shape)
        _check_range(values, tensor)
    except (RuntimeError, OverflowError, ValueError, TypeError) as exc:
        raise InvalidRequest(f"a value of {name[:100]!r} is out of range", param="inputs") from exc
    return name, tensor


def _check_range(values: list[Any], tensor: Tensor) -> None:
    """Raise ValueError for numbers that torch has changed: negative ones, or those that have become infinite."""
    if tensor.dtype is torch.uint8 and min(values, default=0) < 0:
        raise ValueError("negative")
    num_infinite = int(tensor.isinf().sum()) if tensor.is_floating_point() else 0
    if num_infinite and num_infinite != sum(map(math.isinf, values)):
        raise ValueError("too large")


def _read_raw(name: str, data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        message = f"the data of {name[:100]!r} has {len(data)} bytes, and its shape {expected}"
        raise InvalidRequest(message, param="inputs")
    if dtype is torch.bool and any(value > 1 for value in data):
        raise InvalidRequest(f"the data of {name[:100]!r} must be of bytes 0 and 1", param="inputs")
    if not expected:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as exc:  # of strides
            raise InvalidRequest(f"the shape of {name[:100]!r} is out of range", param="inputs") from exc
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _flatten(data: Any) -> list[Any]:
    flat: list[Any] = []
    stack = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(reversed(item))
        else:
            flat.append(item)
    return flat


def _numbers(tensor: Tensor) -> list[Any]:
    """Return the values. Floats have the fewest digits that name them in their own type, not in 64 bits."""
    flat = tensor.flatten()
    if flat.dtype is torch.bfloat16:
        flat = flat.float()
    if flat.dtype not in (torch.float16, torch.float32):
        return flat.tolist()
    numbers: list[Any] = flat.numpy().astype(str).astype("float64").tolist()
    return numbers

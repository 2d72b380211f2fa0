"""Container images by AWS's names, and the container whose requests and settings each stands for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import Enum

from torchmoor.errors import RequestInvalid
from torchmoor.wire.handler_variables import ALLOW_TORCHSCRIPT, INPUTS_FORM, TENSOR_PARALLEL


class Container(Enum):
    """The container that an image holds."""

    TORCHSERVE = "TorchServe"
    TGI = "TGI"
    LMI = "LMI"
    TRITON = "Triton"
    HUGGING_FACE = "Hugging Face"


# The last part of an image's repository, at AWS or where its makers publish it.
REPOSITORIES = {
    "torchmoor": Container.TORCHSERVE,
    "torchserve": Container.TORCHSERVE,
    "pytorch-inference": Container.TORCHSERVE,
    "huggingface-pytorch-tgi-inference": Container.TGI,
    "text-generation-inference": Container.TGI,
    "djl-inference": Container.LMI,
    "djl-serving": Container.LMI,
    "sagemaker-tritonserver": Container.TRITON,
    "tritonserver": Container.TRITON,
    "huggingface-pytorch-inference": Container.HUGGING_FACE,
}
# An instance here has one device, whatever number of GPUs the image's settings name for SageMaker's machine.
_ONE_DEVICE = {TENSOR_PARALLEL: "1"}
# Variables that let an endpoint answer as its container does, unless the model's own variables say otherwise.
_DEFAULTS = {
    Container.TGI: {**_ONE_DEVICE, INPUTS_FORM: "tgi"},
    Container.LMI: {**_ONE_DEVICE, "OPTION_OUTPUT_FORMATTER": "jsonlines"},
    Container.HUGGING_FACE: _ONE_DEVICE,
    Container.TRITON: {ALLOW_TORCHSCRIPT: "true"},
}
_LMI_VERSION = re.compile(r":(\d+)\.(\d+)\.")
_LMI_LINES = (0, 27)  # the first version whose streams are lines; before, a stream is one object


def default_variables(image: str, container: Container) -> Mapping[str, str]:
    """Return the variables that stand for an image's own defaults."""
    defaults = _DEFAULTS.get(container, {})
    version = _LMI_VERSION.search(image)
    if container is Container.LMI and version and (int(version[1]), int(version[2])) < _LMI_LINES:
        return {**defaults, "OPTION_OUTPUT_FORMATTER": "json"}
    return defaults


def find_container(image: str, own: Collection[str]) -> Container:
    """Return the container of an image. own: further repositories of this project's image. Raises RequestInvalid."""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    if name in own:
        return Container.TORCHSERVE
    if name not in REPOSITORIES:
        raise RequestInvalid(
            f"Image {image!r} is not served here: use an image whose repository is one of {', '.join(REPOSITORIES)}, "
            f"or start torchmoor up with --own-image {name or 'NAME'} if it is torchmoor's own image."
        )
    return REPOSITORIES[name]

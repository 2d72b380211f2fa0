"""The settings of the engine vllm."""

import json
from typing import Annotated, Any

from pydantic import Field

from handlers.settings_group import Count, HandlerGroup, Size, Switch, from_text

Options = Annotated[dict[str, Any], from_text(json.loads)]


class VllmSettings(HandlerGroup, title="vllm"):
    """The engine vllm; it also follows `model`, `session` and `engine`, where docs/gpu.md says so."""

    pipeline_parallel: Count = Field(1, description="Groups of devices that the layers are spread over.")
    quantization: str = Field(
        "", description="Form of the weights by vLLM's name, such as awq, gptq or fp8; empty: as the checkpoint says."
    )
    enforce_eager: Switch = Field(
        False, description="Neither compile the model nor capture graphs: a faster start, slower answers."
    )
    kv_offload_bytes: Size = Field(0, description="Host memory for keys and values that the device has no room for.")
    speculative: Options = Field({}, description="vLLM's speculative_config, as JSON.")
    options: Options = Field({}, description="Further engine arguments of vLLM by their names in Python, as JSON.")

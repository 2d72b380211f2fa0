"""Settings of vLLM's engine: `handler.vllm`."""

import json
from typing import Annotated, Any

from pydantic import Field

from handlers.settings.group import Count, HandlerGroup, Size, Switch, from_text

Options = Annotated[dict[str, Any], from_text(json.loads)]


class VllmSettings(HandlerGroup, title="vllm"):
    """The engine vllm; it also follows `model`, `session` and `engine`, where docs/gpu.md says so."""

    pipeline_parallel: Count = Field(1, description="Pipeline stages over which the layers are spread.")
    quantization: str = Field(
        "",
        description="Quantization of the weights by vLLM's name, such as awq, gptq or fp8; empty: as the checkpoint "
        "says.",
    )
    enforce_eager: Switch = Field(
        False, description="Do not compile the model or capture graphs: faster start, slower answers."
    )
    max_loras: Count = Field(8, description="Different adapters in one batch (handler.adapters).")
    kv_offload_bytes: Size = Field(0, description="Host memory for keys and values that do not fit on the device.")
    speculative: Options = Field({}, description="vLLM's speculative_config, as JSON.")
    options: Options = Field({}, description="Further engine arguments of vLLM, by their Python names, as JSON.")

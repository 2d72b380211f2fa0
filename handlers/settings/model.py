"""Settings of the checkpoint: `handler.model`."""

from typing import Literal

from pydantic import Field

from handlers.settings.group import GIB, MIB, Count, HandlerGroup, Positive


class ModelSettings(HandlerGroup, title="model"):
    """The checkpoint, and how it is loaded."""

    path: str = Field(
        "model",
        min_length=1,
        description="A Hugging Face checkpoint: a directory, absolute or relative to the archive; s3://bucket/prefix; "
        "hf://owner/name or hf://owner/name@revision.",
    )
    revision: str = Field("", description="Branch, tag or commit on the hub; the path may contain it instead.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="`auto`: float32 on a CPU, the checkpoint's own type on a GPU."
    )
    tensor_parallel: Count = Field(
        1, description="Devices over which each layer is spread; more than 1 needs the engine vllm."
    )
    cache_dir: str = Field(
        "~/.cache/torchmoor", description="Directory for checkpoints from S3; checkpoints from the hub are in HF_HOME."
    )
    max_download_bytes: Count = Field(500 * GIB, description="Size limit of a downloaded checkpoint.")
    max_config_bytes: Count = Field(4 * MIB, description="Size limit of each configuration file and chat template.")
    max_tokenizer_bytes: Count = Field(64 * MIB, description="Size limit of each tokenizer file and weight index.")
    connect_timeout_s: Positive = Field(10.0, description="Time-out of a connection to S3 or the hub.")
    read_timeout_s: Positive = Field(60.0, description="Longest time without a byte during a download.")

"""Settings of many models in one worker: `handler.many`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from handlers.settings.group import GIB, Count, HandlerGroup, Number, Positive, Size, Switch, Texts, refusal


class ManySettings(HandlerGroup, title="many"):
    """Many models in one worker: their source, and the memory of each tier (docs/many-models.md)."""

    source: str = Field(
        "models",
        description='Where models are: a directory, absolute or relative to the archive, or s3://bucket/prefix; "": '
        "models are only loaded by name and URL.",
    )
    cache_dir: str = Field(
        "~/.cache/torchmoor/many",
        description="Directory for unpacked archives; each worker of a host uses a folder of its own.",
    )
    url_roots: Texts = Field(
        ("/opt/ml/models",), description="Directories below which models may be loaded by name and URL."
    )
    cache: Literal["enabled", "disabled"] = Field(
        "enabled",
        description="`enabled`, or `disabled`: a model is dropped when the requests that wait for it are answered.",
    )
    device_bytes: Size = Field(
        0, description="Memory for models on the device; 0: 0.8 of a GPU's memory, or half of the host's on a CPU."
    )
    host_bytes: Size = Field(
        4 * GIB, description="Memory for models that were moved from a GPU to the host; unused on a CPU."
    )
    disk_bytes: Count = Field(50 * GIB, description="Disk space for unpacked archives.")
    pinned: Texts = Field((), description="Models that are loaded at the start and never evicted.")
    prewarmed: Texts = Field((), description="Models that are loaded at the start and may be evicted.")
    refresh_s: Positive = Field(10.0, description="Interval at which models in memory are compared with their source.")
    broken_s: Number = Field(
        60.0, ge=0, description="How long a model that failed to load is refused, unless it is replaced."
    )
    hold_s: Positive = Field(
        55.0, description="How long a request waits for its model; then it gets 429, and the load continues."
    )
    load_timeout_s: Positive = Field(
        360.0, description="Time-out of a model's download and unpacking together, and again of its loading."
    )
    room_timeout_s: Positive = Field(30.0, description="How long a load waits for memory that running requests hold.")
    num_loaders: Count = Field(2, description="Models loaded at a time.")
    num_downloads: Count = Field(4, description="Models looked up, downloaded and unpacked at a time.")
    max_waiting: Count = Field(1024, description="Requests that may wait for models.")
    max_loading: Count = Field(256, description="Models that may be loading or waiting for it.")
    max_archive_bytes: Count = Field(20 * GIB, description="Size limit of an archive.")
    max_unpacked_bytes: Count = Field(40 * GIB, description="Size limit of an unpacked model.")
    max_files: Count = Field(2000, description="Files of one model.")
    max_ratio: Positive = Field(200.0, description="Limit of an archive's unpacked size relative to its packed size.")
    connect_timeout_s: Positive = Field(5.0, description="Time-out of a connection to S3.")
    read_timeout_s: Positive = Field(30.0, description="Longest time without a byte during a download.")
    allow_torchscript: Switch = Field(
        False, description="Load TorchScript models, which can run any code: only for archives that you trust."
    )
    allow_pickle: Switch = Field(
        False, description="Load pickled weights, which can run any code: only for archives that you trust."
    )

    @model_validator(mode="after")
    def _check_roots(self) -> Self:
        for root in self.url_roots:
            if not root.startswith("/"):
                raise refusal(
                    "url_roots", f"must be absolute paths, with commas between them in the environment, not {root!r}"
                )
        return self

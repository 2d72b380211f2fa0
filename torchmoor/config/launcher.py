"""Settings of the instances that the proxy starts on its own host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from torchmoor.config.body_heap import DEFAULT_HEAP_MIB
from torchmoor.config.group import Count, Positive, SettingsGroup
from torchmoor.wire.progress import INTERVAL_S

DEFAULT_ENDPOINT = "llava"  # serves the demo model
DEFAULT_CAPACITY = 100  # below the handlers' own limit
DEFAULT_BODY_MIB = 64
DEFAULT_START_TIMEOUT_S = 180.0
HeapMib = Annotated[int, Field(ge=128)]
INSTANCE_LOG = Path("logs", "torchserve.log")  # in an instance's folder, which is in the run directory


class LaunchSettings(SettingsGroup, title="launcher"):
    """Instances that `torchmoor serve` starts on its own host: the instances of variants with Autoscaling."""

    model_store: str = Field("model_store", description="Directory of the .mar archives, one for each model.")
    run_dir: str = Field("", description="Directory for the instances' folders and logs; empty: a temporary directory.")
    python: str = Field(
        "",
        description="Python whose TorchServe and libraries the instances use, such as one with vLLM; empty: the "
        "proxy's own.",
    )
    gpus_per_instance: Count = Field(1, description="GPUs per instance; more than 1 for a model that vLLM spreads.")
    capacity: Count = Field(DEFAULT_CAPACITY, description="Requests that an instance gets at a time.")
    max_body_mib: Annotated[int, Field(ge=1, le=2047)] = Field(
        DEFAULT_BODY_MIB,
        description="Largest request or answer of an instance, in MiB. Asynchronous requests may need 1024, and a "
        "larger heap.",
    )
    heap_mib: HeapMib = Field(
        DEFAULT_HEAP_MIB, description="Heap of an instance's JVM in MiB; it holds bodies several times."
    )
    start_timeout_s: Positive = Field(
        DEFAULT_START_TIMEOUT_S,
        description="Seconds for an instance to load its model; a large checkpoint that is downloaded needs more.",
    )
    progress_interval_s: Annotated[float, Field(ge=0)] = Field(
        INTERVAL_S, description="Seconds between lines about a model that is downloading or loading; 0 for no lines."
    )

"""Settings of LoRA adapters: `handler.adapters`."""

from pydantic import Field

from handlers.settings.group import GIB, Count, HandlerGroup


class AdapterSettings(HandlerGroup, title="adapters"):
    """LoRA adapters of a chat model (docs/adapters.md). How they are found, read and kept is in the group many."""

    source: str = Field(
        "",
        description="Where PEFT's folders are: a directory, absolute or relative to the archive, file:// or "
        's3://bucket/prefix; "": the model has no adapters.',
    )
    max_bytes: Count = Field(
        GIB, description="Device memory for adapters; the least recently used adapter is evicted first."
    )
    max_rank: Count = Field(64, description="Largest rank of an adapter's matrices.")

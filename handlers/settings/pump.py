"""Settings of the exchange with TorchServe: `handler.pump`."""

from pydantic import Field

from handlers.settings.group import Count, HandlerGroup, Number, Positive


class PumpSettings(HandlerGroup, title="pump"):
    """Requests and answers between TorchServe and the service."""

    max_in_flight: Count = Field(
        112,
        description="Requests accepted at a time. Must be below the archive's batchSize, or further requests wait "
        "unseen in TorchServe.",
    )
    stream_wait_s: Positive = Field(
        0.2, description="Longest wait for output while a stream is open; output ends the wait."
    )
    omitted_wait_s: Positive = Field(0.05, description="Longest wait for output while no stream is open.")
    stream_interval_s: Number = Field(
        0.02,
        ge=0,
        description="Shortest time between two pieces of a stream; its first token and its end are sent at once. 0: "
        "each token is sent at once.",
    )
    resend_bytes_per_s: Count = Field(
        20_000_000, description="Bytes of unanswered requests' bodies that TorchServe may resend per second."
    )
    max_response_bytes: Count = Field(
        6_000_000,
        description="Bytes of one reply to TorchServe; more than TorchServe's max_response_size kills the worker.",
    )

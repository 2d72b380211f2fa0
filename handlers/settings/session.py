"""Settings of sessions: `handler.session`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from handlers.settings.group import GIB, MIB, Count, HandlerGroup, Number, Size, from_text, refusal
from torchmoor.wire.handler_variables import DEFAULT_DEVICE_FRACTION


class ChatSessionSettings(HandlerGroup, title="session"):
    """Sessions: their memory, their number and their time to live."""

    kv_bytes: Size = Field(
        0,
        description="Device memory for keys and values, allocated at the start. 0: from kv_tokens or device_fraction.",
    )
    kv_tokens: Size = Field(0, description="The same as a number of positions. 0: from device_fraction.")
    device_fraction: Number = Field(
        DEFAULT_DEVICE_FRACTION,
        gt=0,
        lt=1,
        description="Fraction of a GPU's memory for this worker: weights, features, working memory, and keys and "
        "values in the rest. On a CPU keys and values get 1 GiB instead.",
    )
    features_bytes: Count = Field(512 * MIB, description="Device memory for features of images.")
    host_bytes: Count = Field(GIB, description="Host memory for encoded images.")
    max_sessions: Count = Field(
        1024,
        description="Sessions in a worker's memory. With a journal, a new one evicts the least recently used idle "
        "one; without, it is refused.",
    )
    max_session_bytes: Size = Field(
        0, description="Device memory of one session, its running answer included; 0: no limit per session."
    )
    ttl_s: Count = Field(
        3600,
        description="Time from a session's opening to its expiry, unless the client asks for another time. Turns do "
        "not prolong it, because the session's id contains its expiry.",
    )
    idle_ttl_s: Size = Field(
        0,
        description="Without a journal, a session that is not used for this time expires; 0: off. With a journal, "
        "unused sessions are evicted instead.",
    )
    max_ttl_s: Annotated[int, from_text(int)] = Field(86_400, description="Longest time to live a client may ask for.")
    max_images: Count = Field(8, description="Images per session, or per request without one.")
    max_history_chars: Count = Field(2_000_000, description="Characters of all texts of a session.")
    max_total_history_chars: Count = Field(
        200_000_000, description="Characters of all sessions in a worker's memory; idle ones are evicted for it."
    )
    max_waiting_turns: Size = Field(4, description="Turns of one session that may wait for the running one.")
    max_pinned_fraction: Number = Field(0.5, ge=0, lt=1, description="Fraction of the KV cache for pinned sessions.")
    overflow: Literal["error", "drop_oldest"] = Field(
        "error",
        description="When a question exceeds the model's context: `error` refuses it, `drop_oldest` drops the oldest "
        "turns and keeps their images.",
    )
    tombstone_s: Count = Field(
        3600,
        description="How long a closed or expired session is answered as such.",
    )
    max_tombstones: Size = Field(100_000, description="Closed and expired sessions that a worker remembers.")

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.max_ttl_s < self.ttl_s:
            raise refusal("max_ttl_s", f"must be at least ttl_s ({self.ttl_s}), not {self.max_ttl_s}")
        return self

"""The handler's settings: the `handler:` group of an archive's model-config, overridden by the environment.

`TORCHMOOR_HANDLER_<GROUP>_<KEY>` wins over the file; commas separate the items of a list there. The worker reads its
settings once, in `initialize`, and passes each part its own group.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from handlers.errors import SettingsError
from handlers.settings.grammar import GrammarSettings
from handlers.settings.group import (
    Count,
    HandlerGroup,
    Number,
    Positive,
    Size,
    Switch,
    Texts,
    from_text,
    nested_groups,
    refusal,
)
from handlers.settings.many import AdapterSettings, ManySettings, TaskSettings
from handlers.settings.vllm import VllmSettings
from torchmoor.wire.store_urls import JOURNAL_URLS

ENV_PREFIX = "TORCHMOOR_HANDLER_"
MIB = 1 << 20
GIB = 1 << 30
# What the engine vllm does not have, with the value that asks for nothing.
OF_BUILTIN = (
    ("model", "attention", "auto"),
    ("model", "compile", "off"),
    ("session", "kv_tokens", 0),
    ("journal", "max_kv_bytes", 0),
)
MAX_CHAR_BYTES = 6  # of a character in JSON, as in \u0001


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
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="Attention implementation of the vision tower."
    )
    compile: Literal["off", "layers"] = Field(
        "off", description="`layers`: torch.compile between the attention calls, for GPUs; slower on a CPU."
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


class ChatSessionSettings(HandlerGroup, title="session"):
    """Sessions: their memory, their number and their time to live."""

    kv_bytes: Size = Field(
        0,
        description="Device memory for keys and values, allocated at the start. 0: from kv_tokens or device_fraction.",
    )
    kv_tokens: Size = Field(0, description="The same as a number of positions. 0: from device_fraction.")
    device_fraction: Number = Field(
        0.85,
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


class IntakeSettings(HandlerGroup, title="intake"):
    """Images: where they may come from, and how large they may be."""

    max_bytes: Count = Field(20 * MIB, description="Size limit of an encoded image.")
    max_pixels: Count = Field(50_000_000, description="Pixels of an image, checked before it is decoded.")
    max_aspect_ratio: Positive = Field(
        100.0,
        description="Longest side relative to the shortest, which the preprocessor scales up to a fixed size.",
    )
    allowed_hosts: Texts = Field(
        (), description="Private host names, addresses or CIDR blocks from which images may be downloaded."
    )
    allow_urls: Switch = Field(
        True, description="Download images from addresses that clients send; false: they must send the image itself."
    )
    connect_timeout_s: Positive = Field(3.0, description="Time-out of a connection to an image's address.")
    read_timeout_s: Positive = Field(10.0, description="Longest time without a byte during a download.")
    total_timeout_s: Positive = Field(20.0, description="Longest time of one download.")
    max_redirects: Size = Field(3, description="Redirects that a download follows.")
    num_threads: Count = Field(8, description="Threads that decode images and rebuild or close sessions.")
    fetch_threads: Count = Field(
        16, description="Requests that download images at a time; one caller has at most half of them."
    )
    fetching_timeout_s: Positive = Field(
        40.0,
        description="Time from a request's arrival to the end of its downloads, at most two thirds of the request's "
        "own time. Keep it below the proxy's timeouts.model_timeout_s.",
    )
    decoding_bytes: Count = Field(
        2 * GIB,
        description="Memory per worker for images that are decoded and scaled: 14 to 18 bytes per pixel, or 4 to 8 for "
        "one that is reduced (WebP: 18); an image that needs more is refused.",
    )
    decoding_timeout_s: Positive = Field(
        10.0, description="How long an image waits for its share of decoding_bytes; then it is refused with 507."
    )
    allowed_buckets: Texts = Field(
        (), description="Buckets, as bucket or bucket/prefix, from which clients may name images as s3:// addresses."
    )
    large_bytes: Count = Field(
        GIB, description="Size limit of an image from S3. One above max_bytes is scaled down on arrival, one at a time."
    )
    large_pixels: Count = Field(
        400_000_000,
        description="Pixels of such an image when it is decoded: 4 bytes of memory per pixel, 8 with transparency, "
        "within decoding_bytes.",
    )
    scaled_pixels: Count = Field(
        6_000_000, description="Pixels to which such an image is scaled, within max_pixels and max_bytes."
    )
    s3_timeout_s: Positive = Field(300.0, description="Time-out for downloading and scaling an image from S3.")


class RequestSettings(HandlerGroup, title="request"):
    """The bodies of requests, and what every request must state."""

    max_messages: Count = Field(512, description="Messages in an OpenAI body.")
    max_choices: Count = Field(8, description="Answers to one request of OpenAI's completions, which asks for `n`.")
    max_json_values: Count = Field(500_000, description="JSON values in a body, estimated before it is parsed.")
    inputs_form: Literal["tgi", "lmi", "lmi-json", "lmi-outputs"] = Field(
        "tgi",
        description="Form of answers to `inputs`, unless Accept requests another; lmi-json and lmi-outputs are those "
        "of LMI 0.25.",
    )
    requires_eula: Switch = Field(
        False, description="Refuse requests whose CustomAttributes do not contain accept_eula=true."
    )


class EngineSettings(HandlerGroup, title="engine"):
    """The engine, the batch of each step, and the length of prompts and answers."""

    name: Literal["builtin", "vllm"] = Field(
        "builtin", description="`builtin`, or `vllm`: vLLM's engine, in an environment of its own (docs/gpu.md)."
    )
    max_rows: Count = Field(64, description="Sequences in one engine step.")
    prefill_chunk: Size = Field(0, description="Prompt tokens in one step; 0: 512 on a CPU, 2,048 on a GPU.")
    max_stretch: Number = Field(
        1.7, gt=1, description="Longest time of a step with prompt tokens, as a multiple of a step without them."
    )
    gpu_step_s: Number = Field(
        0.05, ge=0, description="On a GPU, a step with prompt tokens may take this long in spite of max_stretch."
    )
    max_prompt_tokens: Size = Field(
        0, description="Tokens of a conversation including its question; 0: the model's own limit."
    )
    max_context_tokens: Size = Field(
        0, description="Tokens of a conversation including its answer; 0: the model's own limit."
    )
    max_new_tokens: Count = Field(256, description="Tokens of an answer, unless the client asks for another number.")
    max_new_tokens_limit: Annotated[int, from_text(int)] = Field(
        2048, description="Largest number of tokens that a client may ask for."
    )
    max_question_chars: Count = Field(
        500_000,
        description="Characters of a question, checked before it is tokenized.",
    )
    turn_timeout_s: Positive = Field(300.0, description="Longest time of a turn, from its arrival to its end.")
    num_threads: Count = Field(1, description="Threads of torch on a CPU.")
    prepare_threads: Count = Field(
        4, description="Threads that render and tokenize questions and record answers in the journal."
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        limit = self.max_new_tokens_limit
        if limit < self.max_new_tokens:
            raise refusal(
                "max_new_tokens_limit", f"must be at least max_new_tokens ({self.max_new_tokens}), not {limit}"
            )
        return self


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


class JournalSettings(HandlerGroup, title="journal"):
    """The journal from which another worker continues a session."""

    url: str = Field(
        "off",
        repr=False,  # it may contain a password
        description=f"{JOURNAL_URLS}; `off`: a session ends with its worker. Never shown, because it may contain a "
        "password.",
    )
    connect_timeout_s: Positive = Field(2.0, description="Time-out of a connection to Redis or S3.")
    timeout_s: Positive = Field(
        10.0, description="Time-out of one operation, in which an image of intake.max_bytes must be transferred."
    )
    max_in_flight: Count = Field(32, description="Operations at a time, over all of the worker's threads.")
    claim_s: Count = Field(3600, description="How long a journal remembers an opening by its invocation id.")
    max_event_bytes: Count = Field(
        4 * MIB,
        description="Size limit of a question with its answer as JSON.",
    )
    max_image_bytes: Count = Field(
        64 * MIB, description="Size limit of an image that is read; at least intake.max_bytes."
    )
    max_bytes: Count = Field(
        50 * GIB,
        description="Size limit of a directory with all its sessions. When it is full, new sessions are refused.",
    )
    max_sessions: Size = Field(
        1_000_000, description="Open sessions per endpoint; above it new sessions are refused. 0: no limit."
    )
    max_endpoint_bytes: Size = Field(
        100 * GIB, description="Bytes of one endpoint's sessions; above it new sessions are refused. 0: no limit."
    )
    max_caller_bytes: Size = Field(
        25 * GIB, description="Bytes of one caller's sessions; above it new sessions are refused. 0: no limit."
    )
    min_free_bytes: Size = Field(
        256 * MIB,
        description="Free space that must stay on a directory's file system; below it new sessions are refused, and "
        "turns of open ones are served.",
    )
    max_replays: Count = Field(16, description="Answers per session that are kept for retried requests.")
    max_kv_bytes: Size = Field(
        0,
        description="Bytes in the store for KV caches of idle sessions, which another worker reads instead of "
        "computing them again; 0: none are written.",
    )
    max_caller_kv_bytes: Size = Field(
        0, description="The part of max_kv_bytes that one caller's sessions may use; 0: half."
    )
    kv_idle_s: Number = Field(5.0, ge=0, description="How long a session must be idle before its KV cache is written.")


class HandlerSettings(HandlerGroup):
    """All groups of settings of a worker."""

    model: ModelSettings = ModelSettings()
    session: ChatSessionSettings = ChatSessionSettings()
    intake: IntakeSettings = IntakeSettings()
    request: RequestSettings = RequestSettings()
    engine: EngineSettings = EngineSettings()
    vllm: VllmSettings = VllmSettings()
    grammar: GrammarSettings = GrammarSettings()
    pump: PumpSettings = PumpSettings()
    journal: JournalSettings = JournalSettings()
    many: ManySettings = ManySettings()
    adapters: AdapterSettings = AdapterSettings()
    tasks: TaskSettings = TaskSettings()

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        """Refuse settings that the chosen engine does not have."""
        if self.engine.name == "vllm":
            for group, key, neutral in OF_BUILTIN:
                if getattr(getattr(self, group), key) != neutral:
                    raise refusal(f"{group}.{key}", "is not offered by the engine vllm")
            return self
        if self.model.tensor_parallel > 1:
            raise refusal(
                "model.tensor_parallel",
                f"is {self.model.tensor_parallel}, but the built-in engine serves its model from one device: set "
                "handler.engine.name to vllm (docs/gpu.md), or run one instance per GPU (torchmoor up --instances, or "
                "an endpoint with more instances)",
            )
        if self.vllm != VllmSettings():
            raise refusal("vllm", "needs handler.engine.name: vllm (docs/gpu.md)")
        return self

    @model_validator(mode="after")
    def _check_journal(self) -> Self:
        """Refuse limits with which the journal could not read back what clients may send."""
        if self.journal.url == "off":
            return self
        if self.journal.max_image_bytes < self.intake.max_bytes:
            raise refusal("journal.max_image_bytes", f"must be at least intake.max_bytes ({self.intake.max_bytes})")
        num_bytes = MAX_CHAR_BYTES * self.engine.max_question_chars
        if self.journal.max_event_bytes < num_bytes:
            raise refusal(
                "journal.max_event_bytes",
                f"must be at least {MAX_CHAR_BYTES} * engine.max_question_chars ({num_bytes})",
            )
        return self


def load_settings(config: Mapping[str, Any], environ: Mapping[str, str]) -> HandlerSettings:
    """Return the settings of a model-config's `handler:` group and the environment.

    Raises SettingsError on an unknown group or key, a value of the wrong type, or one out of range.
    """
    variables = {
        f"{ENV_PREFIX}{name}_{key}".upper(): (name, key)
        for name, group in nested_groups(HandlerSettings)
        for key in group.model_fields
    }
    values: dict[str, Any] = {str(name): given or {} for name, given in config.items()}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable not in variables:
            raise SettingsError(f"{variable} is not a setting; docs/configuration.md lists them all")
        name, key = variables[variable]
        given = values.get(name, {})
        if isinstance(given, Mapping):
            values[name] = {**given, key: text}
    return HandlerSettings(**values)

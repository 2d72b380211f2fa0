"""The handler's settings: the `handler:` group of an archive's model-config, overridden by the environment.

`TORCHMOOR_HANDLER_<GROUP>_<KEY>` beats the file; a value of several items is separated by commas there.
Read once, in `initialize`; every part of the handler gets its own group and never the whole.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from handlers.errors import ConfigError

ENV_PREFIX = "TORCHMOOR_HANDLER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    # A Hugging Face checkpoint: a directory, absolute or relative to the archive; s3://bucket/prefix; hf://owner/name
    path: str = "model"
    revision: str = ""  # of a checkpoint on the hub: a branch, tag or commit
    dtype: str = "auto"  # auto: float32 on CPU, the checkpoint's own type on a GPU
    attention: str = "auto"  # of the vision tower (the decoder has its own, see models/attention.py)
    compile: str = "off"  # layers: torch.compile between the attention calls; for GPUs, on a CPU it is slower
    tensor_parallel: int = 1  # devices that the model is spread over
    cache_dir: str = "~/.cache/torchmoor"  # where checkpoints of S3 are kept; the hub has its own, HF_HOME
    max_download_bytes: int = 500 << 30
    connect_timeout_s: float = 10.0  # of a download
    read_timeout_s: float = 60.0  # between two pieces

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("handler.model.path must not be empty")
        if self.dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise ConfigError(f"handler.model.dtype must be auto, float32, float16 or bfloat16, not {self.dtype!r}")
        if self.attention not in ("auto", "sdpa", "eager", "flash_attention_2"):
            known = "auto, sdpa, eager or flash_attention_2"
            raise ConfigError(f"handler.model.attention must be {known}, not {self.attention!r}")
        if self.compile not in ("off", "layers"):
            raise ConfigError(f"handler.model.compile must be off or layers, not {self.compile!r}")
        _positive("model", self, "max_download_bytes", "connect_timeout_s", "read_timeout_s")
        if self.tensor_parallel != 1:
            raise ConfigError(
                f"handler.model.tensor_parallel is {self.tensor_parallel}, but a worker serves its model from one "
                "device: run one instance a GPU (torchmoor up --instances, or an endpoint with more instances); "
                "a model that does not fit one device needs a larger one, or a checkpoint of a smaller type"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    kv_bytes: int = 0  # device memory for keys and values, taken at the start; 0: by kv_tokens or device_fraction
    kv_tokens: int = 0  # the same in positions; 0: by device_fraction
    device_fraction: float = 0.85  # of a GPU's memory for this worker: weights, features, and the rest for keys and
    # values, beside what a step needs; on a CPU they get 1 GiB instead
    features_bytes: int = 512 << 20  # device memory for images' features
    host_bytes: int = 1 << 30  # host memory for encoded images
    max_sessions: int = 1024  # open at once
    max_session_bytes: int = 0  # device memory of one session, its running answer included; 0: no limit of its own
    ttl_s: int = 3600  # from the opening to the expiry, unless the client asks for another
    max_ttl_s: int = 86_400
    max_images: int = 8  # a session, or a request without one
    max_waiting_turns: int = 4  # of one session, behind the running one
    max_pinned_fraction: float = 0.5  # of the KV cache, for sessions that operators pin
    overflow: str = "error"  # of the model's context: refuse the question, or drop_oldest turns, keeping the images
    tombstone_s: int = 3600  # how long a closed or expired id is remembered as such
    max_tombstones: int = 100_000

    def __post_init__(self) -> None:
        _positive("session", self, "features_bytes", "host_bytes", "max_sessions", "ttl_s", "max_images", "tombstone_s")
        _not_negative("session", self, "kv_bytes", "kv_tokens", "max_session_bytes", "max_waiting_turns")
        _not_negative("session", self, "max_tombstones")
        if not 0 < self.device_fraction < 1:
            raise ConfigError(f"handler.session.device_fraction must be between 0 and 1, not {self.device_fraction}")
        if not 0 <= self.max_pinned_fraction < 1:
            given = self.max_pinned_fraction
            raise ConfigError(f"handler.session.max_pinned_fraction must be at least 0 and below 1, not {given}")
        if self.overflow not in ("error", "drop_oldest"):
            raise ConfigError(f"handler.session.overflow must be error or drop_oldest, not {self.overflow!r}")
        if self.max_ttl_s < self.ttl_s:
            raise ConfigError(f"handler.session.max_ttl_s must be at least ttl_s ({self.ttl_s}), not {self.max_ttl_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSettings:
    max_bytes: int = 20 << 20  # an encoded image
    max_pixels: int = 50_000_000  # of an image, checked before it is decoded
    max_aspect_ratio: float = 100.0  # the preprocessor scales the shorter side up, and the longer one with it
    allowed_hosts: tuple[str, ...] = ()  # host names, addresses or CIDR blocks that may be private
    allow_urls: bool = True
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0  # between two pieces
    total_timeout_s: float = 20.0
    max_redirects: int = 3
    num_threads: int = 8  # images fetched and decoded at once
    allowed_buckets: tuple[str, ...] = ()  # bucket or bucket/prefix, of which anyone may name s3:// addresses
    large_bytes: int = 1 << 30  # an image from S3; above max_bytes it is scaled down on arrival, one at a time
    large_pixels: int = 400_000_000  # of such an image as it is decoded: 4 bytes of memory each, 8 with transparency
    scaled_pixels: int = 6_000_000  # what is left of it, within max_pixels and max_bytes
    s3_timeout_s: float = 300.0  # for all of an image from S3

    def __post_init__(self) -> None:
        _positive("intake", self, "max_bytes", "max_pixels", "max_aspect_ratio", "num_threads")
        _positive("intake", self, "large_bytes", "large_pixels", "scaled_pixels", "s3_timeout_s")
        _positive("intake", self, "connect_timeout_s", "read_timeout_s", "total_timeout_s")
        _not_negative("intake", self, "max_redirects")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """Requests that bring their whole conversation or prompt with them."""

    max_messages: int = 512
    inputs_form: str = (
        "tgi"  # how `inputs` are answered unless Accept says: tgi, lmi, or lmi-outputs, LMI's older lines
    )

    def __post_init__(self) -> None:
        _positive("request", self, "max_messages")
        if self.inputs_form not in ("tgi", "lmi", "lmi-outputs"):
            raise ConfigError(f"handler.request.inputs_form must be tgi, lmi or lmi-outputs, not {self.inputs_form!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    max_rows: int = 32  # sequences in one step
    prefill_chunk: int = 512  # prompt tokens in one step, beside the decoding rows
    max_stretch: float = 1.7  # how many times longer a step may take because it carries prompt tokens, too
    max_prompt_tokens: int = 0  # of a conversation with its question; 0: what the model reads
    max_context_tokens: int = 0  # the same with the answer; 0: what the model reads
    max_new_tokens: int = 256  # of an answer, unless the client asks for another number
    max_new_tokens_limit: int = 2048
    max_question_chars: int = 500_000  # checked before a question is tokenized, which takes a second a megabyte
    turn_timeout_s: float = 300.0
    num_threads: int = 1  # of torch on a CPU
    prepare_threads: int = 4  # questions rendered, and answers recorded in the journal, at once

    def __post_init__(self) -> None:
        _positive("engine", self, "max_rows", "prefill_chunk", "max_new_tokens", "turn_timeout_s", "num_threads")
        _positive("engine", self, "prepare_threads")
        _positive("engine", self, "max_question_chars")
        _not_negative("engine", self, "max_prompt_tokens", "max_context_tokens")
        if self.max_stretch <= 1:
            raise ConfigError(f"handler.engine.max_stretch must be more than 1, not {self.max_stretch}")
        if self.max_new_tokens_limit < self.max_new_tokens:
            raise ConfigError(
                f"handler.engine.max_new_tokens_limit must be at least max_new_tokens ({self.max_new_tokens}), "
                f"not {self.max_new_tokens_limit}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PumpSettings:
    max_in_flight: int = 112  # must stay below the archive's batchSize, or the excess waits unseen in TorchServe
    stream_wait_s: float = 0.2  # the longest wait for news while a stream is open; each of its tokens is news
    omitted_wait_s: float = 0.05  # the same while nothing streams
    resend_bytes_per_s: int = 20_000_000  # how fast TorchServe may resend the bodies of unanswered requests
    max_response_bytes: int = 6_000_000  # in one step; more than TorchServe's max_response_size kills the worker

    def __post_init__(self) -> None:
        _positive("pump", self, "max_in_flight", "stream_wait_s", "omitted_wait_s", "resend_bytes_per_s")
        _positive("pump", self, "max_response_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    # file:///a/directory, redis://host:port/db, s3://bucket/prefix, ...; off: a session ends with its worker. It may
    # have a password in it, so it is not shown.
    url: str = field(default="off", repr=False)
    connect_timeout_s: float = 2.0  # to the server of Redis or S3
    timeout_s: float = 10.0  # of an operation; an image of intake.max_bytes must come through in that time
    max_in_flight: int = 32  # operations at once, of all of the worker's threads
    claim_s: int = 3600  # how long the outcome of an opening is remembered under its invocation id
    max_replays: int = 16  # answers of a session that are kept to be given again

    def __post_init__(self) -> None:
        _positive("journal", self, "connect_timeout_s", "timeout_s", "max_in_flight", "claim_s", "max_replays")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManySettings:
    """Many models in one worker: where they come from, and how much room each tier has (docs/many-models.md)."""

    # A directory, absolute or relative to the archive, or s3://bucket/prefix; "": only models loaded by name and url.
    source: str = "models"
    cache_dir: str = "~/.cache/torchmoor/many"  # unpacked archives; each worker of a host takes a folder of its own
    url_roots: tuple[str, ...] = ("/opt/ml/models",)  # models loaded by name and url lie below one of these
    cache: str = "enabled"  # disabled: a model is dropped when the requests that wait for it are answered
    device_bytes: int = 0  # models on the device; 0: 0.8 of a GPU's memory, half of the host's on a CPU
    host_bytes: int = 4 << 30  # models that had to leave a GPU; unused on a CPU, where the device is the host
    disk_bytes: int = 50 << 30  # unpacked archives
    count_mapped: bool = True  # mapped weights count like private memory, although the kernel may drop their pages
    pinned: tuple[str, ...] = ()  # loaded at the start, never evicted
    prewarmed: tuple[str, ...] = ()  # loaded at the start
    refresh_s: float = 10.0  # how often models in memory are compared with their source
    broken_s: float = 60.0  # how long a broken model is remembered, unless it is replaced
    hold_s: float = 55.0  # how long a request waits for its model; then 429, and the load goes on
    load_timeout_s: float = 360.0  # of a model's download with its unpacking, and again of its loading
    room_timeout_s: float = 30.0  # how long a load waits for memory that requests are using
    num_loaders: int = 2  # models loaded at once
    num_downloads: int = 4  # models looked up, downloaded and unpacked at once
    max_waiting: int = 1024  # requests that wait for models
    max_loading: int = 256  # models that are being loaded or wait for it
    max_archive_bytes: int = 20 << 30  # of one archive, as it is stored
    max_unpacked_bytes: int = 40 << 30  # of one model's files
    max_files: int = 2000  # of one model
    max_ratio: float = 200.0  # of an archive's unpacked size to its own
    connect_timeout_s: float = 5.0  # to S3
    read_timeout_s: float = 30.0  # between two pieces
    allow_torchscript: bool = False  # TorchScript models can run any code: only for archives that you trust
    allow_pickle: bool = False  # so can pickled weights

    def __post_init__(self) -> None:
        if self.cache not in ("enabled", "disabled"):
            raise ConfigError(f"handler.many.cache must be enabled or disabled, not {self.cache!r}")
        _positive("many", self, "disk_bytes", "refresh_s", "hold_s", "load_timeout_s", "room_timeout_s", "num_loaders")
        _positive("many", self, "num_downloads", "max_waiting", "max_loading", "max_archive_bytes")
        _positive("many", self, "max_unpacked_bytes", "max_files", "max_ratio", "connect_timeout_s", "read_timeout_s")
        _not_negative("many", self, "device_bytes", "host_bytes", "broken_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """What the models of many.mar do with requests: classify, embed, answer, generate (docs/many-models.md)."""

    num_threads: int = 1  # batches of all models that are computed at once
    threads_per_batch: int = 1  # of torch, for one batch on a CPU
    prepare_threads: int = 2  # requests read and tokenized at once
    max_rows: int = 32  # inputs in one batch
    max_tokens: int = 16_384  # in one batch, padding included
    max_inputs: int = 256  # in one request
    max_chars: int = 500_000  # of one input, checked before it is tokenized
    max_waiting: int = 4096  # inputs that wait for one model
    max_shared: int = 64  # templates, tokenizers and image processors that are kept for other models
    kv_tokens: int = 8192  # positions in the KV cache of each model that generates text

    def __post_init__(self) -> None:
        _positive("tasks", self, *(f.name for f in dataclasses.fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    model: ModelSettings = field(default_factory=ModelSettings)
    session: SessionSettings = field(default_factory=SessionSettings)
    intake: IntakeSettings = field(default_factory=IntakeSettings)
    request: RequestSettings = field(default_factory=RequestSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    pump: PumpSettings = field(default_factory=PumpSettings)
    journal: JournalSettings = field(default_factory=JournalSettings)
    many: ManySettings = field(default_factory=ManySettings)
    tasks: TaskSettings = field(default_factory=TaskSettings)


def load_settings(config: Mapping[str, Any], environ: Mapping[str, str]) -> HandlerSettings:
    """Settings from a model-config's `handler:` group and the environment.

    Raises ConfigError on an unknown group or key, a value of the wrong type, or one out of range.
    """
    groups: dict[str, Any] = {}
    known = {f.name: f.default_factory for f in dataclasses.fields(HandlerSettings)}
    for name in config:
        if name not in known:
            raise ConfigError(f"handler.{name} is not a group of settings; there are {', '.join(known)}")
    variables = {
        f"{ENV_PREFIX}{name}_{f.name}".upper()
        for name, group in known.items()
        for f in dataclasses.fields(group)  # type: ignore[arg-type]
    }
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in variables:
            raise ConfigError(f"{name} is not a setting; handlers/settings.py has them all")
    for name, group in known.items():
        assert isinstance(group, type)
        given = config.get(name) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"handler.{name} must be a group of settings, not {given!r}")
        values = dict(given)
        types = {f.name: type(getattr(group(), f.name)) for f in dataclasses.fields(group)}
        for key in types:
            text = environ.get(f"{ENV_PREFIX}{name}_{key}".upper())
            if text is not None:
                values[key] = text
        for key, value in values.items():
            if key not in types:
                raise ConfigError(f"handler.{name}.{key} is not a setting; there are {', '.join(types)}")
            values[key] = _coerce(f"handler.{name}.{key}", value, types[key])
        groups[name] = group(**values)
    return HandlerSettings(**groups)


# The types of YAML and of the environment that a setting of a type may be given as.
_ACCEPTED: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int, str), float: (int, float, str), str: (str,)}


def _coerce(key: str, value: Any, kind: type) -> Any:
    """The value as the setting's type; text is parsed, since the environment has nothing else."""
    try:
        if kind is bool and isinstance(value, str):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if kind is tuple:
            items = value.split(",") if isinstance(value, str) else value
            return tuple(str(item).strip() for item in items if str(item).strip())
        if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind is not bool):
            raise ValueError
        parsed = kind(value)
        if kind is float and not math.isfinite(parsed):
            raise ValueError
        return parsed
    except (TypeError, ValueError, KeyError) as exc:
        raise ConfigError(f"{key} must be of type {kind.__name__}, not {value!r}") from exc


def _positive(group: str, settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) <= 0:
            raise ConfigError(f"handler.{group}.{name} must be positive, not {getattr(settings, name)}")


def _not_negative(group: str, settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < 0:
            raise ConfigError(f"handler.{group}.{name} must not be negative, not {getattr(settings, name)}")

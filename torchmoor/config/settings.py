"""The proxy's settings: frozen groups, each handed to the part that needs it.

Values are checked when a group is made. Files and environment are read by the command line only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from torchmoor.config.asynchronous import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.config.objects import NoticeSettings, ObjectSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.errors import ConfigError

ROUTING_STRATEGIES = ("LEAST_OUTSTANDING_REQUESTS", "RANDOM", "PREFIX_AWARE", "KV_AWARE")
ALL_TRAFFIC = "AllTraffic"
MIB = 1 << 20

_ENDPOINT_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_KEY_ID = re.compile(r"[a-z0-9]{2}")
_ACCESS_KEY_ID = re.compile(r"[A-Za-z0-9_]{3,128}", re.ASCII)
_SECRET = re.compile(r"[\x21-\x7e]+", re.ASCII)


def _require_positive(group: object, prefix: str) -> None:
    """Raise ConfigError unless every number of the group is above zero."""
    for item in fields(group):  # type: ignore[arg-type]
        value = getattr(group, item.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
            raise ConfigError(f"{prefix}.{item.name} must be positive, not {value}")


def _require_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ConfigError unless the number is within the range."""
    if not least <= value <= most:
        raise ConfigError(f"{name} must be from {least} to {most}, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where the two planes listen. Port 0 takes any free port."""

    host: str = "127.0.0.1"
    port: int = 8080
    admin_host: str = "127.0.0.1"  # another address than loopback needs an admin token
    admin_port: int = 9080
    tls_certificate: str = ""  # PEM file, with those that sign it; "": the data plane is plain HTTP
    tls_key: str = ""  # PEM file without a password
    admin_tls_certificate: str = ""  # the admin plane's own; "": it is plain HTTP
    admin_tls_key: str = ""
    processes: int = 1  # that share the data plane's port; one carries about 10,000 requests a second

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"listen.{name} must be from 0 to 65535, not {getattr(self, name)}")
        _require_range("listen.processes", self.processes, 1, 64)
        for prefix in ("", "admin_"):
            pair = f"{prefix}tls_certificate", f"{prefix}tls_key"
            if bool(getattr(self, pair[0])) != bool(getattr(self, pair[1])):
                raise ConfigError(f"listen.{pair[0]} and listen.{pair[1]} must be given together")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """What one client may cost. The body limit of the runtime API is the API's own (6 MiB)."""

    max_header_bytes: int = 16_384
    max_body_bytes: int = 6 * MIB
    max_passthrough_body_bytes: int = 64 * MIB
    max_foreign_sessions: int = 100_000  # whose ids the instances' own handlers have minted; the oldest is forgotten
    max_session_body_bytes: int = 16_384  # a body up to this size is searched for a session's id that no header has
    max_unrouted_body_bytes: int = 8 * MIB  # held until OpenAI's `model` is found, where there are several endpoints
    max_connections: int = 10_000
    max_replay_body_bytes: int = 2 * MIB  # a body up to this size is kept until its answer begins
    max_replay_total_bytes: int = 64 * MIB  # over all requests in flight; beyond it none is kept
    max_waiting_bytes: int = 64 * MIB  # of bodies that wait for an instance or for their `model`, over all endpoints
    max_error_body_bytes: int = 65_536  # of an instance's error answer, read to name the cause
    header_timeout_s: float = 10.0  # from a request's first byte to the end of its head
    body_timeout_s: float = 60.0  # from there to the end of its body
    keep_alive_timeout_s: float = 75.0

    def __post_init__(self) -> None:
        _require_positive(self, "limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutSettings:
    """How long an instance may take."""

    connect_timeout_s: float = 1.0
    model_timeout_s: float = 60.0  # to the answer's end; of a stream, to its first byte
    stream_idle_timeout_s: float = 60.0
    stream_total_timeout_s: float = 480.0
    sweep_interval_s: float = 0.25  # how late a deadline may be noticed
    cancel_timeout_s: float = 5.0  # of an operation that cancels requests at an instance
    pool_idle_timeout_s: float = 60.0  # an unused connection to an instance is closed after this
    stop_grace_s: float = 5.0  # for requests that run when the proxy is told to stop

    def __post_init__(self) -> None:
        _require_positive(self, "timeouts")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """How often instances are probed."""

    starting_interval_s: float = 0.25  # while an instance is not ready, or has not answered the last probe
    ready_interval_s: float = 1.0
    probe_timeout_s: float = 1.5
    worker_timeout_s: float = 2.0  # of the question that its handler's worker answers itself
    status_interval_s: float = 5.0  # between questions for what an instance holds and has room for
    busy_status_interval_s: float = 0.5  # the same while it loads one of many models
    max_status_per_s: float = 20.0  # over all instances: with many of them each is asked less often
    unanswered_before_down: int = 3  # a busy instance may be slow to answer, and moving its sessions costs

    def __post_init__(self) -> None:
        _require_positive(self, "health")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings:
    """When an instance whose answers fail gets no more work, how it comes back, and how much is sent again."""

    max_failures: int = 5  # in a row; then its breaker opens
    min_open_s: float = 2.0  # before one request is tried; doubled each time that it fails
    max_open_s: float = 60.0
    slow_start_s: float = 10.0  # from an instance's return until it gets its full share of work and sessions
    least_share: float = 0.1  # what it gets at first
    retry_fraction: float = 0.2  # of all requests may be sent again to another instance
    retry_burst: int = 100  # and so many at once beyond that: what an instance that dies may have been doing

    def __post_init__(self) -> None:
        _require_positive(self, "recovery")
        if self.max_open_s < self.min_open_s:
            raise ConfigError(f"recovery.max_open_s must be min_open_s or more, not {self.max_open_s}")
        for name in ("least_share", "retry_fraction"):
            if getattr(self, name) > 1:
                raise ConfigError(f"recovery.{name} must be 1 or less, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveSettings:
    """What is told of each request: beside its last routing decision nothing, unless it is asked for."""

    access_log: str = ""  # a file's path, which is appended to, or "stderr"; "": none
    access_log_buffer_bytes: int = 4 * MIB  # of lines to be written; beyond it they are dropped, and counted
    access_log_interval_s: float = 1.0  # the longest that a line waits to be written
    traces_url: str = ""  # where spans go, as OTLP over HTTP: http://127.0.0.1:4318/v1/traces; "": nowhere
    traces_fraction: float = 1.0  # of the requests whose traceparent does not say whether they are traced
    max_decisions: int = 6000  # routing decisions that are remembered for GET /decisions
    max_decisions_per_s: int = 20  # and how many of each second, with as many again of failures and retries

    def __post_init__(self) -> None:
        _require_positive(self, "observe")
        if self.traces_fraction > 1:
            raise ConfigError(f"observe.traces_fraction must be 1 or less, not {self.traces_fraction}")
        if self.traces_url and not self.traces_url.startswith(("http://", "https://")):
            raise ConfigError(f"observe.traces_url must begin with http:// or https://, not be {self.traces_url!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAwareSettings:
    """PREFIX_AWARE, with SageMaker's ranges: bytes of a body that are its prefix, and when an instance is full."""

    prefix_length: int = 4096
    concurrency_threshold: int = 16

    def __post_init__(self) -> None:
        _require_range("prefix_aware.prefix_length", self.prefix_length, 1024, 65_536)
        _require_range("prefix_aware.concurrency_threshold", self.concurrency_threshold, 1, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvAwareSettings:
    """KV_AWARE: how prompts are compared, and what a match is worth."""

    max_prompt_bytes: int = 65_536  # of a body that are looked at
    block_bytes: int = 512
    bytes_per_request: int = 8_192  # a match of so many bytes outweighs one more outstanding request
    max_blocks_per_instance: int = 8_192  # believed to be held; 4 MiB of prompts, about a million tokens

    def __post_init__(self) -> None:
        _require_positive(self, "kv_aware")
        _require_range("kv_aware.max_prompt_bytes", self.max_prompt_bytes, self.block_bytes, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateBindingSettings:
    """Requests beyond the instances' capacity wait at the proxy for whichever frees first."""

    max_waiting: int = 1024  # of each variant
    max_wait_s: float = 30.0  # then 503; the wait is part of the time that the client gives the model

    def __post_init__(self) -> None:
        _require_positive(self, "late_binding")


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModelSettings:
    """An endpoint whose requests name one of many models; how long they are held is the instances' setting."""

    is_cached: bool = True  # AWS's ModelCacheSetting: models stay in memory after their requests
    hot_outstanding: int = 16  # requests for a model at each of its holders; with more, another instance loads it too
    max_models: int = 20_000  # remembered of each instance

    def __post_init__(self) -> None:
        _require_positive(self, "multi_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """What SageMaker asks of its containers: the operations on models, for the first endpoint; metrics."""

    serves_models: bool = False  # /models: AWS's SAGEMAKER_MULTI_MODEL
    shows_metrics: bool = False  # /metrics, the admin plane's page, on the data plane's port
    load_timeout_s: float = 360.0  # of a load, and of an unload
    page_size: int = 100  # models in one page of their list
    max_models: int = 10_000  # loaded at a time

    def __post_init__(self) -> None:
        _require_positive(self, "container")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSettings:
    """One variant of an endpoint: the model that its instances serve, its share of traffic, how they are chosen."""

    model: str
    name: str = ALL_TRAFFIC
    weight: float = 1.0
    routing_strategy: str = ROUTING_STRATEGIES[0]
    prefix_aware: PrefixAwareSettings = field(default_factory=PrefixAwareSettings)
    kv_aware: KvAwareSettings = field(default_factory=KvAwareSettings)
    scaling: ScalingSettings | None = None  # None: its instances are not ours to start and stop while requests run

    def __post_init__(self) -> None:
        if len(self.name) > 63 or not _ENDPOINT_NAME.fullmatch(self.name):
            raise ConfigError(f"variant.name {self.name!r} is not a valid variant name")
        if not self.model:
            raise ConfigError(f"variant.model of {self.name!r} must not be empty")
        if not 0 <= self.weight < float("inf"):
            raise ConfigError(f"variant.weight of {self.name!r} must be 0 or more, not {self.weight}")
        if self.routing_strategy not in ROUTING_STRATEGIES:
            known = ", ".join(ROUTING_STRATEGIES)
            raise ConfigError(f"variant.routing_strategy must be one of {known}, not {self.routing_strategy!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """One endpoint: the name in the URL, and the variants among which its traffic is split."""

    name: str
    variants: tuple[VariantSettings, ...]
    late_binding: LateBindingSettings | None = None  # None: a request that no instance can take is refused at once
    multi_model: MultiModelSettings | None = None  # None: its instances serve one model
    async_inference: AsyncEndpointSettings | None = None  # None: InvokeEndpointAsync is refused

    def __post_init__(self) -> None:
        if len(self.name) > 63 or not _ENDPOINT_NAME.fullmatch(self.name):
            raise ConfigError(f"endpoint.name {self.name!r} is not a valid endpoint name")
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"endpoint.variants of {self.name!r} must be one or more of different names, not {names}")
        if not any(variant.weight for variant in self.variants):
            raise ConfigError(f"endpoint.variants of {self.name!r} must have a weight above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Keys that session ids are signed with, by key id. Handlers sign with the first, all of them verify.

    Without a key no session id can be verified, and every one is refused.
    """

    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    are_journaled: bool = False  # the instances share a journal, so any of them can take over a session

    def __post_init__(self) -> None:
        for key_id, key in self.keys.items():
            if not _KEY_ID.fullmatch(key_id):
                raise ConfigError(f"session.keys: key id {key_id!r} must be two characters of a-z, 0-9")
            if len(key) < 16:
                raise ConfigError(f"session.keys: key {key_id!r} must have at least 16 bytes")

    @classmethod
    def parse(cls, text: str, *, are_journaled: bool = False) -> SessionSettings:
        """Read `kid:hexkey[,kid:hexkey...]`, the form of TORCHMOOR_SESSION_KEYS. Raises ConfigError."""
        keys: dict[str, bytes] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key_id, _, digits = item.partition(":")
            try:
                keys[key_id] = bytes.fromhex(digits)
            except ValueError as error:
                raise ConfigError(f"session.keys: key {key_id!r} is not hexadecimal") from error
        return cls(keys=keys, are_journaled=are_journaled)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """How credentials are judged where there are any."""

    keys_file: str = ""  # read by the command line; see torchmoor.proxy.access.credentials
    region: str = ""  # that signatures must name; "": any
    clock_skew_s: float = 300.0  # between a client's clock and ours; a signed request can be replayed as long
    allows_unsigned_payload: bool = False  # bodies that no signature covers
    max_signed_body_bytes: int = 6 * MIB  # a signed body is held until its signature is verified
    max_unverified_bytes: int = 256 * MIB  # held so, over all requests, by their declared lengths

    def __post_init__(self) -> None:
        _require_positive(self, "access")
        if self.max_unverified_bytes < self.max_signed_body_bytes:
            raise ConfigError("access.max_unverified_bytes must be at least access.max_signed_body_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessKey:
    """What belongs to an access key id. session_token: what requests must carry too; "": they must carry none."""

    secret: str = field(repr=False)
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who may come in: access keys by their ids, bearer tokens by the names of their owners, the admin plane's token.

    Without keys and tokens the data plane asks nobody for credentials; without an admin token, neither does the other.
    """

    keys: Mapping[str, AccessKey] = field(default_factory=dict, repr=False)
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    admin_token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for key_id, key in self.keys.items():
            if not _ACCESS_KEY_ID.fullmatch(key_id):
                raise ConfigError("access keys: an id must be 3 to 128 letters, digits or underscores")
            _require_secret(key.secret, f"access keys: the secret of {key_id}")
        for name, token in self.tokens.items():
            if not _ACCESS_KEY_ID.fullmatch(name):
                raise ConfigError("tokens: a name must be 3 to 128 letters, digits or underscores")
            _require_secret(token, f"tokens: that of {name}")
        if len(set(self.tokens.values())) != len(self.tokens):
            raise ConfigError("tokens: two names have the same token")
        if self.admin_token:
            _require_secret(self.admin_token, "the admin token")

    @property
    def guards_data(self) -> bool:
        """True if the data plane asks for credentials."""
        return bool(self.keys or self.tokens)


def _require_secret(secret: str, whose: str) -> None:
    """Raise ConfigError, without the secret, unless it can be sent in a header and is too long to be guessed."""
    if len(secret) < 16 or not _SECRET.fullmatch(secret):
        raise ConfigError(f"{whose} must have at least 16 visible ASCII characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPageSettings:
    """The page at /chat on the data plane, for people with a browser."""

    is_on: bool = True  # false: its paths are unknown operations
    max_pictures: int = 8  # that it takes in a session; what counts is the handler's session.max_images

    def __post_init__(self) -> None:
        _require_positive(self, "chat_page")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncQueueSettings:
    """How much the queue of asynchronous requests holds, for how long, and how long it may take."""

    max_pending: int = 100_000  # requests of one endpoint that have not ended; beyond it they are refused with 503
    max_pending_bytes: int = 1024 * MIB  # of one endpoint's pending inline bodies
    remember_s: float = 86_400.0  # how long an ended request is listed and its inference id taken
    max_remembered: int = 100_000  # ended requests, over all endpoints; the oldest are forgotten sooner
    timeout_s: float = 10.0  # of one operation: SQLite's wait for another process, Redis's answer
    connect_timeout_s: float = 2.0
    max_connections: int = 16  # of one process to Redis

    def __post_init__(self) -> None:
        _require_positive(self, "async_queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Everything the proxy is told."""

    endpoints: tuple[EndpointSettings, ...]
    listen: ListenSettings = field(default_factory=ListenSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    credentials: Credentials = field(default_factory=Credentials)
    container: ContainerSettings = field(default_factory=ContainerSettings)
    async_inference: AsyncInferenceSettings = field(default_factory=AsyncInferenceSettings)
    async_queue: AsyncQueueSettings = field(default_factory=AsyncQueueSettings)
    objects: ObjectSettings = field(default_factory=ObjectSettings)
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)
    chat_page: ChatPageSettings = field(default_factory=ChatPageSettings)
    account_id: str = "000000000000"  # named in "Endpoint ... of account ... not found."

    def __post_init__(self) -> None:
        names = [endpoint.name for endpoint in self.endpoints]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"endpoints must be one or more of different names, not {names}")
        for endpoint in self.endpoints:
            if endpoint.async_inference is not None:
                self._check_async(endpoint, endpoint.async_inference)
        if self.container.serves_models and self.endpoints[0].multi_model is None:
            raise ConfigError(f"container.serves_models needs a multi-model endpoint, and {names[0]!r} has one model")

    def _check_async(self, endpoint: EndpointSettings, config: AsyncEndpointSettings) -> None:
        if endpoint.multi_model is not None:
            raise ConfigError(f"AsyncInferenceConfig of {endpoint.name!r}: an endpoint with many models cannot have it")
        if not self.async_inference.queue:
            raise ConfigError(f"async_inference.queue is missing: endpoint {endpoint.name!r} has AsyncInferenceConfig")
        if not (config.output_path or self.async_inference.output_root):
            raise ConfigError(
                f"endpoint {endpoint.name!r} has no OutputConfig.S3OutputPath: give it, or async_inference.output_root"
            )

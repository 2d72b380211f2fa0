"""All settings of the proxy, and the checks that involve several groups."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from torchmoor.config.access import AccessSettings
from torchmoor.config.async_inference import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.config.callers import CallerSettings
from torchmoor.config.chat_page import ChatPageSettings
from torchmoor.config.container import ContainerSettings
from torchmoor.config.control import ControlSettings
from torchmoor.config.credentials import Credentials
from torchmoor.config.discovery import DiscoverySettings
from torchmoor.config.error_texts import groups_of
from torchmoor.config.group import SettingsGroup, refusal
from torchmoor.config.health import HealthSettings
from torchmoor.config.instances import InstanceSettings
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.limits import LimitSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.notices import NotificationSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.routing import EndpointSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.config.websocket import WebSocketSettings


class ProxySettings(SettingsGroup):
    """All settings of the proxy."""

    endpoints: tuple[EndpointSettings, ...]
    listen: ListenSettings = ListenSettings()
    limits: LimitSettings = LimitSettings()
    callers: CallerSettings = CallerSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    websocket: WebSocketSettings = WebSocketSettings()
    health: HealthSettings = HealthSettings()
    recovery: RecoverySettings = RecoverySettings()
    sessions: SessionIdSettings = SessionIdSettings()
    access: AccessSettings = AccessSettings()
    credentials: Credentials = Credentials()
    container: ContainerSettings = ContainerSettings()
    control: ControlSettings = ControlSettings()
    async_inference: AsyncInferenceSettings = AsyncInferenceSettings()
    async_queue: AsyncQueueSettings = AsyncQueueSettings()
    objects: ObjectSettings = ObjectSettings()
    notices: NotificationSettings = NotificationSettings()
    observe: ObserveSettings = ObserveSettings()
    chat_page: ChatPageSettings = ChatPageSettings()
    account_id: str = Field("000000000000", description='Named in "Endpoint ... of account ... not found.".')

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        names = [endpoint.name for endpoint in self.endpoints]
        if not (names or self.control.is_on) or len(set(names)) != len(names):
            raise refusal("endpoints", f"must be one or more of different names, not {names}")
        if self.control.is_on and self.listen.processes > 1:
            raise refusal("control.is_on", f"needs listen.processes 1, not {self.listen.processes}")
        for endpoint in self.endpoints:
            if endpoint.async_inference is not None:
                self._check_async(endpoint, endpoint.async_inference)
        if self.container.serves_models and not self.endpoints[0].has_many:
            raise refusal("container.serves_models", f"needs a multi-model endpoint, and {names[0]!r} has one model")
        return self

    @property
    def limits_callers(self) -> bool:
        """True if `callers` applies."""
        limited = self.callers.limited
        return limited == "always" or (limited == "with-keys" and self.credentials.guards_data)

    def _check_async(self, endpoint: EndpointSettings, config: AsyncEndpointSettings) -> None:
        if endpoint.has_many:
            raise refusal("AsyncInferenceConfig", f"of {endpoint.name!r}: an endpoint with many models cannot have it")
        if not self.async_inference.queue:
            raise refusal("async_inference.queue", f"is missing: endpoint {endpoint.name!r} has AsyncInferenceConfig")
        if not (config.output_path or self.async_inference.output_root):
            raise refusal(
                "OutputConfig.S3OutputPath", f"of {endpoint.name!r} is missing: give it, or async_inference.output_root"
            )


class Configuration(SettingsGroup):
    """All settings of `torchmoor serve`: the proxy, its instances, their discovery, and its launcher."""

    proxy: ProxySettings
    instances: tuple[InstanceSettings, ...] = ()
    discovery: tuple[DiscoverySettings, ...] = ()
    launch: LaunchSettings = LaunchSettings()


# The groups that the configuration file, command-line options and environment variables set key by key.
GROUPS: dict[str, type[SettingsGroup]] = {
    name: group
    for name, field in ProxySettings.model_fields.items()
    if name not in ("endpoints", "sessions", "credentials")
    for group in groups_of(field.annotation, SettingsGroup)
}

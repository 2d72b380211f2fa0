"""Which endpoints there are and which instances serve each.

Owned by one event loop: every call is synchronous and made on that loop's thread. Knows no sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torchmoor.errors import UnknownEndpoint, UnknownInstance
from torchmoor.fleet.instance import Instance, InstanceState
from torchmoor.settings import EndpointSettings

logger = logging.getLogger(__name__)


class Endpoint:
    """An endpoint's settings and its instances, in the order in which they were added."""

    __slots__ = ("settings", "name", "instances")

    def __init__(self, settings: EndpointSettings) -> None:
        self.settings = settings
        self.name = settings.name
        self.instances: list[Instance] = []

    def has_ready_instance(self) -> bool:
        """True if at least one instance may be sent new work."""
        return any(instance.is_ready for instance in self.instances)

    def __repr__(self) -> str:
        return f"<Endpoint {self.name} {self.instances!r}>"


class Registry:
    """All endpoints and instances. Endpoints are fixed at the start, instances come and go."""

    def __init__(self, endpoints: Iterable[EndpointSettings]) -> None:
        self._endpoints = {settings.name: Endpoint(settings) for settings in endpoints}
        self._instances: dict[str, Instance] = {}

    # Endpoints

    def endpoints(self) -> Sequence[Endpoint]:
        """Every endpoint, in configured order."""
        return list(self._endpoints.values())

    def find_endpoint(self, name: str) -> Endpoint | None:
        """The endpoint of that name, or None."""
        return self._endpoints.get(name)

    def get_endpoint(self, name: str) -> Endpoint:
        """The endpoint of that name. Raises UnknownEndpoint."""
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            raise UnknownEndpoint(name)
        return endpoint

    def find_endpoint_by_model(self, model: str) -> Endpoint | None:
        """The first endpoint whose instances serve that model, or None."""
        for endpoint in self._endpoints.values():
            if endpoint.settings.model == model:
                return endpoint
        return None

    # Instances

    def instances(self, endpoint: str | None = None) -> Sequence[Instance]:
        """The instances of one endpoint, or of all. Raises UnknownEndpoint."""
        if endpoint is None:
            return list(self._instances.values())
        return list(self.get_endpoint(endpoint).instances)

    def find(self, name: str) -> Instance | None:
        """The instance of that name, or None."""
        return self._instances.get(name)

    def add(self, instance: Instance) -> None:
        """Make an instance known. One of the same name is replaced. Raises UnknownEndpoint."""
        endpoint = self.get_endpoint(instance.endpoint)
        if instance.name in self._instances:
            self.remove(instance.name)
        self._instances[instance.name] = instance
        endpoint.instances.append(instance)
        logger.info("instance added instance=%s endpoint=%s", instance.name, instance.endpoint)

    def remove(self, name: str) -> None:
        """Forget an instance; what runs there ends by itself. Raises UnknownInstance."""
        instance = self._instances.pop(name, None)
        if instance is None:
            raise UnknownInstance(name)
        self._endpoints[instance.endpoint].instances.remove(instance)
        instance.close_idle()
        logger.info("instance removed instance=%s endpoint=%s", name, instance.endpoint)

    def set_state(self, name: str, state: InstanceState) -> None:
        """What a probe, the launcher or an operator learnt. Raises UnknownInstance."""
        instance = self._instances.get(name)
        if instance is None:
            raise UnknownInstance(name)
        if instance.state is state:
            return
        logger.info("instance state instance=%s from=%s to=%s", name, instance.state.value, state.value)
        instance.state = state
        if state is InstanceState.DOWN:
            instance.close_idle()

"""`torchmoor up`: TorchServe instances and the front proxy on this host, from the first line to the last."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmoor.async_inference.request import Backlog
from torchmoor.config.asynchronous import AsyncEndpointSettings
from torchmoor.config.dialects import ChatPageSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.routing import EndpointSettings, LateBindingSettings, VariantSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.config.sessions import SessionSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.fleet.launcher import Launch, Launcher, LauncherSettings
from torchmoor.fleet.supervisor import ASYNC_FOLDER, JOURNAL_FOLDER
from torchmoor.fleet.torchserve import DEFAULT_BODY_MIB, DEFAULT_HEAP_MIB, TorchServeSettings
from torchmoor.proxy.access.credentials import read_credentials
from torchmoor.proxy.access.exposure import check_exposure
from torchmoor.proxy.api.chat_page.page import PAGE
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.async_folder import AsyncFolder
from torchmoor.run.host_fleet import HostFleet
from torchmoor.run.many import MANY, plan_many, read_container

logger = logging.getLogger(__name__)

SESSION_KEYS = "TORCHMOOR_SESSION_KEYS"
JOURNAL_URL = "TORCHMOOR_HANDLER_JOURNAL_URL"
ALLOWED_HOSTS = "TORCHMOOR_HANDLER_INTAKE_ALLOWED_HOSTS"
DEVICE_FRACTION = "TORCHMOOR_HANDLER_SESSION_DEVICE_FRACTION"
USABLE_FRACTION = 0.85  # of a GPU, for all instances on it together; what the handlers take when they are alone


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the command line says."""

    endpoints: tuple[str, ...]  # each is served by instances of the archive of its name
    num_instances: int  # of each endpoint
    listen: ListenSettings
    keys_file: Path | None
    model_store: Path
    run_dir: Path | None
    journal: str | None  # None: one for this fleet's lifetime
    strategy: str
    capacity: int  # requests that an instance is sent at a time
    is_late_binding: bool
    allowed_image_hosts: tuple[str, ...]
    start_timeout_s: float
    is_open: bool
    scaling: ScalingSettings | None = None  # None: num_instances of them, as long as the fleet runs
    heap_mib: int = DEFAULT_HEAP_MIB  # of an instance's JVM
    max_body_mib: int = DEFAULT_BODY_MIB  # of one request or answer; large ones need a larger heap, too
    async_inputs: tuple[Path, ...] = ()  # directories that InputLocation may name, beside the fleet's own
    models: str = ""  # where the models of the endpoint `many` are: a directory, or s3://bucket/prefix
    observe: ObserveSettings = field(default_factory=ObserveSettings)
    chat_page: ChatPageSettings = field(default_factory=ChatPageSettings)


async def run(options: UpOptions, report: Callable[[str], None], announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one stops at once.

    report: progress, line by line; announce: the one line of JSON when everything is ready.
    Raises ConfigError, LaunchError, OSError if a port is taken.
    """
    credentials = read_credentials(os.environ, options.keys_file)
    check_exposure(options.listen, credentials, is_open=options.is_open)
    keys = os.environ.get(SESSION_KEYS) or f"k0:{secrets.token_hex(32)}"
    run_dir = options.run_dir or Path(tempfile.mkdtemp(prefix="torchmoor-"))
    kept = AsyncFolder(run_dir / ASYNC_FOLDER, report, more_inputs=options.async_inputs)
    many = plan_many(options.endpoints, options.models, os.environ)
    settings = ProxySettings(
        endpoints=tuple(
            EndpointSettings(
                name=name,
                variants=(VariantSettings(model=name, routing_strategy=options.strategy, scaling=options.scaling),),
                late_binding=LateBindingSettings() if options.is_late_binding else None,
                multi_model=many.settings if name == MANY else None,
                async_inference=None if name == MANY else AsyncEndpointSettings(),
            )
            for name in options.endpoints
        ),
        async_inference=kept.inference,
        objects=kept.objects,
        container=read_container(os.environ),
        listen=options.listen,
        credentials=credentials,
        observe=options.observe,
        chat_page=options.chat_page,
        sessions=SessionSettings.parse(keys, are_journaled=options.journal != "off"),
    )
    registry = Registry(settings.endpoints)
    java_home = os.environ.get("TORCHMOOR_JAVA_HOME")
    launcher_settings = LauncherSettings(
        torchserve=TorchServeSettings(
            model_store=options.model_store,
            java_home=Path(java_home) if java_home else None,
            heap_mib=options.heap_mib,
            max_body_bytes=options.max_body_mib << 20,
        ),
        run_dir=run_dir,
        start_timeout_s=options.start_timeout_s,
        capacity=options.capacity,
    )
    journal = options.journal or (run_dir / JOURNAL_FOLDER).as_uri()
    most = options.num_instances if options.scaling is None else options.scaling.max_capacity
    launches = plan(options.endpoints, most, find_gpus(os.environ))
    environment = {SESSION_KEYS: keys, JOURNAL_URL: journal, **many.environment, **share_gpus(launches, os.environ)}
    if options.allowed_image_hosts:
        environment[ALLOWED_HOSTS] = ",".join(options.allowed_image_hosts)
    async with (
        kept,
        Launcher(launcher_settings, registry, environment, report) as launcher,
        Proxy(settings, registry) as proxy,  # stops first: what runs is answered before its instance goes
        HostFleet(
            settings, registry, launcher, proxy.data, launches, report, find_pending=find_pending(proxy)
        ) as fleet,
    ):
        stopping = stop_on_signals(launcher)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, proxy.on_hangup)
        starting = asyncio.create_task(fleet.start())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            starting.cancel()
        else:
            starting.result()
            if settings.chat_page.is_on:
                report(f"to chat in a browser: {proxy.runtime_url}{PAGE.decode()}")
            announce(describe(options, runtime_url=proxy.runtime_url, admin_url=proxy.admin_url))
            await stopping
        report("stopping")


def find_pending(proxy: Proxy) -> Callable[[str], Awaitable[Backlog]] | None:
    """How many asynchronous requests of an endpoint wait and run, for the autoscaler."""
    service = proxy.data.async_inference
    return None if service is None else lambda endpoint: service.queue.backlog(endpoint)


def describe(options: UpOptions, *, runtime_url: str, admin_url: str) -> str:
    """The line of JSON that says where everything is."""
    return json.dumps(
        {
            "ready": True,
            "runtime": runtime_url,
            "admin": admin_url,
            "endpoints": list(options.endpoints),
        }
    )


def plan(endpoints: Sequence[str], num_instances: int, gpus: Sequence[str]) -> list[Launch]:
    """Every endpoint's instances by name, spread over the GPUs where there are any."""
    wanted = [(endpoint, i) for endpoint in endpoints for i in range(num_instances)]
    return [
        Launch(f"{endpoint}-{i}", endpoint, f"{endpoint}.mar", gpus[number % len(gpus)] if gpus else None)
        for number, (endpoint, i) in enumerate(wanted)
    ]


def share_gpus(launches: Sequence[Launch], environ: Mapping[str, str]) -> dict[str, str]:
    """What tells instances that share a GPU how much of it is theirs; nothing if the operator has said so."""
    most = max(Counter(launch.gpu for launch in launches if launch.gpu is not None).values(), default=1)
    if most == 1 or DEVICE_FRACTION in environ:
        return {}
    return {DEVICE_FRACTION: f"{USABLE_FRACTION / most:.3f}"}


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs to use: those of CUDA_VISIBLE_DEVICES if it is set, else those that NVIDIA's own tool lists."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        logger.warning("nvidia-smi does not answer; going on without a GPU")
        return []
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def stop_on_signals(launcher: Launcher) -> asyncio.Future[None]:
    """A future that ends with the first SIGINT or SIGTERM; the second kills the instances."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if stopping.done():
            launcher.kill()
        else:
            stopping.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stopping

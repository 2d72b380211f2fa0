"""Runs the arms of proxy.py: each proxy is a process on its own core, in front of the same backends."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

import psutil

from benchmarks.fleet import peak_rss_bytes, rss_bytes
from benchmarks.report import ROOT
from torchmoor.fleet.ports import find_free_ports

PEERS = "TORCHMOOR_BENCH_PEERS"  # a folder of programs (envoy, sglang-router, vllm-router), searched before the PATH
PYTHON = "TORCHMOOR_BENCH_PYTHON"  # the Python of the arm other-python
_CORES = sorted(os.sched_getaffinity(0))  # in a container, these need not begin with core 0
PROXY_CORE, LOAD_CORE = _CORES[0], _CORES[1 % len(_CORES)]
SESSION_HEADER = "X-Amzn-SageMaker-Session-Id"
START_TIMEOUT_S = 30.0

NGINX_COMMON = """daemon off; error_log stderr error; pid {folder}/nginx.pid;
worker_processes 1; worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
  access_log off; default_type application/json; keepalive_requests 1000000000; keepalive_timeout 600;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  client_body_buffer_size 16k; client_max_body_size 0; tcp_nodelay on;
"""
NGINX_BACKEND = (
    NGINX_COMMON
    + """  server {{ {listens}
    location / {{ return 200 '{{"ok":true}}'; }} }}
}}
"""
)
NGINX_PROXY = (
    NGINX_COMMON
    + """  upstream up {{ least_conn; {servers} keepalive 512; keepalive_requests 1000000000; keepalive_timeout 600; }}
  server {{ listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering {buffering};
      proxy_request_buffering {request_buffering}; proxy_read_timeout 480;
    }} }}
}}
"""
)
HAPROXY = """global
  nbthread 1
  maxconn 4096
  tune.bufsize 16384
defaults
  mode http
  timeout connect 1s
  timeout client 480s
  timeout server 480s
  timeout http-request 10s
  http-reuse always
frontend in
  bind 127.0.0.1:{port}
  default_backend up
backend up
  balance leastconn
  stick-table type string len 128 size 100k expire 30m
  stick on req.hdr({header})
{servers}
"""


class Arm(ABC):
    """One kind of proxy. path: of the benchmark's requests."""

    name: str
    path = "/endpoints/llava/invocations"

    @abstractmethod
    def command(self, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
        """Return the command that runs the proxy in the foreground."""

    def is_installed(self) -> bool:
        """Return whether this machine can run the proxy."""
        return True


class PythonArm(Arm):
    """A proxy of benchmarks/proxy_server.py. kind: its name there."""

    kind: str
    python = sys.executable

    def command(self, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
        return [self.python, "-m", "benchmarks.proxy_server", self.kind, str(port), _joined(upstreams)]


class Torchmoor(PythonArm):
    """The product."""

    name = kind = "torchmoor"


class OtherPython(Torchmoor):
    """The product, run by another Python."""

    name = "other-python"
    python = os.environ.get(PYTHON, "")

    def is_installed(self) -> bool:
        return bool(self.python)


class CompiledWheel(Torchmoor):
    """The product from the compiled wheel in dist/ (make wheel COMPILED=1), with the sources of the benchmark."""

    name = "compiled"

    def is_installed(self) -> bool:
        return bool(self.python) and find_compiled_wheel() is not None

    def command(self, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
        wheel = find_compiled_wheel()
        assert wheel is not None
        with ZipFile(wheel) as bundle:
            bundle.extractall(folder)
        _, *arguments = super().command(port, upstreams, folder)
        return ["env", f"PYTHONPATH={folder}:{ROOT}", self.python, "-P", *arguments]


class OtherPythonCompiled(CompiledWheel):
    """The compiled wheel, run by another Python of the same version."""

    name = "other-python-compiled"
    python = OtherPython.python


def find_compiled_wheel(folder: Path = ROOT / "dist") -> Path | None:
    """Return the wheel of this source for this version of Python; None without one.

    Another version of Python would run the modules in the wheel as they are, not compiled.
    """
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    source = {str(path.relative_to(ROOT)): path.read_bytes() for path in (ROOT / "torchmoor").rglob("*.py")}
    wheels = sorted(folder.glob(f"torchmoor-*-{tag}-*.whl"))
    return next((wheel for wheel in wheels if _read_modules(wheel) == source), None)


def _read_modules(wheel: Path) -> dict[str, bytes]:
    """Return the source of each module of the product in a wheel, by its path."""
    with ZipFile(wheel) as bundle:
        paths = [path for path in bundle.namelist() if path.startswith("torchmoor/") and path.endswith(".py")]
        return {path: bundle.read(path) for path in paths if not path.startswith("torchmoor/bundle/")}


class GeneralPath(PythonArm):
    """The product without its fast path."""

    name = kind = "general-path"


class Aiohttp(PythonArm):
    """aiohttp on both sides."""

    name = kind = "aiohttp"


class Nginx(Arm):
    """nginx with least_conn, from Debian's package."""

    name = "nginx"

    def __init__(self, *, buffering: str = "on", request_buffering: str = "on") -> None:
        self._buffering = buffering
        self._request_buffering = request_buffering

    def command(self, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
        servers = " ".join(f"server 127.0.0.1:{upstream};" for upstream in upstreams)
        config = NGINX_PROXY.format(
            folder=folder,
            port=port,
            servers=servers,
            buffering=self._buffering,
            request_buffering=self._request_buffering,
        )
        return nginx_command(folder, config)


class HAProxy(Arm):
    """HAProxy with a stick-table on the session header."""

    name = "haproxy"

    def is_installed(self) -> bool:
        return find("haproxy") is not None

    def command(self, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
        servers = "\n".join(f"  server s{upstream} 127.0.0.1:{upstream}" for upstream in upstreams)
        config = folder / "haproxy.cfg"
        config.write_text(HAPROXY.format(port=port, header=SESSION_HEADER, servers=servers))
        return [str(find("haproxy")), "-db", "-q", "-f", str(config)]


class Envoy(Arm):
    """Envoy with LEAST_REQUEST."""

    name = "envoy"

    def is_installed(self) -> bool:
        return find("envoy") is not None

    def command(self, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
        config = folder / "envoy.json"
        config.write_text(json.dumps(_envoy_config(port, upstreams)))
        return [
            *(str(find("envoy")), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"),
            *("--log-level", "error"),
        ]


class Router(Arm):
    """sglang-router or vllm-router, which have the same options and accept chat completions only."""

    path = "/v1/chat/completions"

    def __init__(self, name: str) -> None:
        self.name = name

    def is_installed(self) -> bool:
        return find(self.name) is not None

    def command(self, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
        program = Path(str(find(self.name)))
        module = self.name.replace("-", "_")
        return [
            *(str(program.with_name("python")), "-m", f"{module}.launch_router"),
            *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"),
            *("--prometheus-port", str(find_free_ports(1)[0])),
            *("--worker-urls", *(f"http://127.0.0.1:{upstream}" for upstream in upstreams)),
        ]


def find(program: str) -> Path | None:
    """Return the path of a program, or None if it is not installed."""
    path = os.pathsep.join(filter(None, (os.environ.get(PEERS), os.environ.get("PATH"), "/usr/sbin")))
    found = shutil.which(program, path=path)
    return None if found is None else Path(found)


def require(*programs: str) -> None:
    """Install missing programs if this is root on Debian; exit if any is missing. Package and program names agree."""
    missing = [program for program in programs if find(program) is None]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-qq", "-y", *missing], check=False, stdout=sys.stderr, timeout=300)
        missing = [program for program in programs if find(program) is None]
    if missing:
        raise SystemExit(f"proxy: install {' and '.join(missing)} first: apt-get install {' '.join(missing)}")


def nginx_command(folder: Path, config: str) -> list[str]:
    """Write nginx's configuration; return the command that runs it."""
    path = folder / "nginx.conf"
    path.write_text(config)
    return [str(find("nginx")), "-p", str(folder), "-c", str(path)]


class Process:
    """A running proxy or backend."""

    def __init__(self, popen: "subprocess.Popen[bytes]", port: int) -> None:
        self.port = port
        self._popen = popen

    def pids(self) -> list[int]:
        """Return the ids of the process and its descendants."""
        own = psutil.Process(self._popen.pid)
        return [process.pid for process in (own, *own.children(recursive=True))]

    def cpu_s(self) -> float:
        """Return the processor time so far, user and system, from the kernel's CPU clock of each process."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.pids())

    def rss_bytes(self) -> int:
        """Return the resident memory."""
        return sum(map(rss_bytes, self.pids()))

    def peak_rss_bytes(self) -> int:
        """Return the largest resident memory since `forget_peak`."""
        return sum(map(peak_rss_bytes, self.pids()))

    def forget_peak(self) -> None:
        """Measure the largest memory from now on."""
        for pid in self.pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")


@contextmanager
def running(command: Sequence[str], port: int, core: int) -> Iterator[Process]:
    """Run a process pinned to a core; yield it once it listens."""
    popen = subprocess.Popen(["taskset", "-c", str(core), *command], stdout=subprocess.DEVNULL)
    try:
        _wait_listening(popen, port, command[0])
        yield Process(popen, port)
    finally:
        popen.terminate()
        try:
            popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


def _wait_listening(popen: "subprocess.Popen[bytes]", port: int, name: str) -> None:
    ends_at = time.monotonic() + START_TIMEOUT_S
    while True:
        if popen.poll() is not None:
            raise SystemExit(f"proxy: {name} ended with status {popen.returncode} instead of listening")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > ends_at:
                raise SystemExit(f"proxy: {name} did not listen in {START_TIMEOUT_S:.0f} s") from None
            time.sleep(0.05)


def _joined(ports: Sequence[int]) -> str:
    return ",".join(map(str, ports))


def _envoy_config(port: int, upstreams: Sequence[int]) -> dict[str, object]:
    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "up", "timeout": "480s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    cluster = {
        "name": "up",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": "up",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(number)}} for number in upstreams]}],
        },
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"name": "in", "address": address(port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}

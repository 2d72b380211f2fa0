"""CPU time of a fleet's processes, and the explanation of a benchmark's failure."""

import socket
import subprocess
import sys
from pathlib import Path

from benchmarks.fleet import Fleet
from tests.proxy.conftest import Stage, read_answer
from tests.proxy.fake_instance import refusing
from tests.proxy.test_faults import invoke
from torchmoor.config.launcher import INSTANCE_LOG

USED_S = 0.5
BUSY = f"""
import sys, time
while time.process_time() < {USED_S}: pass
print("done", flush=True)
sys.stdin.read()
"""
WAITING = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def test_time_of_what_a_worker_has_started_is_the_workers(tmp_path: Path) -> None:
    """CPU time of a worker's child processes, such as its template process, is the worker's, not the proxy's."""
    java = tmp_path / "java"  # processes are known by this name
    java.symlink_to("/bin/sh")
    template_process = [sys.executable, "-c", BUSY]
    worker = [sys.executable, "-c", WAITING, *template_process]
    jvm = [str(java), "-c", '"$@"; true', "sh", *worker]
    proxy = [sys.executable, "-c", WAITING, *jvm]

    with subprocess.Popen(proxy, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "done\n"
        times = Fleet(process, "", "").cpu_times()

    assert times.proxy_s < USED_S / 2 < times.worker_s
    assert len(times.threads_s) == 1, "the worker's own thread"


def test_failure_is_explained_by_decisions_and_logs(tmp_path: Path) -> None:
    """The explanation has the decisions, which state how requests failed, and the end of each instance's log."""
    log = tmp_path / "llava-0" / INSTANCE_LOG
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {each}\n" for each in range(100)))
    with subprocess.Popen(["true"], text=True) as process, Stage() as stage:
        stage.a.behave = stage.b.behave = refusing(500, "InternalError", "the model's own fault")
        read_answer(invoke(stage))

        lines = list(Fleet(process, "", stage.proxy.admin_url, str(tmp_path)).explain())

    assert lines[0].startswith("instance name a, state ready, outstanding 0, breaker closed")
    (decision,) = [line for line in lines if line.startswith("request ")]
    assert ", status 424, " in decision
    assert lines[-2:] == ["line 98", "line 99"]
    assert "line 50" not in lines


def test_failure_is_explained_without_an_admin_plane(tmp_path: Path) -> None:
    """After the fleet has ended, the explanation has its logs."""
    with subprocess.Popen(["true"], text=True) as process, socket.create_server(("127.0.0.1", 0)) as server:
        admin = f"http://127.0.0.1:{server.getsockname()[1]}"
        server.close()

        (line,) = Fleet(process, "", admin, str(tmp_path)).explain()

    assert line.startswith("the admin plane does not answer")

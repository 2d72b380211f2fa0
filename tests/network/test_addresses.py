"""A zone without SRV records, over IPv6, with a proxy of several processes whose configuration changes."""

import signal

import pytest

from tests.network.conftest import Load, Proxy, Stage
from tests.network.hosts import stop
from tests.network.zone import PORT

pytestmark = [pytest.mark.network, pytest.mark.slow]

PODS = "pods.zone.test"


def test_instances_known_by_addresses_join_a_static_one_and_leave_with_their_entry(stage: Stage) -> None:
    """Instances found by address join a static one with names that session ids carry, and leave at a reload."""
    static = {"name": "llava-0", "host": stage.addresses["llava-0"], "port": PORT}
    entry = {"dns_name": PODS, "record": "AAAA", "port": PORT, "interval_s": 0.5, "min_interval_s": 0.2}
    stage.zone.name_addresses(PODS, ["fd77::11", "fd77::12"])
    proxy = Proxy(stage.network, "proxy", stage.folder, "--processes", "2", Discovery=[entry], Instances=[static])
    load = None
    try:
        proxy.wait_for("llava-0", "llava-1", "llava-2")
        proxy.look("decisions")  # each process answers once it has the states of the instances
        load = Load(stage.network, "clients", f"http://10.77.0.2:{proxy.port}", stage.folder)
        load.wait_served("llava-0", "llava-1", "llava-2")
        rows = {row["name"]: (row["source"], row["host"]) for row in proxy.look()["instances"]}

        proxy.write(Discovery=None, Instances=[static])
        proxy.process.send_signal(signal.SIGHUP)
        proxy.wait_for("llava-0")
        load.wait_served("llava-0")

        load.check()
        assert rows == {
            "llava-0": ("static", stage.addresses["llava-0"]),
            "llava-1": (PODS, "fd77::11"),
            "llava-2": (PODS, "fd77::12"),
        }
        assert proxy.look()["discovery"] == []
    finally:
        if load is not None:
            stop(load.process)
        stop(proxy.process)

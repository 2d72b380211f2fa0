"""An instance's history: what is kept, for how long, and unknown values."""

import pytest

from torchmoor.admin.dashboard.history import INTERVAL_S, NUM_SAMPLES, RANGES
from torchmoor.admin.dashboard.instance_history import FIELDS, InstanceHistory, find_gpu
from torchmoor.metrics.host import GpuUse
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.routing.reported_status import ReportedStatus

GPU = GpuUse("1", "GPU-a", 30.0, 25, 100)


def make_instance() -> Instance:
    return Instance(name="llava-0", endpoint="llava", model="llava", port=1, gpu="1", state=InstanceState.READY)


def test_load_sessions_state_and_gpu_are_kept() -> None:
    """Values that an instance does not report are unknown, not zero."""
    instance, history = make_instance(), InstanceHistory()
    history.take(0.0, instance, None)
    instance.outstanding = 3
    instance.take_status(ReportedStatus(open_sessions=7, session_room=1))
    instance.state = InstanceState.DOWN
    history.take(2.0, instance, find_gpu(instance, {"1": GPU}))

    assert history.describe("5m") == {
        "seconds_ago": [2.0, 0.0],
        "in_flight": [0.0, 3.0],
        "sessions": [None, 7.0],
        "down": [0.0, 1.0],
        "gpu_percent": [None, 30.0],
        "gpu_memory_percent": [None, 25.0],
    }


@pytest.mark.parametrize("name", RANGES)
def test_each_range_is_bounded_and_keeps_peaks(name: str) -> None:
    """Each range keeps peaks between its samples and drops what is older."""
    instance, history = make_instance(), InstanceHistory()
    history.take(0.0, instance, None)
    instance.outstanding = 9
    history.take(INTERVAL_S, instance, None)
    instance.outstanding = 0
    num_ticks = round(NUM_SAMPLES * RANGES[name] / INTERVAL_S)
    for number in range(2, num_ticks - 3 * round(RANGES[name] / INTERVAL_S)):
        history.take(number * INTERVAL_S, instance, None)
    assert max(value or 0 for value in history.describe(name)["in_flight"]) == 9
    for later in range(number, num_ticks + 3 * round(RANGES[name] / INTERVAL_S)):
        history.take(later * INTERVAL_S, instance, None)

    series = history.describe(name)
    assert {len(series[field]) for field in FIELDS} == {NUM_SAMPLES} == {len(series["seconds_ago"])}
    assert set(series["in_flight"]) == {0.0}


def test_gpu_is_found_by_number_or_uuid() -> None:
    """A GPU is found by the number or UUID in CUDA_VISIBLE_DEVICES."""
    instance = make_instance()
    assert find_gpu(instance, {"1": GPU}) is GPU
    instance.gpu = "GPU-a"
    assert find_gpu(instance, {"GPU-a": GPU}) is GPU
    instance.gpu = None
    assert find_gpu(instance, {"1": GPU}) is None


def test_several_gpus_of_an_instance_are_one() -> None:
    """Several GPUs of an instance give their mean load and total memory, or unknown if one of them is."""
    instance = make_instance()
    instance.gpu = "0,GPU-b"
    first, second = GpuUse("0", "GPU-a", 10.0, 1, 4), GpuUse("1", "GPU-b", 30.0, 2, 8)

    found = find_gpu(instance, {"0": first, "GPU-a": first, "1": second, "GPU-b": second})

    assert found == GpuUse("0, 1", "GPU-a, GPU-b", 20.0, 3, 12)
    assert find_gpu(instance, {"0": first}) is None

"""The proxy's metrics of a real GPU, through NVIDIA's own library."""

import pytest
import torch

from torchmoor.metrics.host import HostCollector

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def test_use_of_gpus_is_measured() -> None:
    """The memory in use includes what this process holds."""
    pytest.importorskip("pynvml")
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")

    found = {family.name: family.samples[0].value for family in HostCollector().collect()}

    share = 100 * held.nbytes / torch.cuda.get_device_properties(0).total_memory
    most = 100 * torch.cuda.device_count()
    assert 0 <= found["GPUUtilization"] <= most
    assert share < found["GPUMemoryUtilization"] <= most

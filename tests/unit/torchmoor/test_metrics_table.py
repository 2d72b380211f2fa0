"""The table of metrics and the counts that it names."""

from dataclasses import fields

from torchmoor.admin.collectors import METRICS
from torchmoor.metrics.definition import HISTOGRAM
from torchmoor.metrics.histogram import Histogram
from torchmoor.metrics.invocations import InvocationMetrics


def test_every_count_has_one_metric_of_its_type() -> None:
    """Each field of InvocationMetrics has one metric of its type, also a field with labels."""
    counts = InvocationMetrics("llava", "AllTraffic")
    rows = {each.field: each.type for each in METRICS if each.field}
    expected = {each.name for each in fields(InvocationMetrics)} - {"endpoint", "variant"}

    assert rows.keys() == expected
    assert all(isinstance(getattr(counts, name), Histogram) == (kind is HISTOGRAM) for name, kind in rows.items())
    assert len({each.name for each in METRICS}) == len(METRICS)

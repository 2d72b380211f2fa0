"""The admin plane's metrics page, read by Prometheus' own parser."""

import pytest
import requests
from botocore.exceptions import ClientError
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.proxy.conftest import MakeStage, Stage
from tests.proxy.fake_instance import answering, refusing, streaming
from torchmoor.config.container import ContainerSettings

# CONTRACT section 7, of endpoints with one model and without GPUs.
NAMES = {
    "Invocations",
    "InvocationsPerInstance",
    "Invocation4XXErrors",
    "Invocation5XXErrors",
    "InvocationModelErrors",
    "ModelLatency",
    "OverheadLatency",
    "ConcurrentRequestsPerModel",
    "FirstChunkLatency",
    "FirstChunkModelLatency",
    "FirstChunkOverheadLatency",
    "MidStreamErrors",
    "NoCapacityInvocationFailures",
    "CPUUtilization",
    "MemoryUtilization",
}


def scrape(stage: Stage) -> dict[str, list[Sample]]:
    """Return the page's samples by metric."""
    page = stage.admin("/metrics").text
    return {family.name: family.samples for family in text_string_to_metric_families(page)}


def value(found: dict[str, list[Sample]], metric: str, sample: str, **labels: str) -> float:
    [number] = [s.value for s in found[metric] if s.name == sample and labels.items() <= s.labels.items()]
    return number


def test_page_has_every_metric_of_the_service(stage: Stage) -> None:
    """Every metric has CloudWatch's name in Prometheus' form, even before the first request."""
    found = scrape(stage)

    assert found.keys() >= NAMES
    assert found["process_cpu_seconds"]
    assert 0 < value(found, "MemoryUtilization", "MemoryUtilization") < 100
    assert value(found, "CPUUtilization", "CPUUtilization") >= 0


def test_the_data_plane_shows_the_page_where_it_is_told_to(make_stage: MakeStage, stage: Stage) -> None:
    """The data plane shows the page only if configured, as SageMaker's scraper requires.

    It is the operators' otherwise.
    """
    container = make_stage(container=ContainerSettings(shows_metrics=True))

    answer = requests.get(f"{container.proxy.runtime_url}/metrics", timeout=60)

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert {family.name for family in text_string_to_metric_families(answer.text)} >= NAMES
    assert requests.post(f"{container.proxy.runtime_url}/metrics", timeout=60).status_code == 404
    assert requests.get(f"{stage.proxy.runtime_url}/metrics", timeout=60).status_code == 404


def test_first_chunk_is_split_into_the_models_time_and_ours(stage: Stage) -> None:
    """The model's part and the proxy's part of the time to the first chunk add up."""
    stage.a.behave = stage.b.behave = streaming([b"one ", b"two"])
    answer = stage.client().invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")
    assert list(answer["Body"])

    found = scrape(stage)

    names = ("FirstChunkLatency", "FirstChunkModelLatency", "FirstChunkOverheadLatency")
    total, model, overhead = (value(found, name, f"{name}_sum") for name in names)
    assert [value(found, name, f"{name}_count") for name in names] == [1, 1, 1]
    assert total == pytest.approx(model + overhead)
    assert 0 < model <= total


def test_first_chunk_of_every_api_is_timed(stage: Stage) -> None:
    """Streams of OpenAI's APIs and of paths that are passed on count, whole answers do not."""
    behave = streaming([b"data: 1\n\n", b"data: [DONE]\n\n"], "text/event-stream")
    stage.a.behave = stage.b.behave = behave
    body = {"model": "llava", "messages": [], "stream": True}
    for path in ("/v1/chat/completions", "/predictions/llava", "/endpoints/llava/invocations"):
        assert requests.post(f"{stage.proxy.runtime_url}{path}", json=body, timeout=60).status_code == 200
    stage.a.behave = stage.b.behave = answering()
    for path in ("/v1/chat/completions", "/predictions/llava"):
        assert requests.post(f"{stage.proxy.runtime_url}{path}", json=body, timeout=60).status_code == 200

    # InvokeEndpoint is not a streaming operation, whatever the instance sends.
    assert value(scrape(stage), "FirstChunkLatency", "FirstChunkLatency_count") == 2


def test_invocations_are_shared_among_instances(stage: Stage) -> None:
    """With two instances, each invocation counts as half per instance."""
    for _ in range(3):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    assert value(scrape(stage), "InvocationsPerInstance", "InvocationsPerInstance_total") == 1.5
    assert value(scrape(stage), "InvocationsPerInstance", "InvocationsPerInstance_total") == 1.5


def test_instance_has_its_capacity(stage: Stage) -> None:
    """The page has the capacity of each instance, by which a query divides its outstanding requests."""
    found = scrape(stage)

    for instance in stage.registry.instances():
        labels = {"endpoint": "llava", "instance": instance.name}
        assert value(found, "InstanceCapacity", "InstanceCapacity", **labels) == instance.capacity > 0


def test_reply_about_a_deleted_endpoint_is_not_counted(stage: Stage) -> None:
    """A late reply about a deleted endpoint, such as one of the asynchronous queue, is not counted."""

    async def answer_late() -> None:
        endpoint = stage.registry.get_endpoint("llava")
        for instance in list(endpoint.instances):
            stage.registry.remove(instance.name)
        stage.registry.retire(endpoint)
        stage.registry.forget(endpoint)
        stage.proxy.data.dispatchers.count_without_invocation(endpoint, 202)

    stage.run(answer_late())

    assert not stage.proxy.data.dispatchers.all()


def test_reasons_of_choices_are_counted(stage: Stage) -> None:
    """Each choice is counted by its reason; a retry is a choice of its own."""
    stage.a.behave = stage.b.behave = refusing(503, None, "queue full")
    with pytest.raises(ClientError):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    found = scrape(stage)

    for reason in ("least-outstanding-requests", "retry"):
        assert value(found, "RoutingDecisions", "RoutingDecisions_total", reason=reason) == 1

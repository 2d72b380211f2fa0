"""Spans of a running proxy, as received by a collector."""

import asyncio
import gzip
import re
import sys
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.http_servers import QuietHandler, run_http
from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import answering, refusing, streaming
from tests.proxy.processes import Holding, serving, write_config
from tests.proxy.test_fast_path import CountingPath
from tests.waiting import wait_until
from torchmoor.config.observe import ObserveSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.observe.observing import observing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"


class Collector:
    """An OTLP receiver for spans in protobuf over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        outer = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                outer.take(self.path, self.headers["Content-Type"], body)
                self.reply(200)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def take(self, path: str, content_type: str, body: bytes) -> None:
        assert (path, content_type) == ("/v1/traces", "application/x-protobuf")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def get(self, count: int = 1) -> list[Span]:
        wait_until(lambda: len(self.spans) >= count, f"{count} spans")
        assert len(self.spans) == count
        return self.spans


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds from a span's end to its sending
    collector = Collector()
    with run_http(collector.server):
        yield collector


@pytest.fixture
def stage(make_stage: MakeStage, collector: Collector) -> Stage:
    return make_stage(observe=ObserveSettings(traces_url=collector.url))


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def post(stage: Stage, headers: dict[str, str]) -> str:
    """Send a request; return the traceparent that its instance received."""
    return head_at_instance(stage, headers)["traceparent"]


def head_at_instance(stage: Stage, headers: dict[str, str]) -> Mapping[str, str]:
    assert stage.ask("POST", "/endpoints/llava/invocations", b"{}", headers).read() == b"{}"
    received = [request for fake in stage.instances.values() for request in fake.received]
    return max(received, key=lambda r: r.headers["x-torchmoor-request-id"]).headers


def test_invocation_is_a_span_of_its_callers_trace(stage: Stage, collector: Collector) -> None:
    """The caller's span is the parent of the proxy's, which is the parent of the worker's."""
    given = post(stage, {"traceparent": PARENT, "tracestate": "other=1", "X-Amzn-SageMaker-Inference-Id": "order-7"})

    [span] = collector.get()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert given == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
    received = [r for fake in stage.instances.values() for r in fake.received]
    assert received[0].headers["tracestate"] == "other=1"
    found = attributes(span)
    assert (span.name, span.kind) == ("POST /endpoints/{EndpointName}/invocations", Span.SPAN_KIND_SERVER)
    assert found["http.response.status_code"] == 200
    assert (found["gen_ai.request.model"], found["torchmoor.inference_id"]) == ("llava", "order-7")
    assert found["torchmoor.instance"] in ("a", "b")
    assert found["torchmoor.routing_reason"] == "least-outstanding-requests"
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert collector.services == {"torchmoor"}


def test_traced_requests_take_the_general_path(stage: Stage, collector: Collector) -> None:
    """Every request gives a span, so traced requests take the general path."""
    taken = CountingPath(stage)
    for _ in range(4):
        stage.client().invoke_endpoint(EndpointName="llava", SessionId=make_session_id("a"), Body=b"{}")

    collector.get(4)
    assert taken.num_taken == 0


def test_request_without_a_trace_begins_one(stage: Stage, collector: Collector) -> None:
    """A request without a valid traceparent, or with several, begins a trace."""
    first = post(stage, {})
    second = post(stage, {"traceparent": "nonsense"})

    spans = collector.get(2)
    assert [given[3:35] for given in (first, second)] == [span.trace_id.hex() for span in spans]
    assert spans[0].trace_id != spans[1].trace_id
    assert [span.parent_span_id for span in spans] == [b"", b""]


@pytest.mark.parametrize("parents", [{}, {"traceparent": "nonsense"}])
def test_a_new_trace_has_no_tracestate(stage: Stage, collector: Collector, parents: dict[str, str]) -> None:
    """Without a valid traceparent, the tracestate belongs to no trace (W3C Trace Context 3.3)."""
    head = head_at_instance(stage, {**parents, "tracestate": "other=1"})

    assert collector.get()
    assert "tracestate" not in head


def test_tracestate_that_is_none_is_not_logged(
    stage: Stage, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid tracestate is not logged, since clients could fill the log with it."""
    post(stage, {"traceparent": PARENT, "tracestate": "secret words"})

    assert collector.get()
    assert "secret" not in caplog.text


def test_callers_decision_not_to_trace_counts(stage: Stage, collector: Collector) -> None:
    """A caller's decision not to trace is passed to the worker."""
    assert post(stage, {"traceparent": UNSAMPLED}).endswith("-00")
    post(stage, {"traceparent": PARENT})

    assert len(collector.get()) == 1


def test_stream_and_error_are_told(stage: Stage, collector: Collector) -> None:
    """A stream's span has the time of its first byte, and a failure's span its kind."""
    stage.a.behave = stage.b.behave = streaming([b"one ", b"two"])
    answer = stage.client().invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")
    assert list(answer["Body"])
    stage.a.behave = stage.b.behave = refusing(503, None, "queue full")
    with pytest.raises(ClientError):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    stream, failure = collector.get(2)
    [event] = stream.events
    assert event.name == "torchmoor.first_byte"
    assert stream.start_time_unix_nano <= event.time_unix_nano <= stream.end_time_unix_nano
    assert attributes(stream)["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes(failure)["error.type"] == "ServiceUnavailable"
    assert attributes(failure)["http.request.resend_count"] == 1
    assert failure.status.code == Status.STATUS_CODE_ERROR


def test_receipts_are_told(stage: Stage, collector: Collector) -> None:
    """A span has the prompt's length from the handler's receipt."""
    stage.a.behave = stage.b.behave = answering(headers={"X-Torchmoor-Context-Tokens": "612"})
    post(stage, {})

    assert attributes(collector.get()[0])["gen_ai.usage.input_tokens"] == 612


def test_collector_that_is_gone_fails_no_request(make_stage: MakeStage, collector: Collector) -> None:
    """Without a collector traces are lost and requests are served."""
    collector.server.server_close()
    stage = make_stage(observe=ObserveSettings(traces_url=collector.url))

    assert post(stage, {"traceparent": PARENT}).startswith(PARENT[:36])


def test_without_tracing_a_trace_passes_by(make_stage: MakeStage) -> None:
    """Without tracing the worker gets the caller's own traceparent."""
    assert post(make_stage(), {"traceparent": PARENT}) == PARENT


def test_without_opentelemetry_the_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry, an extra, the setting's error says what to install."""
    monkeypatch.setitem(sys.modules, "torchmoor.proxy.observe.tracing", None)

    with pytest.raises(ConfigError, match=re.escape("pip install 'torchmoor[otel]'")):
        asyncio.run(enter(ObserveSettings(traces_url="http://127.0.0.1:4318/v1/traces")))


async def enter(settings: ObserveSettings) -> None:
    async with observing(settings):
        pass


@pytest.mark.slow
def test_every_proxy_process_sends_its_spans(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process exports its spans, also those that it holds at its end, and no two spans share an id."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with Holding(("a",)) as instances:
        observe = {"traces_url": collector.url}
        config = write_config(tmp_path / "torchmoor.yaml", {"chat": (instances.fakes["a"],)}, observe=observe)
        with serving(config, 2) as served:
            num_sent, processes = 0, set()
            while len(processes) < 2 and num_sent < 100:  # the kernel chooses the process of a connection
                served.ask()
                num_sent += 1
                request = instances.fakes["a"].received[-1]
                processes.add(request.headers["x-torchmoor-request-id"].rpartition("-")[0])

    spans = collector.get(num_sent)
    assert len(processes) == 2
    assert len({span.span_id for span in spans}) == len({span.trace_id for span in spans}) == num_sent
    assert {str(attributes(span)["torchmoor.request_id"]).rpartition("-")[0] for span in spans} == processes

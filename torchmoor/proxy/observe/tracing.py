"""Traces: a span for each invocation, sent to a collector as OTLP over HTTP. Needs the extra `otel`.

Follows W3C Trace Context: a request's traceparent is the span's parent, and the instance gets the span as its parent.
Names are those of OpenTelemetry's conventions for HTTP servers and generative models; other names begin with
`torchmoor.`. The exporter reads OpenTelemetry's own environment variables for everything that is not a setting here:
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*.
"""

from __future__ import annotations

import logging
import time
from time import monotonic

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from torchmoor.config.observe import ObserveSettings
from torchmoor.proxy.api.openai_dialects import COMPLETIONS, TASKS
from torchmoor.proxy.api.runtime import RuntimeDialect, StreamDialect
from torchmoor.proxy.dispatch.observer import TRACEPARENT, TRACESTATE
from torchmoor.proxy.dispatch.record import RequestRecord
from torchmoor.proxy.http.message import Request

EXPORT_TIMEOUT_S = 5.0
_OF_A_CHILD = frozenset((TRACEPARENT,))
_OF_A_ROOT = frozenset((TRACEPARENT, TRACESTATE))
ENDPOINT = "/endpoints/{EndpointName}"
ROUTES = {
    RuntimeDialect.operation_name: f"{ENDPOINT}/invocations",
    StreamDialect.operation_name: f"{ENDPOINT}/invocations-response-stream",
    **{each.operation_name: f"{ENDPOINT}/openai/v1/{path.decode()}" for path, each in (COMPLETIONS | TASKS).items()},
}

# Otherwise every malformed tracestate would be logged as a warning with the client's text.
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)


class SpanTrace:
    """A Trace (see torchmoor.proxy.dispatch.observer) that is an open span."""

    __slots__ = ("replaced", "span")

    def __init__(self, span: Span, *, is_child: bool) -> None:
        """is_child: the client's traceparent is the span's parent, so the client's tracestate is valid, too."""
        self.span = span
        self.replaced = _OF_A_CHILD if is_child else _OF_A_ROOT

    @property
    def line(self) -> bytes:
        """This span as the traceparent. In the client's trace, the tracestate of other systems passes unchanged."""
        own = self.span.get_span_context()
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (own.trace_id, own.span_id, own.trace_flags)

    def end(self, record: RequestRecord) -> None:
        span = self.span
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
        record.is_sampled = span.is_recording()
        if not span.is_recording():
            return
        ended_ns = int(record.ended_at * 1e9)
        route = ROUTES.get(record.operation or "") or record.path
        span.update_name(f"{record.method} {route}")
        span.set_attributes(attributes_of(record, route))
        if record.first_byte_s is not None:
            first = ended_ns - int((record.total_s - record.first_byte_s) * 1e9)
            span.add_event("torchmoor.first_byte", timestamp=first)
        if record.status is None or record.status >= 500 or record.outcome == "broken":
            span.set_status(Status(StatusCode.ERROR, record.error_type or record.outcome))
        span.end(ended_ns)


class Tracing:
    """Owns the exporter and its thread; everything but `stop` is for the event loop's thread."""

    def __init__(self, settings: ObserveSettings) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "torchmoor"}))
        self._provider = TracerProvider(
            resource=resource, sampler=ParentBased(TraceIdRatioBased(settings.traces_fraction)), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=settings.traces_url, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("torchmoor")
        self._propagator = TraceContextTextMapPropagator()

    def stop(self) -> None:
        """Send the remaining spans; waits for the collector, at most as long as the exporter's time-outs allow."""
        self._provider.shutdown()

    def begin(self, request: Request) -> SpanTrace:
        """Open a span that begins when the request's head was complete."""
        parents = [field.value for field in request.headers if field.name == TRACEPARENT]
        states = [field.value for field in request.headers if field.name == TRACESTATE]
        context = None
        if len(parents) == 1:
            carrier = {"traceparent": parents[0].decode("latin-1"), "tracestate": b",".join(states).decode("latin-1")}
            context = self._propagator.extract(carrier)
        began = time.time_ns() - int((monotonic() - request.received_at) * 1e9)
        name = request.method.decode("latin-1")
        span = self._tracer.start_span(name, context, kind=SpanKind.SERVER, start_time=began)
        return SpanTrace(span, is_child=bool(context))


def attributes_of(record: RequestRecord, route: str) -> dict[str, AttributeValue]:
    """Return a span's attributes without those that are None."""
    found: dict[str, AttributeValue | None] = {
        "http.request.method": record.method,
        "http.route": route,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "http.request.body.size": record.num_bytes_in,
        "http.response.size": record.num_bytes_out,
        "http.request.resend_count": record.num_retries or None,
        "error.type": record.error_type or (str(record.status) if (record.status or 0) >= 500 else None),
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "torchmoor",
        "gen_ai.request.model": record.target_model or record.model,
        "gen_ai.conversation.id": record.session,
        "gen_ai.response.time_to_first_chunk": record.first_byte_s,
        "gen_ai.usage.input_tokens": record.receipt.get("context_tokens"),
        "torchmoor.inference_id": record.inference_id,
        "torchmoor.request_id": record.request_id,
        "torchmoor.endpoint": record.endpoint,
        "torchmoor.variant": record.variant,
        "torchmoor.operation": record.operation,
        "torchmoor.instance": record.instance,
        "torchmoor.routing_reason": record.routing_reason,
        "torchmoor.outcome": record.outcome,
        "torchmoor.status_refused": record.status_refused,
        "torchmoor.upstream_s": record.upstream_s,
        "torchmoor.waited_s": record.waited_s,
        "torchmoor.principal": record.principal,
    }
    return {name: value for name, value in found.items() if value is not None}

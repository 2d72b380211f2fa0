"""Settings of the access log, traces and routing decisions."""

from __future__ import annotations

from pydantic import Field, field_validator

from torchmoor.config.group import MIB, Fraction, SettingsGroup, SharedCount

TRACE_ID = "{trace_id}"  # in trace_link


class ObserveSettings(SettingsGroup, title="observe"):
    """The access log, traces, and the routing decisions that are kept."""

    access_log: str = Field("", description="File that gets one line of JSON for each request, or `stderr`.")
    access_log_buffer_bytes: SharedCount = Field(
        4 * MIB, description="Bytes of lines that may wait to be written; above it lines are dropped and counted."
    )
    traces_url: str = Field(
        "", description="Address to which spans are sent, as OTLP over HTTP: http://127.0.0.1:4318/v1/traces."
    )
    traces_fraction: Fraction = Field(1.0, description="Fraction of requests without a traceparent that are traced.")
    trace_link: str = Field(
        "",
        description="Address of a trace, for links on the dashboard: http://127.0.0.1:16686/trace/{trace_id}.",
    )
    max_decisions: SharedCount = Field(6000, description="Routing decisions that are kept for GET /decisions.")
    max_decisions_per_s: SharedCount = Field(
        20, description="Decisions kept per second. Failures and retries have the same limit of their own."
    )

    @field_validator("traces_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https://, not be {url!r}")
        return url

    @field_validator("trace_link")
    @classmethod
    def _check_link(cls, url: str) -> str:
        if url and not (url.startswith(("http://", "https://")) and TRACE_ID in url):
            raise ValueError(f"must begin with http:// or https:// and have {TRACE_ID}, not be {url!r}")
        return url

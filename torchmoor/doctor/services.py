"""Checks of the journal, and of the queue and the objects of asynchronous requests."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from torchmoor.config.objects import ObjectSettings
from torchmoor.doctor.clock import check_clock
from torchmoor.doctor.finding import Finding, FleetPlan, ok, problem, warning
from torchmoor.doctor.machine import check_writable
from torchmoor.wire.connection_errors import CERTIFICATE_REFUSED, failure_reason
from torchmoor.wire.store_urls import (
    DIRECTORY_SCHEME,
    JOURNAL_SCHEMES,
    QUEUE_SCHEMES,
    REDIS_SCHEMES,
    RESULT_SCHEMES,
    SQLITE_SCHEME,
    read_redis_address,
)

if TYPE_CHECKING:  # the import takes a while
    from redis import Redis

TIMEOUT_S = 5.0
RESULTS = "results"  # that are written, but never listed
CERTIFICATE_REMEDY = "renew the server's certificate, correct the host, or name its authority's certificate in {}"


def check_journal(plan: FleetPlan) -> Iterator[Finding]:
    """Check the sessions' journal."""
    if plan.journal == "off":
        remedy = "set --journal to a directory, redis:// or s3:// URL, unless this is intended"
        yield warning("journal", "off: a session ends with its instance", remedy)
    elif plan.journal:
        yield from check_store("journal", plan.journal, JOURNAL_SCHEMES)


def check_asynchronous(plan: FleetPlan) -> Iterator[Finding]:
    """Check the queue and the results of a configuration file."""
    if plan.configuration is None:
        return
    proxy = plan.configuration.proxy
    used = [each.async_inference for each in proxy.endpoints if each.async_inference is not None]
    if not used:
        return
    yield from check_store("queue", proxy.async_inference.queue, QUEUE_SCHEMES)
    paths = [
        path for each in used for path in (each.output_path or proxy.async_inference.output_root, each.failure_path)
    ]
    for path in dict.fromkeys(filter(None, paths)):
        yield from check_store(RESULTS, path, RESULT_SCHEMES, proxy.objects)


def check_store(
    check: str, url: str, schemes: Collection[str], objects: ObjectSettings | None = None
) -> Iterator[Finding]:
    """Check a store by its URL's scheme.

    schemes: those that this store may have. objects: settings of S3. Findings never show a user name or password.
    """
    try:
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        _ = parts.port
    except ValueError:
        remedy = "percent-encode special characters in the user name and password"
        yield problem(check, "its URL cannot be read", remedy)
        return
    if parts.scheme not in schemes:
        yield problem(check, f"{shown} cannot be used", f"give a URL that begins with {', '.join(schemes)}")
        return
    path = Path(unquote(parts.path))
    if parts.scheme == DIRECTORY_SCHEME:
        yield check_writable(check, path, shown)
    elif parts.scheme == SQLITE_SCHEME:
        yield check_writable(check, path.parent, shown)
    elif parts.scheme in REDIS_SCHEMES:
        yield _check_redis(check, shown, parts)
    else:
        yield from _check_s3(check, shown, parts, objects or ObjectSettings())


def _check_redis(check: str, shown: str, parts: SplitResult) -> Finding:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    address = read_redis_address(parts)
    if address is None:
        return problem(check, f"{shown} needs a host and a database's number", "correct it: redis://host:port/0")
    options = address.options(connect_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
    try:
        with closing(redis.Redis(ssl=address.tls, retry=Retry(NoBackoff(), 0), **options)) as client:
            began = time.monotonic()
            client.ping()
            took_ms = 1000 * (time.monotonic() - began)
            policy = _find_eviction_policy(client)
    except redis.AuthenticationError:
        return problem(check, f"{shown} refuses the user name and password", "correct them in the URL")
    except (redis.RedisError, ValueError, OSError) as error:
        if reason := _refused_certificate(error):
            return problem(check, f"{shown}: {reason}", CERTIFICATE_REMEDY.format("SSL_CERT_FILE"))
        found = f"{shown} does not answer: {str(error).rstrip('.')}"
        return problem(check, found, "start it, or correct the URL's host and port")
    if policy not in (None, "noeviction"):
        found = f"{shown} may delete live data when its memory is full: its maxmemory-policy is {policy}"
        return warning(check, found, "set maxmemory-policy noeviction in the server's configuration")
    return ok(check, f"{shown} answers in {took_ms:.1f} ms")


def _find_eviction_policy(client: Redis) -> str | None:
    """Return the server's maxmemory-policy; None if it does not say. INFO is allowed more often than CONFIG GET."""
    from redis import ResponseError

    try:
        return client.info("memory").get("maxmemory_policy")
    except ResponseError:  # this user may not ask
        return None


def _check_s3(check: str, shown: str, parts: SplitResult, objects: ObjectSettings) -> Iterator[Finding]:
    """List one object below the prefix: HeadBucket needs a right on the whole bucket, which our roles do not have."""
    from botocore.exceptions import BotoCoreError, ClientError

    from torchmoor.async_inference.objects.s3_client import make_client

    settings = objects.replace(connect_timeout_s=TIMEOUT_S, read_timeout_s=TIMEOUT_S, max_attempts=1)
    try:
        with closing(make_client(settings)) as client:
            prefix = "/".join([*filter(None, unquote(parts.path).split("/")), ""])
            answer = client.list_objects_v2(Bucket=parts.netloc, Prefix=prefix, MaxKeys=1)["ResponseMetadata"]
        yield ok(check, f"{shown} can be used")
    except ClientError as error:
        answer = error.response["ResponseMetadata"]
        yield _explain_refusal(check, shown, error.response["Error"]["Code"], answer["HTTPStatusCode"])
    except (BotoCoreError, ValueError) as error:
        if reason := _refused_certificate(error):
            yield problem(check, f"{shown}: {reason}", CERTIFICATE_REMEDY.format("AWS_CA_BUNDLE"))
        else:
            remedy = "set AWS_ENDPOINT_URL_S3, AWS_DEFAULT_REGION and credentials for boto3"
            yield problem(check, f"{shown} cannot be reached: {error}", remedy)
        return
    yield from check_clock(answer["HTTPHeaders"].get("date"), shown)


def _explain_refusal(check: str, shown: str, code: str, status: int) -> Finding:
    if code == "AccessDenied" and check == RESULTS:
        found = f"{shown}: these credentials may not list it, so it is not known whether they may write there"
        return warning(check, found, "allow s3:PutObject and s3:AbortMultipartUpload there")
    reasons = {403: f"these credentials may not list it ({code})", 404: "there is no such bucket"}
    remedy = "look at the bucket's name and policy, and at AWS_ACCESS_KEY_ID"
    return problem(check, f"{shown}: {reasons.get(status, f'status {status}')}", remedy)


def _refused_certificate(error: Exception) -> str:
    """Return why TLS refused the server's certificate; empty for other errors."""
    reason = failure_reason(error)
    return reason if reason.startswith(CERTIFICATE_REFUSED) else ""

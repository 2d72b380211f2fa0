"""A whole load test, from the first question to the results."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Any

import aiohttp
from botocore.httpsession import ProxyConfiguration

from torchmoor.bench.client import MAX_REASON, ConversationPlan, LoadClient, reason_of
from torchmoor.bench.load import Load, LoadOutcome, LoadSettings
from torchmoor.bench.summary import summarize
from torchmoor.clients.errors import CredentialsRefused, EndpointError, EndpointUnreachable
from torchmoor.clients.runtime import TRUST_HINT, proxies_for, readable_errors
from torchmoor.clients.signing import Login, Signer
from torchmoor.tasks import cancel_all
from torchmoor.wire.connection_errors import failure_reason

CONNECT_TIMEOUT_S = 10.0
INTERVAL_S = 1.0
ENDING = (signal.SIGINT, signal.SIGTERM)  # after both, sessions are closed


async def run(
    plan: ConversationPlan, settings: LoadSettings, login: Login, timeout_s: float, report: Callable[[str], None]
) -> dict[str, Any]:
    """Run a load and return its results. report: called every second with the progress.

    SIGINT or SIGTERM ends the load early, a second SIGINT at once.

    Raises EndpointUnreachable, CredentialsRefused or EndpointError if the endpoint does not answer at all.
    """
    with readable_errors():
        signer = Signer(login)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=timeout_s)
    connector = aiohttp.TCPConnector(limit=0, ssl=_trusted())
    proxy = ProxyConfiguration(proxies_for(plan.url)).proxy_url_for(plan.url)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, proxy=proxy) as http:
        await _check(http, signer, plan)
        load = Load(settings, LoadClient(http, signer, plan).converse)
        working = asyncio.current_task()
        assert working is not None

        def interrupt(number: int) -> None:
            if load.outcome.is_interrupted and number == signal.SIGINT:
                working.cancel()  # a second signal: do not wait for running questions
            load.stop()

        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, interrupt, number)
        reporting = asyncio.create_task(_report(load.outcome, settings, report))
        try:
            outcome = await load.run()
        finally:
            await cancel_all([reporting])
            for number in ENDING:
                asyncio.get_running_loop().remove_signal_handler(number)
    return summarize(outcome, settings)


def _trusted() -> ssl.SSLContext | bool:
    """Return the certificate authorities, as boto3 configures them."""
    ca_file = os.environ.get("AWS_CA_BUNDLE")
    try:
        return ssl.create_default_context(cafile=ca_file) if ca_file else True
    except OSError as error:
        raise EndpointError(f"AWS_CA_BUNDLE: {ca_file} has no certificates that can be read: {error}") from error


async def _check(http: aiohttp.ClientSession, signer: Signer, plan: ConversationPlan) -> None:
    url = f"{plan.url.rstrip('/')}/endpoints/{plan.endpoint}"
    try:
        async with http.get(url, headers=signer.sign("GET", url, {})) as answer:
            status, reason = answer.status, await reason_of(answer)
    except aiohttp.ClientSSLError as error:  # of a certificate: also a ValueError
        found = f"no TLS connection to {plan.url}: {failure_reason(error)}"
        raise EndpointUnreachable(f"{found} ({TRUST_HINT})") from error
    except (aiohttp.InvalidURL, ValueError) as error:
        raise EndpointError(f"--url must be an http(s) address, not {plan.url!r}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = failure_reason(error)
        raise EndpointUnreachable(f"no answer from {plan.url}: {reason} (is `torchmoor up` running?)") from error
    if status in (401, 403):
        raise CredentialsRefused(f"{plan.url} does not accept these credentials: see docs/access.md")
    if status != 200:
        raise EndpointError(f"endpoint {plan.endpoint!r} answers with status {status}: {reason[:MAX_REASON]}")


async def _report(outcome: LoadOutcome, settings: LoadSettings, report: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        passed = monotonic() - outcome.began
        failed = outcome.num_failed
        done = len(outcome.samples) - failed
        end = "" if settings.duration_s is None else f" of {settings.duration_s:g}"
        most = "" if settings.num_requests is None else f" of {settings.num_requests}"
        report(
            f"{passed:.0f}{end} s: {done}{most} answered, {failed} failed, "
            f"{outcome.num_running} running, {done / passed:.1f} requests/s"
        )

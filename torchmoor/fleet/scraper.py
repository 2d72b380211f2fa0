"""Scrapes the instances' own metrics and merges them into one page, each line labelled with its instance.

The instances listen on loopback, at ports that the launcher chooses, so that no other host can scrape them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import aiohttp

from torchmoor.proxy.instances.handler_operations import read_at_most
from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.instances.registry import Registry

logger = logging.getLogger(__name__)

# Not settings, because the whole page must be ready before Prometheus stops waiting: after 10 s, by default.
TIMEOUT_S = 2.0  # of one instance
PAGE_TIMEOUT_S = 5.0  # of all instances together
MAX_AT_ONCE = 16  # instances: each needs one of limits.reserved_descriptors
MAX_PAGE_BYTES = 4 << 20


class MetricsScraper:
    """Scrapes every instance that answers requests and has a metrics port."""

    def __init__(
        self, registry: Registry, *, timeout_s: float = TIMEOUT_S, page_timeout_s: float = PAGE_TIMEOUT_S
    ) -> None:
        """timeout_s: of one instance. page_timeout_s: of all instances together."""
        self._registry = registry
        self._timeout_s = timeout_s
        self._page_timeout_s = page_timeout_s
        self._client: aiohttp.ClientSession | None = None
        self._free = asyncio.Semaphore(MAX_AT_ONCE)
        self._unanswered: dict[str, float] = {}  # when an instance's last query was sent, if it has no page

    async def __aenter__(self) -> MetricsScraper:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._client = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True, limit=0))
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._client is not None
        await self._client.close()

    async def scrape(self) -> str:
        """Return all pages as one, in Prometheus' text format. InstanceScraped is 0 for an instance without a page."""
        instances = self._instances()
        ends_at = asyncio.get_running_loop().time() + self._page_timeout_s
        pages = await asyncio.gather(*(self._ask(instance, ends_at) for instance in instances))
        named = [(instance, page) for instance, page in zip(instances, pages, strict=True)]
        return merge((_labels(instance), page) for instance, page in named if page is not None) + _scraped(named)

    def _instances(self) -> list[Instance]:
        """Return those with a metrics port: first those that answered last time, then those asked longest ago.

        In any fixed order, instances that hang could use up the page's time before the others are asked.
        """
        instances = [i for i in self._registry.instances() if i.metrics_port is not None]
        names = {instance.name for instance in instances}
        self._unanswered = {name: at for name, at in self._unanswered.items() if name in names}
        return sorted(instances, key=lambda instance: self._unanswered.get(instance.name, 0.0))

    async def _ask(self, instance: Instance, ends_at: float) -> str | None:
        assert self._client is not None
        if instance.state not in SERVING:
            return None
        url = f"{instance.url(instance.metrics_port)}/metrics"
        try:
            async with asyncio.timeout_at(ends_at), self._free:
                self._unanswered[instance.name] = asyncio.get_running_loop().time()
                async with self._client.get(url) as answer:
                    page = await read_at_most(MAX_PAGE_BYTES, answer) if answer.status == 200 else None
                if page is None:
                    return None
                self._unanswered.pop(instance.name, None)
                return page.decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("instance not scraped instance=%s error=%s", instance.name, error)
            return None


def merge(pages: Iterable[tuple[str, str]]) -> str:
    """Merge pages in the text format, which requires that all lines of a metric are together.

    pages: labels to add to each line, such as `instance="llava-0"`, and the page. Metrics without a value are omitted.
    """
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for labels, page in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                kind, name = line.split(" ", 3)[1:3]
                heads.setdefault(name, {}).setdefault(kind, line)
            elif line and not line.startswith("#"):
                samples.setdefault(name, []).append(_with_labels(line, labels))
    return "".join(
        "".join(f"{line}\n" for line in (*heads.get(name, {}).values(), *lines)) for name, lines in samples.items()
    )


def _with_labels(line: str, labels: str) -> str:
    name, space, rest = line.partition(" ")
    bare, brace, others = line.partition("{")
    if brace and len(bare) < len(name):
        return f"{bare}{{{labels},{others}"
    return f"{name}{{{labels}}}{space}{rest}"


def _labels(instance: Instance) -> str:
    """Return an instance's labels. Its names need no escaping."""
    return f'endpoint="{instance.endpoint}",instance="{instance.name}"'


def _scraped(pages: Iterable[tuple[Instance, str | None]]) -> str:
    lines = [f"InstanceScraped{{{_labels(instance)}}} {int(page is not None)}\n" for instance, page in pages]
    head = (
        "# HELP InstanceScraped 1 if this page has the instance's own metrics.\n# TYPE InstanceScraped gauge\n"
        if lines
        else ""
    )
    return head + "".join(lines)

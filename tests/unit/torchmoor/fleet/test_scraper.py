"""The instances' metrics pages, merged into one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import DEADLINE_S
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.fleet import scraper as module
from torchmoor.fleet.scraper import MetricsScraper, merge
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry

PAGE = """\
# HELP torchmoor_turns_total Torchserve prometheus counter metric with unit: Count
# TYPE torchmoor_turns_total counter
torchmoor_turns_total{ModelName="llava",Outcome="finished",Hostname="vm",} 3.0
torchmoor_turns_total{ModelName="llava",Outcome="failed",Hostname="vm",} 0.0
# HELP ttft_seconds Torchserve prometheus histogram metric with unit: Seconds
# TYPE ttft_seconds histogram
ttft_seconds_bucket{le="0.5",} 1.0
ttft_seconds_bucket{le="+Inf",} 1.0
ttft_seconds_count 1.0
ttft_seconds_sum 0.25
# HELP HandlerTime never set
# TYPE HandlerTime gauge
"""
Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


def samples(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Parse a page with Prometheus' own reader."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(page: str, name: str, labels: Mapping[str, str]) -> float:
    return samples(page)[name, frozenset(labels.items())]


def test_lines_of_all_pages_stand_together_with_their_instance() -> None:
    """Each metric has one head and every sample once, with its instance; metrics without samples are left out."""
    page = merge([('instance="a"', PAGE), ('instance="b"', PAGE.replace(" 3.0", " 5.0"))])

    labels = {"ModelName": "llava", "Outcome": "finished", "Hostname": "vm"}
    assert value(page, "torchmoor_turns_total", {**labels, "instance": "a"}) == 3.0
    assert value(page, "torchmoor_turns_total", {**labels, "instance": "b"}) == 5.0
    assert value(page, "ttft_seconds_bucket", {"le": "0.5", "instance": "b"}) == 1.0
    assert value(page, "ttft_seconds_count", {"instance": "a"}) == 1.0
    assert len(samples(page)) == 2 * len(samples(PAGE))
    assert page.count("# TYPE torchmoor_turns_total counter\n") == 1
    assert "HandlerTime" not in page
    families = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(set(families)) == len(families)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a 1", 'a{i="x"} 1'),
        ("a{} 1", 'a{i="x",} 1'),
        ('a{b="c d"} 1', 'a{i="x",b="c d"} 1'),
        ('a{b="{",} 1', 'a{i="x",b="{",} 1'),
    ],
)
def test_label_is_added_to_any_line(line: str, expected: str) -> None:
    """The label is added to lines with and without labels, whatever the labels contain."""
    assert merge([('i="x"', line + "\n")]) == expected + "\n"
    assert samples(expected)


async def scrape(behaviour: Behaviour, *, state: InstanceState = InstanceState.READY, **timeouts: float) -> str:
    """Return the page of a fleet with one instance that has a metrics port and one that has none."""
    app = web.Application()
    app.router.add_get("/metrics", behaviour)
    async with TestServer(app) as server:
        registry = Registry([EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),))])
        options = {"endpoint": "llava", "model": "llava", "port": 1}
        registry.add(Instance(name="a", metrics_port=server.port, state=state, **options))
        registry.add(Instance(name="b", state=state, **options))
        async with MetricsScraper(registry, **timeouts) as scraper:
            pages = await asyncio.gather(scraper.scrape(), scraper.scrape())
    assert pages[0] == pages[1]
    return pages[0]


async def give_page(request: web.Request) -> web.Response:
    return web.Response(text=PAGE)


async def fail(request: web.Request) -> web.Response:
    return web.Response(status=500)


async def hang(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    raise AssertionError


async def flood(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"a 1\n" * 10_000)


WHERE = {"endpoint": "llava", "instance": "a"}


@pytest.mark.parametrize("state", [InstanceState.READY, InstanceState.DRAINING])
async def test_page_of_an_instance_is_passed_on(state: InstanceState) -> None:
    """An instance's page is included under its endpoint's and its own name, also while it drains."""
    page = await scrape(give_page, state=state)

    assert value(page, "InstanceScraped", WHERE) == 1.0
    assert value(page, "ttft_seconds_sum", WHERE) == 0.25
    assert 'instance="b"' not in page


@pytest.mark.parametrize("behaviour", [fail, hang, flood])
async def test_instance_without_a_page_is_told(behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that refuses, hangs or never ends its page costs only its own lines."""
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", 100_000)

    page = await scrape(behaviour, timeout_s=0.3)

    assert samples(page) == {("InstanceScraped", frozenset(WHERE.items())): 0.0}


def add_instances(registry: Registry, port: int, number: int) -> None:
    """Add ready instances whose metrics are all at this port."""
    place = {"endpoint": "llava", "model": "llava", "port": 1, "metrics_port": port}
    for each in range(number):
        registry.add(Instance(name=f"llava-{each}", state=InstanceState.READY, **place))


async def test_many_instances_that_hang_cost_only_their_own_lines() -> None:
    """One time-out bounds the whole page, however many instances wait for their turn; what has arrived is kept."""
    num_asked = 0

    async def hang_after_one(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        return await (give_page if num_asked == 1 else hang)(request)

    app = web.Application()
    app.router.add_get("/metrics", hang_after_one)
    async with TestServer(app) as server:
        registry = Registry([EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),))])
        add_instances(registry, server.port, 3 * module.MAX_AT_ONCE)
        async with MetricsScraper(registry, timeout_s=2 * DEADLINE_S, page_timeout_s=1.0) as scraper:
            async with asyncio.timeout(DEADLINE_S):
                page = await scraper.scrape()

    scraped = [value for (name, _), value in samples(page).items() if name == "InstanceScraped"]
    assert sorted(scraped) == [0.0] * (3 * module.MAX_AT_ONCE - 1) + [1.0]
    assert num_asked == module.MAX_AT_ONCE + 1


async def test_instances_that_hang_do_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many instances hang, a later page has all that answer, also one that has recovered."""
    monkeypatch.setattr(module, "MAX_AT_ONCE", 2)
    hosts = [f"127.0.0.{number}" for number in range(1, 6)]
    hanging = set(hosts[:3])

    async def behave(request: web.Request) -> web.Response:
        return await (hang if request.url.host in hanging else give_page)(request)

    def scraped(page: str) -> set[str]:
        return {host for host in hosts if value(page, "InstanceScraped", {**WHERE, "instance": name_of(host)})}

    def name_of(host: str) -> str:
        return f"llava-{host[-1]}"

    app = web.Application()
    app.router.add_get("/metrics", behave)
    async with TestServer(app, host="0.0.0.0") as server:
        registry = Registry([EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),))])
        place = {"endpoint": "llava", "model": "llava", "port": 1, "metrics_port": server.port}
        for host in hosts:
            registry.add(Instance(name=name_of(host), host=host, state=InstanceState.READY, **place))
        async with MetricsScraper(registry, timeout_s=2 * DEADLINE_S, page_timeout_s=1.0) as scraper:
            hidden, shown = scraped(await scraper.scrape()), scraped(await scraper.scrape())
            hanging.remove(hosts[2])
            recovered = scraped(await scraper.scrape())

    assert (hidden, shown, recovered) == (set(), set(hosts[3:]), set(hosts[2:]))


async def test_few_instances_are_asked_at_once() -> None:
    """The connections of all instances together would need more descriptors than are reserved."""
    num_asked = most_asked = 0
    is_full = asyncio.Event()

    async def count(request: web.Request) -> web.Response:
        nonlocal num_asked, most_asked
        num_asked += 1
        most_asked = max(most_asked, num_asked)
        if num_asked == module.MAX_AT_ONCE:
            is_full.set()
        await is_full.wait()
        for _ in range(100):  # others could arrive meanwhile
            await asyncio.sleep(0)
        num_asked -= 1
        return web.Response(text=PAGE)

    app = web.Application()
    app.router.add_get("/metrics", count)
    async with TestServer(app) as server:
        registry = Registry([EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),))])
        add_instances(registry, server.port, 2 * module.MAX_AT_ONCE)
        async with MetricsScraper(registry, timeout_s=DEADLINE_S, page_timeout_s=DEADLINE_S) as scraper:
            pages = await asyncio.gather(scraper.scrape(), scraper.scrape())

    assert most_asked == module.MAX_AT_ONCE
    for page in pages:
        assert [line for line in page.splitlines() if line.startswith("InstanceScraped{") and line.endswith(" 0")] == []


async def test_instance_that_is_down_is_not_asked() -> None:
    """An instance that is down is not asked, since a dead one would cost the time-out."""
    page = await scrape(hang, state=InstanceState.DOWN)

    assert value(page, "InstanceScraped", WHERE) == 0.0

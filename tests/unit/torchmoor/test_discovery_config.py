"""The group Discovery of the configuration file, and the messages of `torchmoor serve --check`."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.torchmoor.fleet.dns_server import answering, failing, serving
from torchmoor.config.discovery import DiscoverySettings, parse_nameserver
from torchmoor.config.file import parse
from torchmoor.errors import ConfigError
from torchmoor.fleet.discovery import try_once

PAGE = Path(__file__).parents[3] / "docs" / "discovery.md"
NAME = "_inference._tcp.llava.zone.test"
ENDPOINTS = [
    {
        "EndpointConfig": {
            "EndpointConfigName": "llava",
            "ProductionVariants": [{"VariantName": "v", "ModelName": "llava"}],
        }
    }
]


def read(*entries: dict[str, Any], **more: Any) -> tuple[DiscoverySettings, ...]:
    return parse({"Endpoints": ENDPOINTS, "Discovery": list(entries), **more}).discovery


def test_example_in_the_docs_is_a_configuration() -> None:
    """The example in the documentation is parsed with the endpoint that it names."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)

    (entry,) = parse({"Endpoints": ENDPOINTS, **yaml.safe_load(text)}).discovery

    assert (entry.endpoint, entry.variant, entry.record, entry.capacity) == ("llava", "v", "SRV", 16)


def test_page_names_every_key() -> None:
    """The page documents every key, with its default in docs/configuration.md."""
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), re.MULTILINE)

    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(DiscoverySettings.model_fields)


def test_instances_may_stand_beside_it_or_be_left_out() -> None:
    """Instances may be listed beside Discovery or left out; both use one registry."""
    alone = parse({"Endpoints": ENDPOINTS, "Discovery": [{"dns_name": NAME}]})
    beside = parse({"Endpoints": ENDPOINTS, "Discovery": [{"dns_name": NAME}], "Instances": [{"name": "a", "port": 1}]})

    assert (len(alone.instances), len(alone.discovery)) == (0, 1)
    assert (len(beside.instances), len(beside.discovery)) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dns_name": "llava"}, r"dns_name must be a whole name.* not 'llava'"),
        ({"dns_name": "Llava.Zone.Test"}, "must be a whole name in lower case"),
        ({"dns_name": f"{'a' * 64}.test"}, "must be a whole name"),
        ({"record": "TXT"}, "record must be one of SRV, A, AAAA, not 'TXT'"),
        ({"port": 8085}, "port must be left out, an SRV record has it"),
        ({"record": "A"}, "port must be from 1 to 65535, not 0"),
        ({"record": "A", "port": 65_536}, "port must be from 0 to 65535, not 65536"),
        ({"management_port": -1}, "management_port must be from 0 to 65535, not -1"),
        ({"timeout_s": 0}, "timeout_s must be positive, not 0"),
        ({"max_instances": 0}, "max_instances must be positive, not 0"),
        ({"interval_s": 0.5}, "interval_s must be min_interval_s or more, not 0.5"),
        ({"nameservers": ["dns.test"]}, "nameservers must be addresses, not 'dns.test'"),
        ({"nameservers": ["10.0.0.2:0"]}, "'10.0.0.2:0' has no valid port"),
        ({"nameservers": "10.0.0.2"}, r"Discovery\[0\].nameservers must be a list of texts"),
        ({"endpoint": "other"}, r"Discovery\[0\].endpoint must be one of llava, not 'other'"),
        ({"variant": "w"}, r"Discovery\[0\].variant must be one of v, not 'w'"),
        ({"name": "x"}, "unknown key 'name'"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    """Errors name key and value."""
    with pytest.raises(ConfigError, match=message):
        read({"dns_name": NAME, **changes})


def test_a_name_is_asked_by_one_entry() -> None:
    """A name may have one entry; a final dot does not make it another name."""
    with pytest.raises(ConfigError, match=r"Discovery\[1\].dns_name .* is given twice"):
        read({"dns_name": NAME}, {"dns_name": f"{NAME}."})


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("10.0.0.2", ("10.0.0.2", 53)),
        ("10.0.0.2:5353", ("10.0.0.2", 5353)),
        ("fd00::2", ("fd00::2", 53)),
        ("[fd00::2]", ("fd00::2", 53)),
        ("[fd00::2]:5353", ("fd00::2", 5353)),
    ],
)
def test_nameservers(text: str, server: tuple[str, int]) -> None:
    """A name server may have a port."""
    assert parse_nameserver(text) == server


async def test_check_says_what_the_names_bring() -> None:
    """The check lists what the names resolve to, and warns of those without instances."""
    zone = answering(f"{NAME}. 30 SRV 0 0 8085 llava-0.zone.test.", "llava-0.zone.test. 30 A 10.0.0.1")
    warned: list[str] = []
    async with serving(zone) as server, serving(failing(2)) as broken:
        good = {"nameservers": (server.address,)}
        entries = [
            DiscoverySettings(dns_name=NAME, **good),
            DiscoverySettings(dns_name="nobody.zone.test", **good),
            DiscoverySettings(dns_name="llava-0.zone.test", record="A", port=85, **good),
            DiscoverySettings(dns_name="broken.zone.test", nameservers=(broken.address,)),
        ]
        found = await asyncio.to_thread(try_once, entries, warned.append)

    assert found == {
        NAME: ["llava-0"],
        "nobody.zone.test": [],
        "llava-0.zone.test": ["10.0.0.1"],
        "broken.zone.test": [],
    }
    assert sorted(line[:43] for line in warned) == [
        "Discovery: broken.zone.test: All nameserver",
        "Discovery: nobody.zone.test has no SRV reco",  # prose: allow
    ]

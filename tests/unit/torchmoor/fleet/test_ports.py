"""Ports for the instances: free on loopback, and below the ephemeral range."""

import random
import socket

import pytest

from torchmoor.errors import LaunchError
from torchmoor.fleet import ports
from torchmoor.fleet.ports import USUAL, find_free_ports, is_free

EPHEMERAL = 32_768


def test_ports_are_different_free_and_below_the_ephemeral_range() -> None:
    """Ports are below the ephemeral range, so that no outgoing connection takes an instance's port."""
    found = find_free_ports(5)

    assert len(set(found)) == 5
    assert set(found) < set(USUAL)
    assert max(USUAL) < EPHEMERAL
    assert all(is_free(port) for port in found)


def test_a_port_that_is_listened_on_is_not_free_and_is_passed_over() -> None:
    (port,) = find_free_ports(1, random.Random(7))
    with socket.create_server(("127.0.0.1", port)):
        (other,) = find_free_ports(1, random.Random(7))

        assert not is_free(port)
        assert other > port


def test_a_port_of_a_server_that_has_just_gone_is_free() -> None:
    """A port whose connections are in TIME_WAIT is free, so that a restarted instance gets it back."""
    (port,) = find_free_ports(1)
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = server.accept()
        served.close()  # the server's side closes first, so its side waits
        client.close()

    assert is_free(port)


def test_too_few_free_ports_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how many ports are free and how many are needed."""
    monkeypatch.setattr(ports, "is_free", lambda port: port < USUAL[2])

    with pytest.raises(LaunchError, match=r"only 2 free ports .* 5 are needed"):
        find_free_ports(5)


def test_ports_come_from_a_range_where_one_is_told() -> None:
    """The ports come from SAGEMAKER_SAFE_PORT_RANGE if the platform sets it."""
    safe = range(21_000, 21_200)

    assert set(find_free_ports(5, among=safe)) < set(safe)

"""The admin plane's client against another service that answers with JSON."""

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tests.http_servers import QuietHandler, serve_http
from torchmoor.cli.main import main
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminUnreachable, AdminUntrusted

COMMANDS = (
    ["instances"],
    ["sessions", "list"],
    ["sessions", "close", "da68e24be4b32f04"],
    ["models", "list"],
    ["models", "pin", "m"],
    ["drain", "llava-0"],
    ["async", "list", "--endpoint", "llava"],
    ["async", "status", "one"],
    ["async", "cancel", "one"],
)


class AnswersAll(QuietHandler):
    """Another service, which answers every request with an empty object."""

    status = 200

    def do_GET(self) -> None:
        self.reply(self.status, b"{}")

    do_POST = do_GET


@pytest.fixture(scope="module")
def other_url() -> Iterator[str]:
    with serve_http(AnswersAll) as url:
        yield url


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_another_service_is_not_taken_for_the_admin_plane(command: list[str], other_url: str) -> None:
    """Each command fails with one line that names the address, without reporting success."""
    done = CliRunner().invoke(main, [*command, "--admin-url", other_url])

    assert done.exit_code != 0
    assert f"{other_url} does not answer as an admin plane does" in done.output


def test_a_refusal_of_another_service_is_not_taken_for_the_admin_planes() -> None:
    """The runtime's port, which a user easily confuses with the admin plane's, answers with status 404."""
    with serve_http(type("Refuses", (AnswersAll,), {"status": 404})) as url:
        done = CliRunner().invoke(main, ["instances", "--admin-url", url])

    problem = f"{url} does not answer as an admin plane does: is it the runtime's port? (status 404)"
    assert (done.exit_code, done.stderr) == (1, f"Error: {problem}\n")


def test_a_port_without_tls_is_not_taken_for_an_untrusted_admin_plane(other_url: str) -> None:
    """Its certificate is not the problem: the error asks for the address."""
    with pytest.raises(AdminUnreachable, match=r"TLS failed: .*--admin-url") as failed:
        AdminClient(other_url.replace("http:", "https:")).get("/livez")

    assert not isinstance(failed.value, AdminUntrusted)

"""Sources of secrets, and what is reachable without any."""

from pathlib import Path

import pytest

from torchmoor.config.access import AccessSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.torchserve import SECRETS
from torchmoor.proxy.access.credential_sources import read_credentials
from torchmoor.proxy.access.exposure import check_exposure

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "token-of-alice-0123456789"
KEYS = Credentials(keys={"AKIAEXAMPLE": AccessKey(secret=SECRET)})
ADMIN = Credentials(admin_token=TOKEN)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_file_and_environment_are_read_together(tmp_path: Path) -> None:
    """File and environment are combined: several keys, session tokens, comments, the admin plane's token."""
    path = write(
        tmp_path / "keys",
        f"# of the team\nkey AKIAONE {SECRET}\n\nkey ASIATWO {SECRET}2 session/token==\ntoken alice {TOKEN}\n",
        0o640,
    )
    environ = {
        "TORCHMOOR_ACCESS_KEYS": f"AKIATHREE:{SECRET}, ASIAFOUR:{SECRET}:session",
        "TORCHMOOR_TOKENS": "bob:token:with:colons-of-bob",
        "TORCHMOOR_ADMIN_TOKEN": TOKEN,
    }

    credentials = read_credentials(environ, path)

    assert {key_id: key.session_token for key_id, key in credentials.keys.items()} == {
        "AKIATHREE": "",
        "ASIAFOUR": "session",
        "AKIAONE": "",
        "ASIATWO": "session/token==",
    }
    assert credentials.tokens == {"bob": "token:with:colons-of-bob", "alice": TOKEN}
    assert credentials.admin_token == TOKEN
    assert set(environ) <= SECRETS


def test_no_secret_is_in_what_could_be_logged() -> None:
    """Neither a repr nor an error contains a secret."""
    credentials = Credentials(keys=dict(KEYS.keys), tokens={"alice": TOKEN}, admin_token=TOKEN)

    assert SECRET not in repr(credentials) + repr(credentials.keys)
    assert TOKEN not in repr(credentials)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key AKIAONE", "line 1: expected"),
        (f"key AKIAONE {SECRET}\nkey AKIAONE {SECRET}", "line 2: 'AKIAONE' is given twice"),
        (f"password {SECRET}", "line 1: expected"),
        ("key AKIAONE short", "at least 16"),
        ("token alice short", "at least 16"),
        (f"key A-B {SECRET}", "letters, digits"),
        (f"token a {TOKEN}", "letters, digits"),
        (f"token alice {TOKEN}\ntoken bob {TOKEN}", "alice and bob have the same token"),
        (f"admin {TOKEN}\nadmin {TOKEN}", "line 2: expected"),
        ("key AKIAONE s\u00e9cret-0123456789", "ASCII"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_without_the_secret(tmp_path: Path, text: str, message: str) -> None:
    """The error has the line and the expected form, without the secret."""
    with pytest.raises(ConfigError, match=message) as caught:
        read_credentials({}, write(tmp_path / "keys", text))
    assert SECRET not in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620])
def test_a_file_that_others_could_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    """A file that others can read or change is refused with the command that corrects it."""
    with pytest.raises(ConfigError, match="chmod 600"):
        read_credentials({}, write(tmp_path / "keys", f"admin {TOKEN}", mode))


def test_a_file_that_is_not_there_or_too_long_is_refused(tmp_path: Path) -> None:
    """A file that is missing or too long is refused; no other credentials replace it."""
    with pytest.raises(ConfigError, match="cannot read"):
        read_credentials({}, tmp_path / "keys")
    with pytest.raises(ConfigError, match="longer than"):
        read_credentials({}, write(tmp_path / "keys", "#" * (1 << 20) + "##"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_no_credentials(host: str) -> None:
    """Loopback, which only this machine reaches, needs no credentials."""
    check_exposure(ListenSettings(host=host, admin_host=host), Credentials(), is_open=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_any_other_address_needs_credentials_or_must_be_meant(host: str) -> None:
    """Any other address of the data plane needs keys, tokens or an explicit flag."""
    listen = ListenSettings(host=host)
    with pytest.raises(ConfigError, match=r"--keys FILE.*--no-auth"):
        check_exposure(listen, ADMIN, is_open=False)

    check_exposure(listen, Credentials(), is_open=True)
    check_exposure(listen, KEYS, is_open=False)
    check_exposure(listen, Credentials(tokens={"alice": TOKEN}), is_open=False)


def test_no_auth_with_credentials_is_refused() -> None:
    """no_auth with credentials is refused as contradictory."""
    with pytest.raises(ConfigError, match="leave one of them out"):
        check_exposure(ListenSettings(), KEYS, is_open=True)


@pytest.mark.parametrize("is_open", [False, True])
def test_the_admin_plane_on_another_address_always_needs_its_token(is_open: bool) -> None:
    """On another address the admin plane needs its token, without an exception, since it can drain instances."""
    listen = ListenSettings(admin_host="0.0.0.0")
    with pytest.raises(ConfigError, match="TORCHMOOR_ADMIN_TOKEN"):
        check_exposure(listen, Credentials() if is_open else KEYS, is_open=is_open)

    check_exposure(listen, ADMIN, is_open=is_open)


def test_a_host_that_is_no_address_is_refused() -> None:
    """A host must be an address, because a name could resolve to anything."""
    with pytest.raises(ConfigError, match=r"example\.com"):
        check_exposure(ListenSettings(host="example.com"), Credentials(), is_open=True)


def test_tokens_in_clear_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Tokens without TLS give a warning, because anyone who reads a token can use it."""
    check_exposure(ListenSettings(host="0.0.0.0"), KEYS, is_open=False)
    assert caplog.text == ""

    check_exposure(ListenSettings(host="0.0.0.0"), Credentials(tokens={"alice": TOKEN}), is_open=False)
    assert "in clear" in caplog.text
    caplog.clear()
    check_exposure(ListenSettings(admin_host="0.0.0.0"), ADMIN, is_open=False)
    assert "admin token crosses the network in clear" in caplog.text
    caplog.clear()
    own = ListenSettings(admin_host="0.0.0.0", admin_tls_certificate="cert.pem", admin_tls_key="key.pem")
    check_exposure(own, ADMIN, is_open=False)
    assert caplog.text == ""


def test_settings_that_contradict_each_other_are_refused() -> None:
    """Contradictory settings are refused, such as a certificate without its key or a limit below any body."""
    with pytest.raises(ConfigError, match=r"listen\.tls_certificate needs listen\.tls_key"):
        ListenSettings(tls_certificate="cert.pem")
    with pytest.raises(ConfigError, match=r"listen\.admin_tls_key needs listen\.admin_tls_certificate"):
        ListenSettings(admin_tls_key="key.pem")
    with pytest.raises(ConfigError, match="max_arriving_bytes"):
        LimitSettings(max_arriving_bytes=10)
    with pytest.raises(ConfigError, match="clock_skew_s"):
        AccessSettings(clock_skew_s=0)

"""Session ids: minting, verifying, keys from the environment."""

import re
import string

import pytest

from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.errors import SettingsError
from handlers.requests.incoming import Caller
from torchmoor.wire.session_header import write_session_header
from torchmoor.wire.session_ids import SessionId, verify

EXPIRES_AT = 1_800_003_600
KEYS = {"k1": b"1" * 32, "k2": b"2" * 16}


@pytest.fixture
def ids() -> SessionIdMinter:
    return SessionIdMinter(KEYS, "node-1")


def test_minted_id_has_the_documented_form(ids: SessionIdMinter) -> None:
    """An id consists of prefix, nonce, expiry in hex, instance, key id and MAC, in this order."""
    sid = ids.mint(EXPIRES_AT, Caller("llava", "alice"))

    match = re.fullmatch(r"ts-seq-([a-z2-7]{16})-([0-9a-f]{8})-node-1-k1[a-z2-7]{26}", sid.text)
    assert int(match[2], 16) == EXPIRES_AT
    assert sid == SessionId(sid.text, "node-1", EXPIRES_AT, "k1")


def test_id_fits_the_session_header_with_its_expiry(ids: SessionIdMinter) -> None:
    """The header's value is at most 256 characters, even with the longest instance name."""
    longest = SessionIdMinter(KEYS, "a" * 63)

    text = longest.mint(EXPIRES_AT, Caller("llava", "")).text

    assert len(write_session_header(text, EXPIRES_AT)) <= 256
    assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", text)


def test_ids_do_not_repeat(ids: SessionIdMinter) -> None:
    """Two openings in the same second get different ids."""
    assert len({ids.mint(EXPIRES_AT, Caller()).text for _ in range(100)}) == 100


def test_minted_id_verifies(ids: SessionIdMinter) -> None:
    """For its own endpoint and caller, an id contains its expiry and instance."""
    sid = ids.mint(EXPIRES_AT, Caller("llava", "alice"))

    assert ids.verify(sid.text, Caller("llava", "alice")) == sid


@pytest.mark.parametrize("instance", ["a", "node-1", "a-b-c", "k0", "local", "x" * 63])
def test_instance_names_survive(instance: str) -> None:
    """An instance's name may contain hyphens without making the id ambiguous."""
    ids = SessionIdMinter(KEYS, instance)

    verified = ids.verify(ids.mint(EXPIRES_AT, Caller("e", "p")).text, Caller("e", "p"))

    assert verified.instance == instance


@pytest.mark.parametrize(
    ("endpoint", "principal"), [("other", "alice"), ("llava", "bob"), ("", ""), ("llava", ""), ("llava\nalice", "")]
)
def test_another_endpoint_or_caller_is_refused(ids: SessionIdMinter, endpoint: str, principal: str) -> None:
    """An id is valid for its own caller and endpoint only."""
    sid = ids.mint(EXPIRES_AT, Caller("llava", "alice"))

    assert ids.verify(sid.text, Caller(endpoint, principal)) is None


def test_every_single_character_change_is_refused(ids: SessionIdMinter) -> None:
    """No one-character edit, insertion or deletion of an id is another valid id."""
    text = ids.mint(EXPIRES_AT, Caller("llava", "")).text
    edits = set()
    for i in range(len(text)):
        edits.add(text[:i] + text[i + 1 :])
        for c in string.ascii_lowercase + string.digits + "-":
            edits.add(text[:i] + c + text[i + 1 :])
            edits.add(text[:i] + c + text[i:])
        edits.add(text[:i] + text[i].upper() + text[i + 1 :])
    edits.discard(text)

    assert [edit for edit in edits if ids.verify(edit, Caller("llava", "")) is not None] == []


@pytest.mark.parametrize(
    "text", ["", "ts-seq-", "NEW_SESSION", "ts-seq-\u0661", "é" * 90, " ", "\n", "a" * 100_000, "a-" * 50_000, "\ud800"]
)
def test_nonsense_is_refused(ids: SessionIdMinter, text: str) -> None:
    """Any other text from a client gives None at once."""
    assert ids.verify(text, Caller()) is None


def test_canonical_form_only(ids: SessionIdMinter) -> None:
    """White space around an id, or a line feed after it, makes it invalid."""
    text = ids.mint(EXPIRES_AT, Caller()).text

    assert [ids.verify(edit, Caller()) for edit in (text + "\n", " " + text, text + " ")] == [None] * 3


def test_wrong_key_is_refused(ids: SessionIdMinter) -> None:
    """Ids of a fleet with other keys under the same key id are forgeries."""
    other = SessionIdMinter({"k1": b"x" * 32}, "node-1")

    assert ids.verify(other.mint(EXPIRES_AT, Caller()).text, Caller()) is None


def test_keys_rotate(ids: SessionIdMinter) -> None:
    """After the signing key changed, ids of the old key stay valid while that key is known."""
    old = ids.mint(EXPIRES_AT, Caller())
    rotated = SessionIdMinter({"k3": b"3" * 32, **KEYS}, "node-1")
    retired = SessionIdMinter({"k3": b"3" * 32}, "node-1")

    assert rotated.mint(EXPIRES_AT, Caller()).text[-28:-26] == "k3"
    assert rotated.verify(old.text, Caller()) == old
    assert retired.verify(old.text, Caller()) is None


def test_environment_gives_keys_and_name() -> None:
    """The first key signs, all keys verify, and ids contain the launcher's name."""
    environ = {
        "TORCHMOOR_INSTANCE": "n-7",
        "TORCHMOOR_SESSION_KEYS": f"aa:{'01' * 16}, bb:{'02' * 32}",
    }

    ids = SessionIdMinter.from_environment(environ)
    sid = ids.mint(EXPIRES_AT, Caller())

    assert ids.instance == "n-7"
    assert sid.text[-28:-26] == "aa"
    assert verify(sid.text, {"aa": b"\x01" * 16}, endpoint="") is not None
    assert (
        ids.verify(SessionIdMinter({"bb": b"\x02" * 32}, "n-7").mint(EXPIRES_AT, Caller()).text, Caller()) is not None
    )


def test_without_environment_each_process_has_its_own_key() -> None:
    """A handler alone under TorchServe generates its own key, so its ids are valid there only."""
    one, other = SessionIdMinter.from_environment({}), SessionIdMinter.from_environment({})

    sid = one.mint(EXPIRES_AT, Caller())

    assert sid.instance == "local"
    assert one.verify(sid.text, Caller()) == sid
    assert other.verify(sid.text, Caller()) is None


@pytest.mark.parametrize(
    "keys",
    [
        "k1",
        "k1:",
        "k1:zz",
        ":" + "00" * 16,
        "k1:" + "00" * 15,
        "K1:" + "00" * 16,
        "abc:" + "00" * 16,
        "k1:" + "00" * 16 + ",",
        " ",
        "k1:" + "00" * 16 + ",k1:" + "11" * 16,
    ],
)
def test_malformed_keys_stop_the_worker(keys: str) -> None:
    """A missing, short, duplicate or non-hexadecimal key is a SettingsError that names the variable."""
    with pytest.raises(SettingsError, match="TORCHMOOR_SESSION_KEYS"):
        SessionIdMinter.from_environment({"TORCHMOOR_SESSION_KEYS": keys})


def test_key_errors_do_not_tell_the_key() -> None:
    with pytest.raises(SettingsError) as caught:
        SessionIdMinter.from_environment({"TORCHMOOR_SESSION_KEYS": "k1:5ec2e7"})

    assert "5ec2e7" not in str(caught.value)


@pytest.mark.parametrize("name", ["-a", "a-", "a--b", "A", "a_b", "a.b", "é", "a" * 64, "a b", "a\n"])
def test_malformed_instance_names_stop_the_worker(name: str) -> None:
    """A name that does not fit the id's form is a SettingsError that names the variable."""
    with pytest.raises(SettingsError, match="TORCHMOOR_INSTANCE"):
        SessionIdMinter.from_environment({"TORCHMOOR_INSTANCE": name})

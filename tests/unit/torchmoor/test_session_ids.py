"""The codec of session ids: minted ids verify, and nothing else does."""

import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.wire import session_ids
from torchmoor.wire.session_ids import (
    SESSION_HASH,
    SessionId,
    compose,
    find_key,
    parse_session_keys,
    session_hash,
    verify,
)

KEYS = {"k1": b"first key of sixteen", "k2": b"second key of sixteen"}


def mint(
    *,
    endpoint: str = "llava",
    principal: str = "",
    nonce: str = "abcdefgh234567aa",
    expiry: str = "6a000000",
    instance: str = "llava-0",
    key_id: str = "k1",
    key: bytes = KEYS["k1"],
) -> str:
    return compose(
        key, endpoint=endpoint, principal=principal, nonce=nonce, expiry=expiry, instance=instance, key_id=key_id
    )


@pytest.mark.parametrize(
    ("text", "endpoint", "principal", "parts"),
    [
        (
            "ts-seq-aaaqeayeaudaocaj-6b49e010-node-1-k1cxcmoiemr76u6p2dnagn5fshqi",
            *("llava", "alice"),
            ("node-1", 1_800_003_600, "k1"),
        ),
        (
            "ts-seq-7777777777777777-6b49e010-a-k22s2ug25qgp2ywfyfsozlp2n2by",
            *("My-Endpoint", ""),
            ("a", 1_800_003_600, "k2"),
        ),
        (
            f"ts-seq-aaaaaaaaaaaaaaaa-ffffffff-{'x' * 63}-k1amhrqngzpc3ym4efiasn4mocym",
            *("", "0" * 64),
            ("x" * 63, 0xFFFFFFFF, "k1"),
        ),
    ],
)
def test_ids_minted_by_earlier_versions_verify(
    text: str, endpoint: str, principal: str, parts: tuple[str, int, str]
) -> None:
    """The format is fixed: sessions survive an upgrade of the proxy or of an instance."""
    keys = {"k1": b"1" * 32, "k2": b"2" * 16}

    assert SessionId(text, *parts) == verify(text, keys, endpoint=endpoint, principal=principal)


@pytest.mark.parametrize("instance", ["a", "llava-0", "torchserve-llava-12", "0-0-0", "x" * 63])
def test_minted_id_is_verified(instance: str) -> None:
    """The codec returns its instance and expiry, whatever hyphens the name has."""
    text = mint(instance=instance)

    session = verify(text, KEYS, endpoint="llava")

    assert (text, instance, 0x6A000000, "k1") == (session.text, session.instance, session.expires_at, session.key_id)


def test_a_new_id_is_signed_with_the_first_key() -> None:
    """A new id is signed with the first key, so every instance can verify it."""
    asked: list[int] = []

    def count(number: int) -> bytes:
        asked.append(number)
        return bytes(number)

    new = session_ids.mint(
        KEYS, instance="a", expires_at=0x6A000000, endpoint="llava", principal="alice", random_bytes=count
    )

    assert new == (mint(instance="a", principal="alice", nonce="a" * 16), "a", 0x6A000000, "k1")
    assert verify(new.text, KEYS, endpoint="llava", principal="alice") == new
    assert asked == [10]
    assert not new.is_foreign
    assert SessionId("another handler's", "a", 0, "").is_foreign


def test_keys_are_read_in_their_order() -> None:
    assert list(parse_session_keys(f"k2:{'ab' * 16}, k1:{'cd' * 32}").items()) == [
        ("k2", b"\xab" * 16),
        ("k1", b"\xcd" * 32),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a kid has 2 characters, a key 16 bytes or more$"),
        (f"k:{'ab' * 16}", "a kid has 2 characters, a key 16 bytes or more$"),
        (f"k11:{'ab' * 16}", "a kid has 2 characters, a key 16 bytes or more$"),
        (f"K1:{'ab' * 16}", "a kid has 2 characters, a key 16 bytes or more$"),
        (f"k1:{'ab' * 15}", "16 bytes or more, unlike that of k1$"),
        (f"k1:{'xy' * 16}", "16 bytes or more, unlike that of k1$"),
        ("k1", "16 bytes or more, unlike that of k1$"),
        (f"k1:{'ab' * 16},k1:{'ab' * 16}", "has two keys of the kid 'k1'"),
    ],
)
def test_keys_out_of_form_are_refused_without_showing_them(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_session_keys(text)

    assert "abab" not in str(caught.value)


def test_every_key_verifies() -> None:
    """An id names its key, so that keys can be rotated."""
    assert verify(mint(key_id="k2", key=KEYS["k2"]), KEYS, endpoint="llava") is not None
    assert verify(mint(key_id="k2", key=KEYS["k1"]), KEYS, endpoint="llava") is None
    assert verify(mint(key_id="k3"), KEYS, endpoint="llava") is None
    assert verify(mint(), {}, endpoint="llava") is None


def test_the_key_that_an_id_names_is_found() -> None:
    """The key that an id names also signs a worker's other data of the session."""
    assert find_key(mint(key_id="k2", key=KEYS["k2"]), KEYS) == KEYS["k2"]
    assert find_key(mint(key_id="k3"), KEYS) is None


def test_id_belongs_to_one_endpoint_and_principal() -> None:
    assert verify(mint(), KEYS, endpoint="other") is None
    assert verify(mint(), KEYS, endpoint="llava", principal="someone") is None
    assert verify(mint(principal="someone"), KEYS, endpoint="llava", principal="someone") is not None


def test_any_edit_of_any_character_is_noticed() -> None:
    """An id with a changed, removed, doubled or swapped character is refused; each id has one spelling."""
    text = mint()
    edits = set()
    for place, character in enumerate(text):
        edits |= {text[:place] + other + text[place + 1 :] for other in string.printable + "é٣"}
        edits |= {text[:place] + text[place + 1 :], text[:place] + character + text[place:]}
        edits.add(text[:place] + text[place + 1 : place + 2] + character + text[place + 2 :])
    edits |= {text.upper(), text + "=", " " + text, text + "\n"}

    assert {text} == {edit for edit in edits if verify(edit, KEYS, endpoint="llava")}


@pytest.mark.parametrize("instance", ["", "-a", "a-", "a--b", "A", "a_b", "x" * 64, "a" * 120 + "!"])
def test_instance_names_out_of_form_are_refused_even_if_signed(instance: str) -> None:
    assert verify(mint(instance=instance), KEYS, endpoint="llava") is None


@given(st.text(max_size=300))
def test_no_text_is_an_id(text: str) -> None:
    """Any other text is refused without an exception."""
    assert verify(text, KEYS, endpoint="llava") is None
    assert verify("ts-seq-" + text, KEYS, endpoint="llava") is None


def test_long_near_misses_are_refused_quickly() -> None:
    """Long texts that resemble an id are refused in linear time, because the patterns do not backtrack."""
    began = time.process_time()

    verify("ts-seq-" + "a" * 16 + "-00000000-" + "a" * 160 + "!-k1" + "a" * 26, KEYS, endpoint="llava")

    assert time.process_time() - began < 1


def test_hash_of_a_session_stays_the_same() -> None:
    """A session's hash is fixed, because logs and instances of other versions use the same 16 digits."""
    assert session_hash("sm-1") == session_hash(b"sm-1") == "683820e8fc4a78b1"
    assert SESSION_HASH.fullmatch(session_hash("sm-1"))

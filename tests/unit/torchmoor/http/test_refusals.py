"""Requests that RequestReader refuses, rule by rule: none is completed, and nothing behind it is read."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.requests import MAX_HEADER_BYTES, read

LINE = b"POST /endpoints/llava/invocations HTTP/1.1\r\n"
HEAD = LINE + b"Host: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = HEAD + b"Content-Length: 2\r\n\r\n{}"
TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
WITHIN_A_LINE = st.binary(min_size=1, max_size=12).filter(lambda data: not set(data) & set(b"\r\n"))
NUMBERS = st.integers(0, 10**6).map(b"%d".__mod__)


def check_refused(data: bytes, status: int = 400) -> None:
    """Assert that a request is refused with this status, and that the valid one after it is not read."""
    listener, error = read([data + GOOD])

    assert error.status == status
    assert listener.num_complete == 0


@given(value=WITHIN_A_LINE.filter(lambda value: re.fullmatch(rb"[ \t]*[0-9]+[ \t]*", value) is None))
@example(value=b"")
@example(value=b"2, 2")
@example(value=b"+2")
@example(value=b"-2")
@example(value=b"0x2")
@example(value=b"\xb2")
@example(value=b"9" * 19)
@example(value=b"9" * 23)
def test_length_is_a_plain_number(value: bytes) -> None:
    """A Content-Length with anything but digits is refused, because servers read other forms differently."""
    check_refused(HEAD + b"Content-Length: " + value + b"\r\n\r\n{}")


@given(first=NUMBERS, second=NUMBERS, is_length_first=st.booleans())
def test_body_has_one_length(first: bytes, second: bytes, is_length_first: bool) -> None:
    """Two lengths, equal or not, two encodings, and a length beside an encoding are refused."""
    lengths = [b"Content-Length: " + number + b"\r\n" for number in (first, second)]
    encoding = b"Transfer-Encoding: chunked\r\n"
    pair = [lengths[0], encoding] if is_length_first else [encoding, lengths[0]]

    for fields in (lengths, [lengths[0]] * 2, [encoding] * 2, pair):
        check_refused(HEAD + b"".join(fields) + b"\r\n0\r\n\r\n")


CODINGS = st.lists(st.sampled_from([b"chunked", b"gzip", b"identity", b"xchunked", b"chunke"]), min_size=1, max_size=3)


@given(codings=CODINGS.filter(lambda codings: codings != [b"chunked"]))
def test_only_encoding_is_chunked(codings: list[bytes]) -> None:
    """Any coding but a final `chunked` is refused: a misplaced or repeated one as malformed, others as unknown."""
    _, error = read([HEAD + b"Transfer-Encoding: " + b", ".join(codings) + b"\r\n\r\n0\r\n\r\n" + GOOD])

    assert error.status in (400, 501)


@pytest.mark.parametrize(
    ("encoding", "status"), [(b"gzip, chunked", 501), (b"xchunked", 501), (b"chunked, identity", 400)]
)
def test_status_of_another_encoding(encoding: bytes, status: int) -> None:
    check_refused(HEAD + b"Transfer-Encoding: " + encoding + b"\r\n\r\n0\r\n\r\n", status)


def test_only_expectation_is_100_continue() -> None:
    """100-continue is accepted in any case of letters; another expectation gets its own status."""
    for expected in (b"100-continue", b"100-Continue"):
        listener, error = read([HEAD + b"Expect: " + expected + b"\r\nContent-Length: 2\r\n\r\n{}"])
        assert (error, listener.num_complete) == (None, 1)
    check_refused(HEAD + b"Expect: something\r\nContent-Length: 2\r\n\r\n{}", 417)


@given(name=WITHIN_A_LINE.filter(lambda name: b":" not in name and re.fullmatch(TOKEN, name) is None))
@example(name=b"")
@example(name=b"X y")
@example(name=b"Transfer-Encoding ")
@example(name=b" folded")
@example(name=b"X\x80")
def test_field_name_is_a_token(name: bytes) -> None:
    """A space before the colon, a continued line and any other byte are refused."""
    check_refused(HEAD + name + b": chunked\r\n\r\n")


@given(control=st.sampled_from([*range(9), *range(10, 32), 127]), before=st.binary(max_size=3).map(bytes.hex))
def test_field_value_has_no_control_characters(control: int, before: str) -> None:
    """A tab is allowed; a bare CR or LF would end the line for others."""
    check_refused(HEAD + b"X: " + before.encode() + bytes([control]) + b"b\r\n\r\n")


SIZES = st.binary(max_size=8).filter(
    lambda size: not set(size) & set(b"\r;") and not re.fullmatch(rb"[0-9a-fA-F]+", size)
)


@given(size=SIZES)
@example(size=b"0x2")
@example(size=b"-2")
@example(size=b"f" * 17)
@example(size=b"2 ")
@example(size=b"2\n{}\n0\n\n")
@example(size=b"2;\n")
@example(size=b"2_0")
def test_chunk_size_is_plain_hexadecimal(size: bytes) -> None:
    """A chunk size has at most 16 hexadecimal digits, and its line ends with CR LF."""
    check_refused(CHUNKED + size + b"\r\n{}\r\n0\r\n\r\n")


@given(behind=st.binary(min_size=2, max_size=2).filter(lambda behind: behind != b"\r\n"))
@example(behind=b"XX")
def test_chunk_ends_with_its_size(behind: bytes) -> None:
    check_refused(CHUNKED + b"2\r\n{}" + behind + b"0\r\n\r\n")


@pytest.mark.parametrize(
    "data",
    [
        HEAD.replace(b"\r\n", b"\n") + b"\n",
        LINE + b"Content-Length: 2\r\n\r\n{}",
        b"POST /a HTTP/1.0\r\nHost: x\r\nHost: y\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Host: y\r\nContent-Length: 2\r\n\r\n{}",
        *(LINE + b"Host: " + host + b"\r\nContent-Length: 2\r\n\r\n{}" for host in (b"x y", b"x/y", b"u@x", b"x\xff")),
        LINE.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        LINE.replace(b"1.1", b"3.0") + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"POST example HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_other_versions_hosts_and_targets_are_refused(data: bytes) -> None:
    """A request needs one Host, HTTP/1.0 or 1.1, and a path as the target."""
    check_refused(data)


@pytest.mark.parametrize("beginning", [b"\x16\x03\x01\x02\x00", HEAD + b"X: a\nY"], ids=["TLS", "bare LF"])
def test_what_begins_like_no_request_is_refused_before_its_end(beginning: bytes) -> None:
    """Bytes of another protocol are refused at once, because their client may never send a line end."""
    _, error = read([beginning])

    assert error.status == 400


@given(num_bytes=st.integers(MAX_HEADER_BYTES, 2 * MAX_HEADER_BYTES))
def test_head_chunk_line_and_trailers_are_bounded(num_bytes: int) -> None:
    """A long head, chunk line or trailer is refused before its end has arrived."""
    for start in (HEAD + b"X: ", CHUNKED + b"2;", CHUNKED + b"0\r\nX: "):
        listener, error = read([start + b"a" * num_bytes])

        assert (error.status, listener.num_complete) == (431, 0)

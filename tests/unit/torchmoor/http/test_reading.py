"""Parsing of requests and chunked bodies, compared with llhttp: ours may refuse more, but never reads differently."""

from contextlib import suppress

import httptools
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.llhttp import Requests, cut
from tests.fuzz.requests import compare, read
from torchmoor.proxy.http.chunks import ChunkedBody
from torchmoor.proxy.http.fields import MAX_KEPT_LINES, MAX_KEPT_NAMES, PASSED, FieldNote, make_field_table
from torchmoor.proxy.http.head import MAX_KEPT_FIELDS, MAX_KEPT_LAYOUTS, Head, HeadBook

PARTS = [
    b"GET / HTTP/1.1\r\n",
    b"POST /a?b=c HTTP/1.1\r\n",
    b"Host: x\r\n",
    b"hOsT:x\r\n",
    b"A: b\r\n",
    b"A: b",
    b"c: d\r\n",
    b"Long-Name:  v w \t\r\n",
    b"Empty:\r\n",
    b"Content-Length: 3\r\n",
    b"Content-Length:3 \r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: keep-alive\r\n",
    b"\r\n",
    b"abc",
    b"3\r\nabc\r\n",
    b"0\r\n\r\n",
    b"0\r\nT: u\r\n\r\n",
    b"a;x=y\r\n",
    b"\r",
    b"\n",
    b" ",
    b"\t",
    b":",
    b"\0",
    b"\x0b",
    b"\xff",
]
MESSAGES = st.lists(st.sampled_from(PARTS), max_size=14).map(b"".join)
# Mutations within a line of a valid request, which random parts seldom make.
LINES = st.lists(st.sampled_from(PARTS), max_size=4).map(b"".join)
REQUESTS = st.one_of(
    st.builds(lambda rest: b"POST /a HTTP/1.1\r\nHost: x\r\n" + rest, MESSAGES),
    st.builds(lambda line: b"POST /a HTTP/1.1\r\nHost: x\r\nA: b" + line + b"\r\n\r\n", LINES),
)
CUTS = st.lists(st.integers(0, 300), max_size=5)


@settings(max_examples=600, deadline=None)
@given(data=st.one_of(MESSAGES, REQUESTS), cuts=CUTS)
def test_what_is_read_is_what_llhttp_reads(data: bytes, cuts: list[int]) -> None:
    """Requests that our reader accepts have the same fields and bytes in llhttp."""
    listener, _ = read(cut(data, cuts))

    compare(data, listener)


@given(bodies=st.lists(st.lists(st.binary(min_size=1, max_size=30), max_size=3), min_size=1, max_size=4), cuts=CUTS)
def test_good_requests_are_read_whole(bodies: list[list[bytes]], cuts: list[int]) -> None:
    """Consecutive valid requests are read, with a length or in chunks, in any pieces, with line ends between."""
    data = b""
    for number, pieces in enumerate(bodies):
        body = b"".join(pieces)
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        framing = (b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body))[number % 2]
        head = b"\r\nPOST /a%d?b HTTP/1.1\r\nHost: x\r\nC: d\r\n%b\r\n\r\n" % (number, framing)
        data += head + (body if number % 2 else chunks + b"0\r\n\r\n")

    listener, error = read(cut(data, cuts))

    assert error is None
    assert listener.bodies == [b"".join(pieces) for pieces in bodies]
    assert listener.num_complete == len(bodies)
    assert [(method, url) for method, url, _ in listener.heads] == [
        (b"POST", b"/a%d?b" % number) for number in range(len(bodies))
    ]
    assert all((b"c", b"d") in fields for _, _, fields in listener.heads)


@settings(max_examples=300, deadline=None)
@given(data=st.one_of(MESSAGES, REQUESTS), cuts=CUTS)
def test_cuts_make_no_difference(data: bytes, cuts: list[int]) -> None:
    """A connection's bytes give the same requests however they are divided."""
    whole, cut_up = read([data])[0], read(cut(data, cuts))[0]

    assert whole.heads == cut_up.heads
    assert whole.num_complete == cut_up.num_complete
    assert whole.bodies[: whole.num_complete] == cut_up.bodies[: whole.num_complete]


SIZES = st.lists(st.sampled_from([b"3", b"x", b" ", b";", b"a", b"\n", b"\r", b"+", b"-"]), max_size=3).map(b"".join)
CHUNKS = st.one_of(
    st.builds(lambda size: size + b"\r\nabc\r\n0\r\n\r\n", SIZES),
    st.lists(
        st.sampled_from(
            [
                b"3\r\nabc\r\n",
                b"3",
                b"abc\r\n",
                b"0\r\n\r\n",
                b"0A\r\n0123456789\r\n",
                b"1;x=y\r\nz\r\n",
                b"0\r\n",
                b"\r\n",
                b"T: u\r\n",
                b"5",
                b"\r",
                b"\n",
                b"x",
                b" ",
            ]
        ),
        max_size=10,
    ).map(b"".join),
)


@settings(max_examples=600, deadline=None)
@given(data=CHUNKS, cuts=CUTS)
def test_chunks_are_read_as_llhttp_reads_them(data: bytes, cuts: list[int]) -> None:
    """A chunked body that our reader accepts has the same content and end in llhttp."""
    body, content = ChunkedBody(), b""
    pieces = cut(data, cuts)
    while pieces and not body.is_complete and body.fault is None:
        content += body.feed(pieces.pop(0))
    if not body.is_complete:
        return
    end = len(data) - len(body.rest + b"".join(pieces))
    oracle = Requests()
    with suppress(httptools.HttpParserError):
        oracle.parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + data[:end])

    assert (oracle.num_complete, oracle.bodies) == (1, [content])


@settings(max_examples=100, deadline=None)
@given(cuts=CUTS)
def test_bytes_between_data_are_counted_however_they_arrive(cuts: list[int]) -> None:
    """The longest run without data counts, also if data follow it in the same read."""
    extension = b"2;a=" + b"a" * 500 + b"\r\n"
    body, largest = ChunkedBody(), 0

    for piece in cut(extension + b"{}\r\n1\r\nx\r\n0\r\n\r\n", cuts):
        body.feed(piece)
        largest = max(largest, body.num_unparsed)

    assert body.is_complete
    assert largest == len(extension)


def test_lines_that_hold_secrets_or_differ_each_time_are_not_remembered() -> None:
    """Lines with credentials are not cached, nor are lines with ids, which would only evict useful ones."""
    table = make_field_table()

    for line in (b"Authorization: Bearer x", b"Cookie: a=b", b"X-Amz-Security-Token: t", b"amz-sdk-invocation-id: 1"):
        assert table[line].value
    table[b"Accept: */*"]

    assert list(table) == [b"Accept: */*"]


def test_remembered_lines_are_bounded() -> None:
    """The cache of lines is limited in number and length, whatever clients send."""
    table = make_field_table()

    for number in range(MAX_KEPT_LINES + 10):
        table[b"x: %d" % number]
    table[b"y: " + b"a" * 10_000]

    assert len(table) <= MAX_KEPT_LINES
    assert max(map(len, table)) < 100


def test_a_name_is_asked_for_its_note_once() -> None:
    """The application is asked once about each field name, and its answer is cached with the name."""
    asked: list[bytes] = []

    def note(name: bytes) -> FieldNote:
        asked.append(name)
        return PASSED

    table = make_field_table(note)

    for number in range(3):
        table[b"Accept: text/%d" % number]

    assert asked == [b"accept"]


def test_remembered_names_and_layouts_are_bounded() -> None:
    """The caches of names and layouts are limited, whatever names clients send, in any order."""
    book = HeadBook()

    for number in range(MAX_KEPT_NAMES + 10):
        fields, layout = book.read([b"x-%d: 1" % number])
        assert fields[layout.places[b"x-%d" % number]].value == b"1"
    book.read([b"y: %d" % number for number in range(MAX_KEPT_FIELDS + 1)])

    assert len(book.layouts) <= MAX_KEPT_LAYOUTS
    assert max(map(len, book.layouts)) <= MAX_KEPT_FIELDS


def test_heads_of_one_layout_keep_their_own_values() -> None:
    """Heads with one layout keep their own values, because the cached order of names contains none."""
    book = HeadBook()

    one = book.read([b"a: 1", b"Content-Length: 5", b"b: 2"])
    other = book.read([b"A: 3", b"content-length: 7", b"B: 4"])

    assert one[1] is other[1]
    assert Head(*one).lines() == b"a: 1\r\nb: 2\r\n"
    assert Head(*other).lines() == b"a: 3\r\nb: 4\r\n"
    assert (one[0][1].number, other[0][1].number) == (5, 7)


def test_fields_that_connection_names_are_the_connections_own() -> None:
    """Fields that Connection names are neither forwarded nor found; without that option the same names are."""
    book = HeadBook()

    named = Head(*book.read([b"connection: x-a, keep-alive", b"x-a: 1", b"x-b: 2"]))
    plain = Head(*book.read([b"connection: keep-alive", b"x-a: 1", b"x-b: 2"]))

    assert (named.find(b"x-a"), named.lines()) == (None, b"x-b: 2\r\n")
    assert (plain.find(b"x-a"), plain.lines()) == (b"1", b"x-a: 1\r\nx-b: 2\r\n")
    assert (plain.lines(frozenset((b"x-b",))), [field.name for field in named.headers]) == (b"x-a: 1\r\n", [b"x-b"])

"""Tests of the parsers of requests and heads, and of the bytes that they leave for the next request."""

from __future__ import annotations

import itertools

import pytest
from httptools import HttpParserError
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.examples import examples
from weightd_gateway.http.head import MAX_HEAD_BYTES, HeadReader, ReceivedHead, RequestParser

HEAD = b"POST /v2?x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\n\r\n"


def parse(sent: bytes, cuts: list[int]) -> tuple[RequestParser, bytes]:
    """Parse a request that arrives in parts; return the parser and the remaining bytes."""
    parser, data = RequestParser(), bytearray()
    bounds = [0, *sorted(each % (len(sent) + 1) for each in cuts), len(sent)]
    for begin, end in itertools.pairwise(bounds):
        data += sent[begin:end]
        while not parser.is_complete and parser.feed(data, 64):
            pass
    return parser, bytes(data)


@settings(max_examples=examples(200))
@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=30), st.just(b"\r\n\r\n"), st.just(b"x\r\n")), max_size=6),
    st.sampled_from([b"", b"X: y\r\n", b"X: y\r\nY: z\r\n"]),
    st.sampled_from([b"", NEXT, NEXT + NEXT]),
    st.lists(st.integers(0, 500), max_size=8),
)
def test_chunked_request_ends_before_the_next(
    chunks: list[bytes], trailers: bytes, following: bytes, cuts: list[int]
) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n" + trailers + b"\r\n"
    parser, left = parse(HEAD + body + following, cuts)
    assert (parser.is_complete, b"".join(parser.chunks), left) == (True, b"".join(chunks), following)
    assert (parser.method, parser.target, parser.version, parser.keep_alive) == ("POST", b"/v2?x", "1.1", True)
    assert parser.headers == [(b"host", b"h"), (b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize(
    "endless",
    [
        b"X: " + bytes(b"x" * MAX_HEAD_BYTES),
        b"5;" + b"x" * 2 * MAX_HEAD_BYTES,
        b"0\r\nX: " + b"x" * 2 * MAX_HEAD_BYTES,
        b"0\r\n" + b"X: y\r\n" * MAX_HEAD_BYTES,
        b"\r\n" * MAX_HEAD_BYTES,
    ],
)
def test_limits_bytes_outside_head_and_body(endless: bytes) -> None:
    """The cases are an endless header, chunk extension or trailer, many trailers, and empty lines."""
    head = b"" if endless.startswith(b"\r\n") else HEAD[:-2] if endless.startswith(b"X") else HEAD
    with pytest.raises(HttpParserError):
        parse(head + endless, [*range(0, 2 * MAX_HEAD_BYTES, 1000)])


def test_accepts_chunks_of_one_byte() -> None:
    parser, left = parse(HEAD + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n", [])
    assert (len(b"".join(parser.chunks)), left) == (20_000, b"")


def test_waits_for_rest_of_empty_line() -> None:
    parser, data = RequestParser(), bytearray(b"GET / HTTP/1.1\r\n\r")
    while parser.feed(data):
        pass
    assert (parser.is_head_complete, bytes(data)) == (False, b"\r\n\r")
    data += b"\n" + NEXT
    assert parser.feed(data)
    assert (parser.is_complete, bytes(data)) == (True, NEXT)


def test_upgrade_ends_connection_after_request() -> None:
    parser, left = parse(b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nmore", [])
    assert (parser.is_complete, parser.keep_alive, left) == (True, False, b"more")


def read_all(reader: HeadReader, data: bytes) -> list[ReceivedHead]:
    """Return the heads of the requests without a body in `data`."""
    heads: list[ReceivedHead] = []
    left = bytearray(data)
    while (found := reader.read(left)) is not None:
        heads.append(found[0])
    return heads


def test_parses_a_repeated_head_once() -> None:
    reader = HeadReader()
    first, second, third = read_all(reader, NEXT + NEXT + b"GET /nex HTTP/1.1\r\n\r\n")
    assert first is second
    assert (first.raw_path, third.raw_path) == ("/next", "/nex")
    assert read_all(reader, NEXT)[0] is not first


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 200), max_size=6))
def test_head_does_not_depend_on_its_arrival(cuts: list[int]) -> None:
    sent = (b"POST /a?b HTTP/1.1\r\nX: y\r\nContent-Length: 0\r\n\r\n" + NEXT) * 2
    reader, left = HeadReader(), bytearray()
    heads: list[tuple[str, str, str, bool]] = []
    bounds = [0, *sorted(each % (len(sent) + 1) for each in cuts), len(sent)]
    for begin, end in itertools.pairwise(bounds):
        left += sent[begin:end]
        while (found := reader.read(left)) is not None:
            head = found[0]
            heads.append((head.method, head.raw_path, head.header(b"x"), head.has_body))
    assert heads == [("POST", "/a", "y", False), ("GET", "/next", "", False)] * 2
    assert not left


def test_long_and_chunked_heads_are_not_kept() -> None:
    reader = HeadReader()
    long = b"GET / HTTP/1.1\r\nX: " + b"x" * 2048 + b"\r\n\r\n"
    first, second = read_all(reader, long + long)
    assert first is not second
    chunked = [reader.read(bytearray(HEAD)) for _ in range(2)]
    assert all(each is not None and each[1] is not None for each in chunked)

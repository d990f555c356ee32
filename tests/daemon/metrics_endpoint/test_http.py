from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.metrics_endpoint.http import MAX_HEAD_BYTES, HttpRequestHead, build_response, error_response


def head(content: bytes) -> HttpRequestHead:
    made = HttpRequestHead()
    assert made.feed(content)
    return made


def status(content: bytes, *, is_loopback: bool = True) -> int:
    """What it is answered with; 200: with the metrics."""
    refused = error_response(head(content), is_loopback=is_loopback)
    return int(refused.split(b" ", 2)[1]) if refused else 200


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: localhost:9464\r\n\r\n", 200),
        (b"GET /metrics?x=1&y HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\n\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"GET //metrics HTTP/1.1\r\n\r\n", 404),
        (b"GET http://localhost/metrics HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 405),
        (b"get /metrics HTTP/1.1\r\n\r\n", 405),
        (b"\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1 \r\n\r\n", 400),
        (b"GET /met\xffrics HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\n\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"x" * MAX_HEAD_BYTES, 431),
        (b"x" * (MAX_HEAD_BYTES + 1), 431),
    ],
)
def test_there_is_one_thing_to_be_had_and_one_way(content: bytes, expected: int) -> None:
    assert status(content) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"localhost", 200),
        (b"LOCALHOST.:9464", 200),
        (b"127.0.0.1:9464", 200),
        (b"192.168.1.2", 200),
        (b"[::1]:9464", 200),
        (b"", 200),
        (b"evil.example", 421),
        (b"localhost.evil.example:9464", 421),
        (b"127.0.0.1.evil.example", 421),
        (b"[evil]", 421),
    ],
)
def test_a_page_whose_name_was_made_to_mean_this_host_is_told_nothing(name: bytes, expected: int) -> None:
    request = b"GET /metrics HTTP/1.1\r\nAccept: */*\r\nhost:  " + name + b"\r\n\r\nHost: localhost\r\n"
    assert status(request) == expected
    # What follows the head says nothing.
    assert status(b"GET /metrics HTTP/1.1\r\n\r\nHost: evil.example\r\n") == 200
    # Where others can connect, its name is anything.
    assert status(request, is_loopback=False) == 200


@given(st.binary(max_size=60), st.data())
def test_in_how_many_pieces_it_comes_makes_no_difference(rest: bytes, data: st.DataObject) -> None:
    content = b"GET /metrics HTTP/1.1\r\n\r\n" + rest
    made, at = HttpRequestHead(), 0
    while not (whole := made.feed(content[at : (end := at + data.draw(st.integers(1, 7)))])) and end < len(content):
        at = end
    assert whole
    assert error_response(made, is_loopback=True) == b""


@given(st.binary(max_size=200))
def test_whatever_comes_has_an_answer(content: bytes) -> None:
    assert status(content + b"\n\n") in (200, 400, 404, 405, 421)


def test_an_answer_says_how_long_it_is_and_that_it_is_the_last() -> None:
    assert build_response(405, b"expected GET\n", ["Allow: GET"]).split(b"\r\n") == [
        b"HTTP/1.1 405 Method Not Allowed",
        b"Content-Type: text/plain; charset=utf-8",
        b"Content-Length: 13",
        b"X-Content-Type-Options: nosniff",
        b"Connection: close",
        b"Allow: GET",
        b"",
        b"expected GET\n",
    ]

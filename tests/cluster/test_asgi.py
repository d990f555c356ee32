"""Requests of ASGI as the gateway reads them, and its answers as ASGI has them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from weightd_gateway.http.responses import HttpError, HttpReply
from weightd_ray import asgi
from weightd_ray.asgi import AsgiRequest, Body, Message

T = TypeVar("T")


def run(what: Awaitable[T]) -> T:
    async def wait() -> T:
        return await what

    return asyncio.run(wait())


def receive(*messages: Message) -> asgi.Receive:
    left = list(messages)

    async def take() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return take


def pieces(*bodies: bytes) -> asgi.Receive:
    last = len(bodies) - 1
    return receive(*({"type": "http.request", "body": each, "more_body": i < last} for i, each in enumerate(bodies)))


def request(headers: Sequence[tuple[bytes, bytes]] = (), **scope: Any) -> AsgiRequest:
    told: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": headers, **scope}
    return AsgiRequest(told, receive(), 1.0)


@pytest.mark.parametrize(
    ("scope", "path"),
    [
        ({"path": "/v2"}, "/v2"),
        ({"path": "/m/v2/x", "root_path": "/m", "raw_path": b"/m/v2/x"}, "/v2/x"),
        ({"path": "/m", "root_path": "/m", "raw_path": b"/m"}, "/"),
        ({"path": "/m/v2/a/b", "root_path": "/m", "raw_path": b"/m/v2/a%2Fb"}, "/v2/a%2Fb"),
        ({"path": "/ä b/v2/a/b", "root_path": "/ä b", "raw_path": b"/%C3%A4%20b/v2/a%2Fb"}, "/v2/a%2Fb"),
        ({"path": "/m/v2", "root_path": "/m", "raw_path": b"/%6D/v2"}, "/v2"),
        ({"path": "/v2", "raw_path": b"/v2?x=/y"}, "/v2"),
    ],
)
def test_a_path_is_that_below_the_application(scope: Mapping[str, Any], path: str) -> None:
    assert request(**scope).raw_path == path


def test_headers_are_found_as_they_were_sent_but_for_who_asks() -> None:
    found = request([(b"content-length", b"12"), (b"x", b"1"), (b"x", b"2"), (b"authorization", b"Bearer t")])
    assert found.content_length == 12
    assert found.headers.getall("X") == ["1", "2"]
    assert "authorization" not in found.headers
    assert request().content_length is None


def test_a_body_is_read_however_it_comes() -> None:
    assert run(Body(pieces(b"ab", b"", b"cd"), 1).readexactly(4)) == b"abcd"
    assert run(Body(pieces(b"abcd"), 1).readexactly(4)) == b"abcd"

    async def all_of(body: Body) -> list[bytes]:
        return [each async for each in body.iter_any()]

    assert run(all_of(Body(pieces(b"ab", b"", b"cd"), 1))) == [b"ab", b"cd"]


def test_a_body_that_is_too_short_is_told() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        run(Body(pieces(b"ab"), 1).readexactly(4))


def test_a_body_that_does_not_come_is_given_up() -> None:
    with pytest.raises(HttpError, match="has not come in time"):
        run(Body(receive({"type": "http.request", "body": b"a", "more_body": True}), 0.01).readexactly(4))


def test_a_caller_that_goes_ends_its_request() -> None:
    with pytest.raises(HttpError, match="has gone"):
        run(Body(receive({"type": "http.disconnect"}), 1).readexactly(4))


def sent(what: Callable[[asgi.Send], Awaitable[None]]) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    run(what(send))
    return messages


def test_an_answer_is_one_piece_with_its_headers() -> None:
    reply = HttpReply([b"head", memoryview(b"tail")], "a/b", 429, {"Retry-After": "1"})
    start, body = sent(lambda send: asgi.send_reply(reply, "POST", send))
    assert start["status"] == 429
    assert dict(start["headers"]) == {b"content-type": b"a/b", b"content-length": b"8", b"retry-after": b"1"}
    assert body == {"type": "http.response.body", "body": b"headtail"}


def test_who_asks_for_the_header_alone_is_told_the_length() -> None:
    start, body = sent(lambda send: asgi.send_reply(HttpReply([b"head"]), "HEAD", send))
    assert dict(start["headers"])[b"content-length"] == b"4"
    assert body["body"] == b""


def test_begin_and_end_are_acknowledged_and_a_websocket_is_refused() -> None:
    messages = receive({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    told = sent(lambda send: asgi.handle_lifespan(messages, send))
    assert [each["type"] for each in told] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert sent(asgi.refuse_websocket) == [{"type": "websocket.close", "code": 1003}]

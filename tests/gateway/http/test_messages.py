"""Tests of requests and replies with other ASGI servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import pytest

from weightd_gateway.auth import Authenticator, Caller
from weightd_gateway.fairness import AdmissionControl
from weightd_gateway.http.app import HttpApi
from weightd_gateway.http.asgi import AsgiApp, AsgiRequest, Message, Receive, Send, asgi_app, send_reply
from weightd_gateway.http.messages import ANY_HOST, HttpError, HttpReply, read_body
from weightd_protocol.errors import InvalidArgument

T = TypeVar("T")

LARGE = bytes(range(256)) * 512


def run(what: Awaitable[T]) -> T:
    async def wait() -> T:
        return await what

    return asyncio.run(wait())


def receive(*messages: Message) -> Receive:
    left = list(messages)

    async def take() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return take


def pieces(*bodies: bytes) -> Receive:
    last = len(bodies) - 1
    return receive(*({"type": "http.request", "body": each, "more_body": i < last} for i, each in enumerate(bodies)))


def request(
    headers: Sequence[tuple[bytes, bytes]] = (), take: Receive | None = None, timeout_s: float = 30.0, **scope: Any
) -> AsgiRequest:
    acknowledged: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": headers, **scope}
    return AsgiRequest(acknowledged, take or receive(), timeout_s)


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
def test_path_is_relative_to_application(scope: Mapping[str, Any], path: str) -> None:
    assert request(**scope).head.raw_path == path


def test_finds_headers() -> None:
    found = request([(b"content-length", b"12"), (b"x", b"1"), (b"x", b"2")]).head
    assert (found.content_length, found.header(b"x"), found.header_values(b"x")) == (12, "1", ["1", "2"])
    assert request().head.content_length is None


def body(take: Receive, length: int, timeout_s: float = 30.0) -> bytes:
    sent = request([(b"content-length", b"%d" % length)], take, timeout_s)
    with AdmissionControl(1, 2**20).admit(None) as permit:
        return bytes(run(read_body(sent, permit, 2**20, bytearray, 7)))


@pytest.mark.parametrize("content", [b"abcd", LARGE])
def test_reads_body_in_any_parts(content: bytes) -> None:
    assert body(pieces(content), len(content)) == content
    assert body(pieces(content[:2], b"", content[2:]), len(content)) == content


@pytest.mark.parametrize("content", [b"abcd", LARGE])
@pytest.mark.parametrize("more", [-1, 1])
def test_rejects_body_of_wrong_length(content: bytes, more: int) -> None:
    for take in (pieces(content), pieces(content[:2], content[2:])):
        with pytest.raises(InvalidArgument, match="according to Content-Length"):
            body(take, len(content) + more)


def test_body_has_a_timeout() -> None:
    with pytest.raises(HttpError, match="did not arrive in time"):
        body(receive({"type": "http.request", "body": b"a", "more_body": True}), 4, 0.01)


def test_disconnect_ends_request() -> None:
    with pytest.raises(HttpError, match="has disconnected"):
        body(receive({"type": "http.disconnect"}), 4)


def sent(what: Callable[[Send], Awaitable[None]]) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    run(what(send))
    return messages


def test_reply_is_one_message_for_other_servers() -> None:
    permit = mock.Mock()
    reply = HttpReply([b"head", memoryview(LARGE)], "a/b", 429, {"Retry-After": "1"})
    reply.permit = permit
    start, message = sent(lambda send: send_reply(reply, "GET", send))
    assert start["status"] == 429
    lines = {b"content-type": b"a/b", b"content-length": b"%d" % (4 + len(LARGE)), b"Retry-After": b"1"}
    assert dict(start["headers"]) == lines
    assert message == {"type": "http.response.body", "body": b"head" + LARGE}
    permit.release.assert_called_once()


def test_reply_to_head_has_only_the_length() -> None:
    start, message = sent(lambda send: send_reply(HttpReply([b"head"]), "HEAD", send))
    assert (dict(start["headers"])[b"content-length"], message["body"]) == (b"4", b"")


def api(caller: Caller | None) -> AsgiApp:
    gateway = mock.Mock(authenticator=Authenticator({}, {}, {}))
    return asgi_app(HttpApi(gateway, frozenset({ANY_HOST}), caller).reply_to)


def test_lifespan_and_websocket() -> None:
    messages = receive({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    acknowledged = sent(lambda send: api(None)({"type": "lifespan"}, messages, send))
    assert [each["type"] for each in acknowledged] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert sent(lambda send: api(None)({"type": "websocket"}, messages, send)) == [
        {"type": "websocket.close", "code": 1003}
    ]


@pytest.mark.parametrize(("caller", "status"), [(None, 401), (Caller(None, "serve"), 200)])
def test_fixed_caller_ignores_credentials(caller: Caller | None, status: int) -> None:
    scope = {"type": "http", "method": "GET", "path": "/v2/logging", "headers": [(b"authorization", b"Bearer t")]}
    start, _ = sent(lambda send: api(caller)(scope, receive(), send))
    assert start["status"] == status


def test_unexpected_error_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    application = api(Caller(None, "serve"))
    with mock.patch("weightd_gateway.http.head.parse_route", side_effect=ZeroDivisionError):
        start, _ = sent(
            lambda send: application({"type": "http", "method": "GET", "path": "/", "headers": []}, receive(), send)
        )
    assert start["status"] == 500
    assert "HTTP request failed: GET /" in caplog.text

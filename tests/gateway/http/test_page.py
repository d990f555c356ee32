"""Tests of the status page as the gateway serves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from testkit import looks
from testkit.fakedaemon import FakeDaemon, echo
from testkit.httpgateway import HttpGateway
from testkit.looks import MB
from weightd_gateway.page.files import FILES, STATUS_HEADERS
from weightd_protocol.codec import encode
from weightd_protocol.messages.metrics import Metrics
from weightd_protocol.messages.status import Status
from weightd_protocol.messages.types import ClientMessage


def works(message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[list[Any]]:
    """Answer like a daemon with one model."""
    if isinstance(message, Metrics):
        return [encode(replace(looks.metrics(1.0, looks.counted("m", queued=3)), id=message.id))]
    if isinstance(message, Status):
        model = looks.model("m", looks.processes("m", 2, private=10 * MB, weights=90 * MB), copy=90 * MB)
        return [encode(replace(looks.status(1.0, model), id=message.id))]
    return echo(message, tensors)


@pytest.fixture
def gateway(fake: FakeDaemon) -> Iterator[HttpGateway]:
    fake.handle = works
    with HttpGateway(fake.address) as serving:
        yield serving


@pytest.mark.parametrize("path", FILES)
def test_serves_files_with_etags(gateway: HttpGateway, path: str) -> None:
    file = FILES[path]
    status, content, headers = gateway.ask("GET", path)
    assert (status, content, headers["Content-Type"]) == (200, file.body, file.content_type)
    assert file.headers.items() <= dict(headers).items()
    assert gateway.ask("GET", path, headers={"If-None-Match": file.etag})[:2] == (304, b"")
    assert gateway.ask("GET", path, headers={"If-None-Match": '"x"'})[0] == 200
    assert gateway.ask("HEAD", path)[:2] == (200, b"")
    assert gateway.ask("POST", path)[0] == 405


def test_numbers_come_from_daemon(gateway: HttpGateway) -> None:
    status, content, headers = gateway.ask("GET", "/status.json")
    assert (status, content["daemon"]) == (200, {"age_s": 0.0, "error": ""})
    [model] = content["overview"]["models"]
    assert (model["name"], model["queued"], model["memory"]["without_sharing_bytes"]) == ("m", 3, 200 * MB)
    assert STATUS_HEADERS.items() <= dict(headers).items()


def test_numbers_need_credentials(fake: FakeDaemon) -> None:
    with HttpGateway(fake.address, {"gateway": {"anonymous": ""}}) as gateway:
        assert gateway.ask("GET", "/")[0] == 200
        status, content, _ = gateway.ask("GET", "/status.json")
        assert status == 401
        assert "overview" not in content


def test_rejects_foreign_host_names(gateway: HttpGateway) -> None:
    for path in ("/", "/status.json"):
        assert gateway.ask("GET", path, headers={"Host": "rebound.example"})[0] == 403


def test_page_can_be_disabled(fake: FakeDaemon) -> None:
    with HttpGateway(fake.address, {"gateway": {"page": False}}) as gateway:
        assert [gateway.ask("GET", path)[0] for path in [*FILES, "/status.json"]] == [404] * 4

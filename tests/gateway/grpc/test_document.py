"""Tests that the gRPC section of docs/gateway.md lists the methods and limits of the code."""

from __future__ import annotations

import re
from pathlib import Path

from weightd_gateway import tensors
from weightd_gateway.grpc import handlers, public_services, requests, server, streams, wire_format
from weightd_gateway.grpc.schema import INFERENCE

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway.md"
SECTION = PAGE.read_text("utf-8").partition("\n## gRPC\n")[2].partition("\n## ")[0]


def test_documents_each_method_once() -> None:
    rows = [line.split("|")[1] for line in SECTION.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(INFERENCE.requests)


def test_documents_each_limit() -> None:
    text = " ".join(SECTION.split())
    pings = server.KEEPALIVE_S + server.KEEPALIVE_TIMEOUT_S
    reflection_s = f"{public_services.REFLECTION_TIMEOUT_S:.0f}"
    for sentence in (
        f"| streams of all callers | {streams.MAX_STREAMS} |",
        f"| calls of one connection | {server.MAX_CALLS_PER_CONNECTION} |",
        f"| metadata of a call | {server.MAX_METADATA_BYTES // 1024} KiB |",
        f"| interval of pings | {server.MIN_PING_INTERVAL_S} s | disconnected |",
        f"| reply to a ping | {pings} s | disconnected |",
        f"| calls without token (message within {handlers.RECEIVE_GRACE_S:.0f} s) | {handlers.MAX_PROBES} |",
        f"| calls of `Watch` | {streams.MAX_WATCH_STREAMS} |",
        f"| reflection streams | {streams.MAX_REFLECTION_STREAMS}, a request every {reflection_s} s |",
        f"| message without tensors | {handlers.MAX_SMALL_MESSAGE_BYTES // 1024} KiB |",
        f"| message without raw contents | {requests.MAX_HEADER_BYTES >> 20} MiB and {tensors.MAX_VALUES:,} values |",
        f"| parameters of a request or tensor | {requests.MAX_PARAMETERS:,} |",
        f"| fields of a message, nested ones included (a packed list is one) | {wire_format.MAX_FIELDS:,} |",
        f"| message of more than {wire_format.MAX_FAST_FIELDS} fields | {requests.MAX_UNUSUAL_BYTES >> 20} MiB |",
        f"`max_in_flight` + {handlers.MAX_UNSENT_CALLS} calls",
        f"Answers of {handlers.MIN_RESERVED_BYTES // 1024} KiB and more",
        f"a text of at most {handlers.MAX_TEXT_BYTES:,} bytes",
    ):
        assert sentence in text

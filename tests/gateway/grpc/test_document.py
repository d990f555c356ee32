"""What docs/gateway.md says of gRPC is held to the code: its methods and its bounds."""

from __future__ import annotations

import re
from pathlib import Path

from weightd_gateway import tensors
from weightd_gateway.grpc import handlers, public_services, requests, server, streams, wire_format
from weightd_gateway.grpc.schema import INFERENCE

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway.md"
SECTION = PAGE.read_text("utf-8").partition("\n## gRPC\n")[2].partition("\n## ")[0]


def test_each_method_is_there_once() -> None:
    rows = [line.split("|")[1] for line in SECTION.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(INFERENCE.requests)


def test_each_bound_is_there() -> None:
    text = " ".join(SECTION.split())
    pings = server.KEEPALIVE_S + server.KEEPALIVE_TIMEOUT_S
    for sentence in (
        f"{streams.MAX_STREAMS} streams, of all callers, may be open",
        f"{server.MAX_CALLS_PER_CONNECTION} calls of one connection",
        f"metadata of a call is {server.MAX_METADATA_BYTES // 1024} KiB at most",
        f"more often than every {server.MIN_PING_INTERVAL_S} s is hung up, and so is who answers no ping for {pings} s",
        f"{handlers.MAX_PROBES} calls, whose message has to come within a second",
        f"{streams.MAX_WATCH_STREAMS} that watch, and {streams.MAX_REFLECTION_STREAMS} that reflect",
        f"with a question every {public_services.REFLECTION_TIMEOUT_S:.0f} s",
        f"has no tensors is {handlers.MAX_SMALL_MESSAGE_BYTES // 1024} KiB at most",
        f"raw content has {requests.MAX_HEADER_BYTES >> 20} MiB, and {tensors.MAX_VALUES:,} values, at most",
        f"{requests.MAX_PARAMETERS:,} parameters of a request or of a tensor",
        f"at most {wire_format.MAX_FIELDS:,} fields beside raw content",
        f"{requests.MAX_UNUSUAL_BYTES >> 20} MiB in a message of more than {wire_format.MAX_FAST_FIELDS} fields",
        f"`max_in_flight` + {handlers.MAX_UNSENT_CALLS} calls",
        f"Answers of {handlers.MIN_RESERVED_BYTES // 1024} KiB and more",
        f"a text of {handlers.MAX_TEXT_BYTES:,} bytes at most",
    ):
        assert sentence in text

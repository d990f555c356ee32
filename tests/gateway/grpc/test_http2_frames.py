from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.grpc import http2_frames
from weightd_gateway.grpc.http2_frames import (
    BURST_TOKENS,
    PREFACE,
    TOKENS_PER_S,
    FrameCounter,
    FrameHeads,
    LimitExceeded,
)

END_HEADERS = 4


def frame(kind: int, content: bytes = b"", flags: int = 0) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + content


def begun(now: float = 0.0) -> FrameCounter:
    """Return a frame counter that has read the preface."""
    found = FrameCounter(now)
    found.feed(PREFACE, now)
    return found


CALL = frame(http2_frames.HEADERS, bytes(100), END_HEADERS) + frame(http2_frames.DATA, bytes(600))


@given(st.lists(st.tuples(st.integers(0, 12), st.binary(max_size=40)), max_size=12), st.data())
def test_finds_frame_headers_in_any_chunks(content: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(frame(kind, payload) for kind, payload in content)
    found: list[tuple[int, int, int, int]] = []
    heads, position = FrameHeads(), 0
    while position < len(stream):
        size = data.draw(st.integers(1, 30))
        found += heads.feed(stream[position : position + size])
        position += size
    assert found == [(kind, 0, len(payload), 0) for kind, payload in content]
    assert heads.is_at_boundary


def test_detects_incomplete_frame() -> None:
    heads = FrameHeads()
    for part, is_between in ((b"\0\0\4\6", False), (bytes(5), False), (b"ab", False), (b"cd", True)):
        list(heads.feed(part))
        assert heads.is_at_boundary is is_between


@given(st.integers(1, len(PREFACE)))
def test_connection_begins_with_preface(size: int) -> None:
    found = FrameCounter(0.0)
    found.feed(PREFACE[:size], 0.0)
    assert found.has_preface is (size == len(PREFACE))
    with pytest.raises(LimitExceeded, match="preface"):
        FrameCounter(0.0).feed(PREFACE[: size - 1] + b"\0", 0.0)


@pytest.mark.parametrize(
    "kind",
    [
        http2_frames.PING,
        http2_frames.SETTINGS,
        http2_frames.PRIORITY,
        http2_frames.RST_STREAM,
        http2_frames.WINDOW_UPDATE,
        http2_frames.DATA,
        200,
    ],
)
def test_limits_rate_of_control_frames_and_empty_data(kind: int) -> None:
    found = begun()
    found.feed(frame(kind) * int(BURST_TOKENS), 0.0)
    with pytest.raises(LimitExceeded, match="control frames at once"):
        found.feed(frame(kind), 0.0)
    later = begun()
    later.feed(frame(kind) * int(BURST_TOKENS), 0.0)
    later.feed(frame(kind) * int(TOKENS_PER_S), 1.0)
    with pytest.raises(LimitExceeded):
        later.feed(frame(kind), 1.0)


def test_idle_time_earns_at_most_the_burst() -> None:
    found = begun()
    with pytest.raises(LimitExceeded):
        found.feed(frame(http2_frames.PING) * int(BURST_TOKENS + 1), 1e6)


def test_allows_pings_with_each_call() -> None:
    found = begun()
    for _ in range(5000):
        found.feed(CALL + frame(http2_frames.PING, bytes(8)) * 2 + frame(http2_frames.WINDOW_UPDATE, bytes(4)) * 4, 0.0)


def test_allows_acknowledgement_of_sent_bytes() -> None:
    found = begun()
    for _ in range(5000):
        found.count_sent(16 * 1024)
        found.feed(frame(http2_frames.WINDOW_UPDATE, bytes(4)) * 2, 0.0)


@given(st.integers(1, 200))
def test_limits_number_and_bytes_of_continuations(size: int) -> None:
    found = begun()
    part = frame(http2_frames.CONTINUATION, bytes(size))
    found.feed(frame(http2_frames.HEADERS), 0.0)
    found.feed(part * http2_frames.MAX_CONTINUATIONS, 0.0)
    with pytest.raises(LimitExceeded, match=f"at most {http2_frames.MAX_CONTINUATIONS} CONTINUATION"):
        found.feed(part, 0.0)
    # The limits apply anew to the next call.
    again = begun()
    for _ in range(2):
        again.feed(frame(http2_frames.HEADERS) + part + frame(http2_frames.CONTINUATION, b"", END_HEADERS), 0.0)
    with pytest.raises(LimitExceeded, match=f"at most {http2_frames.MAX_HEADER_BYTES} bytes of headers"):
        again.feed(
            frame(http2_frames.HEADERS) + frame(http2_frames.CONTINUATION, bytes(http2_frames.MAX_HEADER_BYTES + 1)),
            0.0,
        )


def test_rejects_frames_between_header_fragments() -> None:
    found = begun()
    with pytest.raises(LimitExceeded, match="expected CONTINUATION"):
        found.feed(frame(http2_frames.HEADERS) + frame(http2_frames.PING), 0.0)


def test_limits_length_of_control_frames() -> None:
    with pytest.raises(LimitExceeded, match=f"at most {http2_frames.MAX_CONTROL_BYTES} bytes of SETTINGS"):
        begun().feed(frame(http2_frames.SETTINGS, bytes(http2_frames.MAX_CONTROL_BYTES + 1))[:9], 0.0)


def test_goaway_has_the_reason() -> None:
    content = http2_frames.goaway_frame("expected less")
    assert [*FrameHeads().feed(content)] == [(http2_frames.GOAWAY, 0, len(content) - 9, 0)]
    assert content.endswith(b"\0\0\0\x0bexpected less")

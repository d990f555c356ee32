from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from weightd.daemon.clients.listening import listen
from weightd.daemon.host.sockets import receive, send

LIMIT_MS = 20_000


Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


def test_owner_and_group_may_connect(tmp_path: Path, context: zmq.Context[Socket]) -> None:
    with listen(context, f"ipc://{tmp_path}/s"):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660


def test_who_announces_a_larger_frame_than_there_may_be_is_hung_up(
    tmp_path: Path, context: zmq.Context[Socket]
) -> None:
    address = f"ipc://{tmp_path}/s"
    client, other = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    with listen(context, address, max_frame_bytes=1000) as router, client, other:
        for each in (client, other):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(address)
        client.send(bytes(1001))
        assert monitor.poll(LIMIT_MS)
        other.send(bytes(1000))
        assert router.poll(LIMIT_MS)
        assert [len(each.frames[0]) for each in receive(router)] == [1000]
        client.disable_monitor()
        monitor.close()


def test_it_is_told_that_nobody_is_there(tmp_path: Path, context: zmq.Context[Socket]) -> None:
    with listen(context, f"ipc://{tmp_path}/s") as router:
        assert not send(router, b"nobody", [b"an answer"])

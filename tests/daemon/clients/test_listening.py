from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq

from weightd.daemon.clients.listening import listen
from weightd.daemon.host.sockets import receive, send

LIMIT_MS = 20_000

Socket = zmq.Socket[bytes]


@pytest.mark.usefixtures("router")
def test_owner_and_group_may_connect(tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660


def test_who_announces_a_larger_frame_than_there_may_be_is_hung_up(context: zmq.Context[Socket], address: str) -> None:
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


def test_it_is_told_that_nobody_is_there(router: Socket) -> None:
    assert not send(router, b"nobody", [b"an answer"])

"""Protection from hostile ZeroMQ peers: forged addresses and guessed routing ids."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightd_daemon.platform.zmq_sockets import peer_pid

LIMIT_MS = 20_000


@pytest.mark.parametrize(
    ("address", "pid"),
    [
        *(
            (each, None)
            for each in ("", "127.0.0.1", "::1", "fd00:1::1", "fd00:1:1:2", "localhost:1::1", "localhost:1:1")
        ),
        *(
            (each, None)
            for each in ("localhost:1:1:2:3", "localhost:-1:1:2", "localhost:\u0660:1:2", "xlocalhost:1:1:2")
        ),
        ("localhost:5:6:7", 7),
    ],
)
def test_peer_pid_needs_a_unix_address(address: str, pid: int | None) -> None:
    frame: Any = SimpleNamespace(get={"Peer-Address": address}.__getitem__)
    assert peer_pid(frame) == pid


# libzmq gives peers without a routing id one that begins with a zero byte and counts up, and it aborts if the next
# id is taken. This script takes the ids that follow `n` calls of rand(), then lets peers without an id connect.
_SQUAT = """
import ctypes, sys, zmq
from weightd_daemon.platform.zmq_sockets import bind_router, receive_batch
libc = ctypes.CDLL(None)
libc.rand.restype = ctypes.c_uint
drawn = [libc.rand() for _ in range(6)]
libc.srand(1)  # as if never seeded
context, address = zmq.Context(), "ipc://" + sys.argv[1]
first = bind_router(context, address)
router = bind_router(context, address + "2")
peers = []

def connect_peer(routing_id):
    peer = context.socket(zmq.DEALER)
    peers.append(peer)
    if routing_id:
        peer.setsockopt(zmq.ROUTING_ID, routing_id)
    peer.connect(address + "2")
    peer.send(b"")
    assert router.poll(20000)
    return next(receive_batch(router)).peer

for low, high in zip(drawn, drawn[1:]):
    begin = low | high << 31 & 0xFFFFFFFF
    for step in range(1, 4):
        connect_peer(b"\\0" + (begin + step & 0xFFFFFFFF).to_bytes(4, "big"))
print(*[connect_peer(b"").hex() for _ in range(3)], flush=True)
context.destroy(linger=0)
"""


def test_routing_ids_are_unpredictable(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen([sys.executable, "-c", _SQUAT, f"{tmp_path}/{name}"], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    ids = [run.communicate(timeout=LIMIT_MS / 1000)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert [len(each) for each in ids] == [3, 3]
    assert set(ids[0]).isdisjoint(ids[1])

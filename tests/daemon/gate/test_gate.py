"""A gate in a thread, between clients and a daemon that does what no daemon should."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from testkit.waiting import until
from weightd.daemon.gate import gate as module
from weightd.daemon.gate import link, upkeep
from weightd.daemon.gate.gate import Gate
from weightd.daemon.gate.link import Met, Said, Terms
from weightd.daemon.gate.memory import Memory
from weightd.shared.stream import Stream

LIMIT_MS = 20_000
MIB = 2**20
TERMS = Terms("default", "", 2**30, 64 * MIB, 0, "", None, b"twin", b"too long")

Socket = zmq.Socket[bytes]


class Daemon:
    """The other end of a gate's link, which takes what the gate passes to it, and reads only if it is told to."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(LIMIT_MS / 1000)
        self.link = Stream(connection, takes_descriptors=True)
        connection.settimeout(LIMIT_MS / 1000)
        self.lines: list[str] = []
        self.lanes: list[Stream] = []

    def meet(self) -> Stream:
        """Wait for somebody new."""
        count = len(self.lanes)
        while len(self.lanes) == count:
            self.hear()
        return self.lanes[-1]

    def told(self) -> bool:
        """Hear the gate, unless it has said something for the log; return whether it has."""
        if not self.lines:
            self.hear()
        return bool(self.lines)

    def hear(self) -> None:
        for message in self.link.receive():
            said = link.of_gate(message.frames[0])
            if isinstance(said, Met):
                self.lanes.append(Stream(socket.socket(fileno=self.link.descriptors.popleft())))
                self.lanes[-1].connection.settimeout(LIMIT_MS / 1000)
            elif isinstance(said, Said):
                self.lines.append(said.text)


@pytest.fixture
def daemon(router: Socket, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 4 * MIB)
    monkeypatch.setattr(module, "STUCK_S", 0.2)
    monkeypatch.setattr(upkeep, "OWN_BYTES", 2**30)  # the tests' own memory is none of a gate's
    ours, its = socket.socketpair()
    memory = Memory()
    made = Daemon(ours)
    gate = Gate(router, Stream(its), TERMS, memory)
    router.bind(address)
    thread = threading.Thread(target=gate.run)
    thread.start()
    yield made
    for each in (*made.lanes, made.link):
        each.close()
    thread.join()
    gate.close()
    its.close()
    memory.close()


def test_of_whom_the_daemon_reads_nothing_he_is_hung_up_and_others_go_on(
    daemon: Daemon, connect: Callable[..., Socket]
) -> None:
    stuck = connect()
    daemon.meet()
    for _ in range(8):
        stuck.send_multipart([b"", b"", bytes(MIB)])
    client = connect()
    lane = daemon.meet()
    [hello] = lane.receive()
    assert [*hello.frames] == [b"hello"]
    until(daemon.told, "it is hung up")
    assert "the daemon has read none of " in daemon.lines[0]
    client.send(b"again")
    [again] = lane.receive()
    assert [*again.frames] == [b"again"]


def test_of_those_who_do_not_read_he_goes_for_whom_most_is_kept(daemon: Daemon, connect: Callable[..., Socket]) -> None:
    lanes: list[Stream] = []
    for size in (20, 28, 20):
        connect(high_water_mark=1)
        lanes.append(daemon.meet())
        lanes[-1].connection.setblocking(False)
        # Some are read by the library, and one waits.
        for _ in range(4):
            lanes[-1].send([b"", b"", bytes(size * MIB)])
    gone: list[Stream] = []
    while not gone:
        _, writable, _ = select.select([], lanes, [], LIMIT_MS / 1000)
        assert writable
        for lane in writable:
            try:
                lane.flush()
            except ConnectionError:
                gone.append(lane)
    assert gone == lanes[1:2], daemon.told() and daemon.lines
    until(daemon.told, "it is told")
    assert "it has not read " in daemon.lines[0]

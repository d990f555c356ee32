"""The simulated socket pair behaves as the kernel's: the same calls on both return the same results."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from testkit.examples import examples

from .kernel import EMPTY, Pair, Result

_HOLDERS = ("a", "b", "c")
_FEW = 5  # messages: fewer than fit into the kernel's queue

_HOLDER = st.sampled_from(_HOLDERS)


def received(end: socket.socket) -> Any:
    """Receive a message, and name the result as `Pair` does."""
    try:
        data = end.recv(64, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return Result.NOTHING
    except ConnectionResetError:
        return Result.RESET
    return struct.unpack("<Q", data)[0] if data else Result.END


def sent(end: socket.socket, data: bytes) -> Any:
    try:
        end.send(data, socket.MSG_DONTWAIT)
    except (BrokenPipeError, ConnectionResetError):
        return Result.BROKEN
    return None


class PairMachine(RuleBasedStateMachine):
    """A simulated pair beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(1, _FEW)
        self.client, first = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends = {holder: first.dup() for holder in _HOLDERS}
        first.close()
        self.pair.holders.update(_HOLDERS)
        self.count = 0

    @precondition(lambda self: self.pair.has_client and len(self.pair.to_workers) < _FEW)
    @rule(is_empty=st.sampled_from([False, False, False, True]))
    def client_send(self, is_empty: bool) -> None:
        self.count += 1
        data = b"" if is_empty else struct.pack("<Q", self.count)
        simulated = self.pair.client_send(EMPTY if is_empty else self.count)
        assert simulated is sent(self.client, data)

    @precondition(lambda self: self.pair.has_client)
    @rule()
    def client_receive(self) -> None:
        assert self.pair.client_receive() == received(self.client)

    @rule(holder=_HOLDER)
    def worker_receive(self, holder: str) -> None:
        if holder in self.pair.holders:
            assert self.pair.worker_receive() == received(self.ends[holder])

    @rule(holder=_HOLDER)
    def worker_send(self, holder: str) -> None:
        if holder in self.pair.holders and len(self.pair.to_client) < _FEW:
            self.count += 1
            assert self.pair.worker_send(self.count) is sent(self.ends[holder], struct.pack("<Q", self.count))

    @rule(holder=_HOLDER)
    def poll(self, holder: str) -> None:
        if holder in self.pair.holders:
            readable, _, _ = select.select([self.ends[holder]], [], [], 0)
            assert bool(readable) == self.pair.is_readable

    @rule(holder=_HOLDER)
    def shut(self, holder: str) -> None:
        if holder in self.pair.holders:
            self.pair.is_shut = True
            with contextlib.suppress(OSError):
                self.ends[holder].shutdown(socket.SHUT_RD)

    @rule(holder=_HOLDER)
    def close(self, holder: str) -> None:
        # It depends on the kernel's version whether an empty message counts as unread.
        if holder in self.pair.holders and EMPTY not in self.pair.to_workers:
            self.pair.close(holder)
            self.ends[holder].close()

    @rule()
    def close_client(self) -> None:
        self.pair.close_client()
        self.client.close()

    def teardown(self) -> None:
        self.client.close()
        for end in self.ends.values():
            end.close()


TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)

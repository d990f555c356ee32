"""Scripted connection of a child process."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Union

from weightd_protocol.codec import decode, encode
from weightd_protocol.messages.ranks import PredictDone
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    AnnounceSelfTest,
    BatchMismatch,
    ChildMessage,
    ContinueSelfTest,
    Forked,
    PredictCancelled,
    PredictFailed,
    PredictResult,
)

PAUSE: Sequence[Any] = ()


class Script:
    """A connection that returns the given messages one after another and records the messages sent.

    None stands for a new daemon, and PAUSE for a receive that times out. A receive beyond the last message is an error.
    """

    ready: Sequence[int] = ()

    def __init__(self, *orders: Optional[Sequence[Any]]) -> None:
        self.orders = list(orders)
        self.sent: List[Union[ChildMessage, Forked]] = []
        self.frames: List[List[bytes]] = []
        self.probed: List[AnnounceSelfTest] = []
        # Number of messages in each call of `reply`.
        self.reply_counts: List[int] = []
        # Number of further messages that the next receive returns with a timeout, and without one.
        self.ahead = 0
        self.late = 0

    def receive(self, timeout_s: float = -1) -> Optional[List[Sequence[Any]]]:
        if timeout_s:
            count, self.ahead = 1 + self.ahead, 0
        else:
            count, self.late = self.late, 0
        orders = [self.orders.pop(0) for _ in range(count)]
        if orders == [PAUSE]:
            assert timeout_s > 0
            return []
        return None if orders == [None] else [order for order in orders if order is not None]

    def send(self, frames: Sequence[Any]) -> bool:
        sent = decode(list(map(bytes, frames)), FROM_CHILD)
        assert not isinstance(sent, (PredictResult, PredictDone, PredictFailed, PredictCancelled)), (
            "a result must be sent by `reply`"
        )
        if isinstance(sent, AnnounceSelfTest):
            self.probed.append(sent)
            if sent.cases:
                self.orders.insert(0, encode(ContinueSelfTest()))
            return True
        self.sent.append(sent)
        self.frames.append([])
        return True

    def reply(self, *messages: Sequence[Any]) -> None:
        self.reply_counts.append(len(messages))
        for frames in messages:
            kept = list(map(bytes, frames))
            answer = decode(kept, FROM_CHILD)  # this checks the lengths, too
            assert isinstance(answer, (PredictResult, PredictDone, PredictFailed, PredictCancelled, BatchMismatch))
            self.sent.append(answer)
            self.frames.append(kept[2:])

"""What a generation wants done. It decides; the server does."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightd_protocol.messages.ranks import JoinGroup, RunSelfTest
from weightd_protocol.messages.worker import AllowAttach, Attach, Build, ContinueSelfTest, Stop, TrimStore


class Role(enum.Enum):
    """What a child is for."""

    HOLDER = "holder"
    WORKER = "worker"
    RANK = "rank"  # has a slice of the model, and runs each predict with the other ranks of its unit
    BROKER = "broker"  # lets the ranks of its unit find each other; takes no request


@dataclass(frozen=True)
class TakeSnapshot:
    """Have a snapshot of the source: a digested copy of its files; answer with `on_snapshot_taken` or `fail`."""


@dataclass(frozen=True)
class Spawn:
    """Start a child; `template` is the holder that it is forked of, "" for none."""

    name: str
    role: Role
    template: str = ""


@dataclass(frozen=True)
class Send:
    """Send an order to a child."""

    name: str
    order: Build | ContinueSelfTest | AllowAttach | Attach | JoinGroup | RunSelfTest | TrimStore | Stop


@dataclass(frozen=True)
class Kill:
    """Kill a child that has not left when it should have; `abort`: in a way that leaves its stacks in its log."""

    name: str
    abort: bool = False


@dataclass(frozen=True)
class AddSlot:
    """The slot of this name may be given requests from now on."""

    name: str


@dataclass(frozen=True)
class RemoveSlot:
    """The slot of this name gets no further request; what it still has is its own to answer, or lost."""

    name: str


@dataclass(frozen=True)
class DeleteFiles:
    """Nothing is left of the generation: its files can go."""


Action = TakeSnapshot | Spawn | Send | Kill | AddSlot | RemoveSlot | DeleteFiles

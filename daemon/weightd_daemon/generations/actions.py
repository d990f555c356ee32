"""The actions that a generation requests; the daemon performs them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightd_protocol.messages.ranks import JoinGroup, RunSelfTest
from weightd_protocol.messages.worker import AllowAttach, Attach, Build, ContinueSelfTest, Stop, TrimStore


class Role(enum.Enum):
    """The role of a child process."""

    HOLDER = "holder"
    WORKER = "worker"
    RANK = "rank"  # has a slice of the model, and runs each predict with the other ranks of its group
    BROKER = "broker"  # lets the ranks of its group find each other; serves no requests


@dataclass(frozen=True)
class TakeSnapshot:
    """Take the snapshot of the source, and report `on_snapshot_taken` or `fail`."""


@dataclass(frozen=True)
class Spawn:
    """Start a child; `template` is the holder from which it is forked, or ""."""

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
    """Kill a child; `abort`: with a signal that makes it log its stacks."""

    name: str
    abort: bool = False


@dataclass(frozen=True)
class AddSlot:
    """Dispatch requests to the slot of this name from now on."""

    name: str


@dataclass(frozen=True)
class RemoveSlot:
    """Dispatch no more requests to the slot of this name; its processes may still finish their batches."""

    name: str


@dataclass(frozen=True)
class DeleteFiles:
    """Delete the files of the generation, which has ended."""


Action = TakeSnapshot | Spawn | Send | Kill | AddSlot | RemoveSlot | DeleteFiles

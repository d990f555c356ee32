"""The actions that a generation requests and that the daemon performs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightd_protocol.messages.ranks import JoinGroup, RunSelfTest
from weightd_protocol.messages.worker import Attach, Build, ContinueSelfTest, Stop, TrimStore
from weightd_protocol.messages.worker_common import AllowAttach


class Role(enum.Enum):
    """The role of a child process."""

    HOLDER = "holder"
    WORKER = "worker"
    RANK = "rank"  # holds a slice of the model and runs each predict with the other ranks of its group
    BROKER = "broker"  # lets the ranks of its group find each other, and serves no requests


@dataclass(frozen=True)
class TakeSnapshot:
    """Take a snapshot of the model files that the generation loads.

    The daemon then calls `on_snapshot_taken` of the generation, or `fail` if the snapshot cannot be taken.
    """


@dataclass(frozen=True)
class Spawn:
    """Start a child process. If `template` is not "", it names the holder from which the child is forked."""

    name: str
    role: Role
    template: str = ""


@dataclass(frozen=True)
class Send:
    """Send an order to the child process with this name."""

    name: str
    order: Build | ContinueSelfTest | AllowAttach | Attach | JoinGroup | RunSelfTest | TrimStore | Stop


@dataclass(frozen=True)
class Kill:
    """Kill the child process with this name; with `abort`, by a signal on which the child logs its stacks."""

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
    """Delete the page store, the logs and the other files of the generation, which has ended."""


Action = TakeSnapshot | Spawn | Send | Kill | AddSlot | RemoveSlot | DeleteFiles

"""What a generation wants done. It decides; the server does."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightd.protocol.worker_messages import Attach, Build, Settle, Stop


class Role(enum.Enum):
    """What a child is for."""

    HOLDER = "holder"
    WORKER = "worker"


@dataclass(frozen=True)
class Pin:
    """Copy and digest the model's files; answer with `pinned` or `failed`."""


@dataclass(frozen=True)
class Spawn:
    """Start a child."""

    name: str
    role: Role


@dataclass(frozen=True)
class Send:
    """Send an order to a child."""

    name: str
    order: Build | Attach | Settle | Stop


@dataclass(frozen=True)
class Kill:
    """Kill a child that has not left when it should have."""

    name: str


@dataclass(frozen=True)
class Enlist:
    """The worker may be given requests from now on."""

    name: str


@dataclass(frozen=True)
class Dismiss:
    """The worker gets no further request; what it still has is its own to answer, or lost."""

    name: str


Action = Pin | Spawn | Send | Kill | Enlist | Dismiss

"""Kinds of faults: names, targets and effects."""

from __future__ import annotations

import enum
import platform
from collections.abc import Collection


class Fault(enum.Enum):
    """A fault of the service; the value is its name on the command line."""

    KILL_WORKER = "kill-worker"
    SEGV_WORKER = "segv-worker"
    HANG_WORKER = "hang-worker"
    KILL_HOLDER = "kill-holder"
    KILL_BROKER = "kill-broker"
    KILL_FORK_SERVER = "kill-fork-server"
    STOP_FORK_SERVER = "stop-fork-server"
    KILL_PROXY = "kill-proxy"
    STOP_PROXY = "stop-proxy"
    KILL_ZYGOTE = "kill-zygote"
    TRUNCATE_STORE = "truncate-store"
    REPLACE_STORE = "replace-store"
    OVERWRITE_STORE = "overwrite-store"
    FLOOD = "flood"
    KILL_CLIENT = "kill-client"
    DEAF_CLIENT = "deaf-client"
    DEAF_CROWD = "deaf-crowd"
    POISON = "poison"
    GARBAGE_FRAMES = "garbage-frames"
    GARBAGE_BYTES = "garbage-bytes"
    UNFINISHED = "unfinished"
    TRICKLE = "trickle"
    DESCRIPTORS = "descriptors"
    SCRIBBLE = "scribble"
    CANCEL = "cancel"
    UPDATE = "update"
    RELOAD = "reload"
    UNLOAD = "unload"
    KILL_DAEMON = "kill-daemon"


ALL = frozenset(Fault)
# For a model on ranks, each rank counts as a worker; its ranks exit with the broker.
AT_RANKS = frozenset({Fault.KILL_WORKER, Fault.SEGV_WORKER, Fault.HANG_WORKER, Fault.KILL_BROKER})
AT_STORES = frozenset({Fault.TRUNCATE_STORE, Fault.OVERWRITE_STORE})
# Each ends at least one worker of a model, sooner or later.
LETHAL = AT_RANKS | AT_STORES
# Faults for which the daemon blames the requests of the worker that exits, once each.
BLAMING = frozenset({Fault.SEGV_WORKER, Fault.HANG_WORKER})
# The model that loads on demand; the fault UNLOAD unloads it.
ON_DEMAND = "elastic"
# Faults that close the connections of ZeroMQ clients only.
PROXIES = frozenset({Fault.KILL_PROXY, Fault.KILL_ZYGOTE})
# Faults that the clients cause themselves, at any time.
BEHAVIOUR = frozenset({Fault.CANCEL})

# Faults that this machine cannot produce, with the reason.
LACKING = (
    {}
    if platform.machine() == "x86_64"
    else {Fault.POISON: "integer overflow in a division raises SIGFPE only on x86-64"}
)


class UnknownFaultError(ValueError):
    """Error: the command line names an unknown fault."""


def parse(text: str) -> frozenset[Fault]:
    """Return the faults of a comma-separated list of "all", names, and names to exclude with a leading "-"."""
    names = {"all": ALL, **{fault.value: frozenset({fault}) for fault in Fault}}
    chosen: frozenset[Fault] = frozenset()
    for item in text.split(","):
        name = item.removeprefix("-")
        if name not in names:
            raise UnknownFaultError(f"no fault {name}; there are: {', '.join(names)}")
        chosen = chosen - names[name] if item.startswith("-") else chosen | names[name]
    return chosen


def text_of(faults: Collection[Fault]) -> str:
    """Return the text from which `parse` makes these faults."""
    return "all" if set(faults) >= ALL else ",".join(fault.value for fault in Fault if fault in faults)

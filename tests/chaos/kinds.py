"""The faults: what each is called, what it can do to whom, and what of weightd it needs."""

from __future__ import annotations

import dataclasses
import enum
import platform
from collections.abc import Collection, Mapping

from weightd.client.client import Pending
from weightd.daemon.config.daemon import DaemonConfig
from weightd.daemon.config.model import ModelConfig


class Fault(enum.Enum):
    """Something that happens to the service; the value is its name on the command line."""

    KILL_WORKER = "kill-worker"
    SEGV_WORKER = "segv-worker"
    HANG_WORKER = "hang-worker"
    KILL_HOLDER = "kill-holder"
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
    CANCEL = "cancel"
    UPDATE = "update"
    RELOAD = "reload"
    KILL_DAEMON = "kill-daemon"


# Each ends at least one worker of a model, sooner or later.
LETHAL = frozenset(
    {Fault.KILL_WORKER, Fault.SEGV_WORKER, Fault.HANG_WORKER, Fault.TRUNCATE_STORE, Fault.OVERWRITE_STORE}
)
# What a worker that ends by it was running is blamed for that: by each of these once.
BLAMING = frozenset({Fault.SEGV_WORKER, Fault.HANG_WORKER})
# What the clients do by themselves, at any time.
BEHAVIOUR = frozenset({Fault.CANCEL})

# What every version of weightd must bear.
BASIC = frozenset(
    {
        Fault.KILL_WORKER,
        Fault.SEGV_WORKER,
        Fault.KILL_HOLDER,
        Fault.TRUNCATE_STORE,
        Fault.REPLACE_STORE,
        Fault.FLOOD,
        Fault.KILL_CLIENT,
        Fault.DEAF_CLIENT,
        Fault.GARBAGE_FRAMES,
        Fault.GARBAGE_BYTES,
        Fault.UPDATE,
        Fault.KILL_DAEMON,
    }
)
ALL = frozenset(Fault)

_MODEL_KEYS = frozenset(field.name for field in dataclasses.fields(ModelConfig))
_DAEMON_KEYS = frozenset(field.name for field in dataclasses.fields(DaemonConfig))


class UnknownFaultError(ValueError):
    """The command line names a fault that there is not."""


def parse(text: str) -> frozenset[Fault]:
    """Return the faults of a list with commas: "all", "basic", the name of one, or "-" and what to leave out."""
    names = {"all": ALL, "basic": BASIC, **{fault.value: frozenset({fault}) for fault in Fault}}
    chosen: frozenset[Fault] = frozenset()
    for item in text.split(","):
        name = item.removeprefix("-")
        if name not in names:
            raise UnknownFaultError(f"no fault {name}; there are: {', '.join(names)}")
        chosen = chosen - names[name] if item.startswith("-") else chosen | names[name]
    return chosen


def text_of(faults: Collection[Fault]) -> str:
    """Return what `parse` would make these faults of."""
    chosen = frozenset(faults)
    if chosen in (ALL, BASIC):
        return "all" if chosen == ALL else "basic"
    return ",".join(fault.value for fault in Fault if fault in chosen)


def lacking() -> dict[Fault, str]:
    """Return the faults that this weightd offers no means against, each with what is missing."""
    keys = _MODEL_KEYS | _DAEMON_KEYS
    needs = {
        Fault.HANG_WORKER: ["predict_timeout", "watchdog"],
        Fault.OVERWRITE_STORE: ["canary_interval"],
        Fault.RELOAD: ["predict_timeout"],  # came together
        Fault.DEAF_CROWD: ["max_memory_bytes"],
        Fault.UNFINISHED: ["max_memory_bytes"],
    }
    missing = {
        **({} if platform.machine() == "x86_64" else {Fault.POISON: "a division that overflows is no trap here"}),
        **_lacking_keys(needs, keys),
    }
    if not hasattr(Pending, "cancel"):
        missing[Fault.CANCEL] = "no Pending.cancel"
    return missing


def _lacking_keys(needs: Mapping[Fault, list[str]], keys: frozenset[str]) -> dict[Fault, str]:
    return {
        fault: f"no {', '.join(sorted(set(wanted) - keys))} in the configuration"
        for fault, wanted in needs.items()
        if not keys.issuperset(wanted)
    }


def settings(values: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return those of the settings that the table [daemon] knows, and those that a model's table knows."""
    daemon = {key: value for key, value in values.items() if key in _DAEMON_KEYS}
    return daemon, {key: value for key, value in values.items() if key in _MODEL_KEYS}
